"""Tests a program that makes every kind of call, on 2, 3, 5 and 8 processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from conformance.cases import Case
from conformance.conftest import HOSTS
from gradwire.collectives import COLLECTIVES, REDUCING, ROOTED, algorithms
from gradwire.host import native_core
from gradwire.topology import Topology

KINDS = (("float32", "mean"), ("float16", "sum"), ("int64", "max"), ("complex128", "prod"), ("bfloat16", "min"))


def calls_of(size: int) -> Iterator[Case]:
    turn = 0
    for collective in COLLECTIVES:
        parts = size * size if collective == "all_to_all" else size
        for algorithm in ("auto", *algorithms(collective)):
            for kind in range(5 if size < 5 else 2):  # fewer calls, because more processes than cores are slow
                turn += 1
                dtype, op = KINDS[(turn + kind) % 5]
                rows = (turn * 311 % 2000,) if collective in ("all_reduce", "reduce", "broadcast") else None
                yield Case(
                    collective,
                    dtype,
                    rows or tuple((turn + part) * 7 % 30 for part in range(parts)),
                    op if collective in REDUCING else "sum",
                    turn % size if collective in ROOTED else 0,
                    algorithm,
                    layout=("flat", "strided")[turn % 2],
                )


def program(size: int, hosts: str, transport: str) -> dict[str, Any]:
    """The program of every rank; its results are compared in the parent process."""
    os.environ["GRADWIRE_HOST"] = hosts[int(os.environ["GRADWIRE_RANK"])]
    with gw.init(transport=transport) as group:
        rank = group.rank
        found: dict[str, Any] = {"hosts": group.topology.hosts}
        found["calls"] = [case.call(group, case.input(rank, size), rank, size) for case in calls_of(size)]
        streams = [group.stream() for _ in range(3)]
        works = [
            case.call(streams[turn % 3], case.input(rank, size), rank, size)
            for turn, case in enumerate(calls_of(size))
            if turn % 5 == 0
        ]
        for stream in streams:
            stream.synchronize()
        found["works"] = [work.result for work in works]
        found["values"] = group.all_gather_values({"rank": rank, "text": "größer", "nested": [None, 1.5, True]})
        found["value"] = group.broadcast_value([rank], root=size - 1)
        subgroup = group.subgroup(range(rank % 2, size, 2))
        found["subgroup"] = subgroup.rank, subgroup.size, subgroup.all_reduce(rank)
        received = np.zeros(50_000, int)
        group.sendrecv(np.full(50_000, rank), received, (rank + 1) % size, (rank - 1) % size, tag=1)
        found["sendrecv"] = set(received.tolist())
        found["named"] = group.all_reduce_named({"w": np.full((2, 2), rank), "b": np.ones(1, np.float32)})
        group.barrier()
        return found


@pytest.mark.parametrize(
    ("size", "transport"),
    [
        (2, "auto"),
        (3, "auto"),
        (3, "grpc"),
        pytest.param(5, "auto", marks=pytest.mark.slow),
        pytest.param(8, "auto", marks=pytest.mark.slow),
    ],
)
def test_processes_making_every_kind_of_call_agree_with_the_oracle(size: int, transport: str) -> None:
    found = gw.launch(program, size, (size, HOSTS[size], transport))
    topology = Topology.of(list(HOSTS[size]))
    sharing = native_core.available() and len(topology.hosts) < size and transport == "auto"
    inside = "shm" if sharing else "tcp"
    cases = list(calls_of(size))
    for position, case in enumerate(cases):
        case.check(case.inputs(size), [answers["calls"][position] for answers in found], topology, inside)
    for position, case in enumerate(cases[::5]):
        case.check(case.inputs(size), [answers["works"][position] for answers in found], topology, inside)
    for rank, answers in enumerate(found):
        assert answers["hosts"] == topology.hosts
        assert [value["rank"] for value in answers["values"]] == list(range(size))
        assert answers["value"] == [size - 1]
        members = range(rank % 2, size, 2)
        assert answers["subgroup"] == (rank // 2, len(members), sum(members))
        assert answers["sendrecv"] == {(rank - 1) % size}
        assert answers["named"]["w"].tolist() == [[sum(range(size))] * 2] * 2
        assert answers["named"]["b"].tolist() == [size]
