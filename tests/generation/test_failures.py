"""A rank that dies: every other rank raises PeerLost with that rank as culprit, and keeps running."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.liveness import verdict
from support.processes import Here, Rank, StartJob, place
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

LARGE = 64 << 20  # bytes


def fork_children(how: str) -> None:
    """Start children that outlive this process, like data loaders."""
    if how == "fork" and os.fork() == 0:
        signal.pause()
        os._exit(0)
    if how == "multiprocessing":
        context = multiprocessing.get_context("fork")
        for _ in range(2):
            context.Process(target=time.sleep, args=(600,), daemon=True).start()


def survive(here: Here, group: gw.Group, error: gw.GradwireError) -> None:
    """Report an error and the error of the next call."""
    here.send_error(error)
    try:
        group.barrier()
    except gw.GradwireError as again:
        here.send_error(again)
    here.receive()


def reduces_until_broken(here: Here, nbytes: int, children: str) -> None:
    group = gw.init()
    fork_children(children)
    x = np.ones(nbytes // 4, np.float32)
    group.all_reduce(x, op="mean")
    here.send(ready=True)
    try:
        while True:
            group.all_reduce(x, op="mean")  # here
    except gw.GradwireError as error:
        survive(here, group, error)


def idles(here: Here, how: str) -> None:
    group = gw.init()
    group.barrier()
    here.send(ready=True)
    try:
        if how == "recv":
            group.recv(np.zeros(4), src=int(here.receive()), timeout=60)
        elif how == "recv from anyone":
            here.receive()
            group.recv(np.zeros(4), timeout=60)
        elif how == "send":
            group.send(np.zeros(1 << 20), dst=int(here.receive()), timeout=60)
        else:
            here.receive()
            group.barrier()
    except gw.GradwireError as error:
        survive(here, group, error)


def all_but(ranks: list[Rank], *numbers: int) -> list[Rank]:
    return [rank for rank in ranks if rank.number not in numbers]


def check_lost(rank: Rank, culprit: int, operation: str) -> dict[str, Any]:
    first = rank.receive()
    assert (first["error"], first["culprit"], first["operation"]) == ("PeerLost", culprit, operation), first
    assert first["generation"] == 1
    again = rank.receive()
    assert (again["error"], again["culprit"], again["operation"]) == ("PeerLost", culprit, "barrier"), again
    assert rank.running()
    return first


@pytest.mark.parametrize(
    ("victim", "nbytes", "children"),
    [
        (0, 8, "none"),
        (3, 8, "none"),
        (2, 8, "fork"),
        (0, 8, "multiprocessing"),
        (0, LARGE, "none"),
        (2, LARGE, "none"),
        (0, LARGE, "fork"),
        (1, LARGE, "multiprocessing"),
    ],
)
def test_rank_killed_in_a_collective_is_the_culprit_of_peer_lost(
    job: StartJob, victim: int, nbytes: int, children: str
) -> None:
    with job(reduces_until_broken, 3 if nbytes == LARGE else 4, nbytes, children) as ranks:
        for rank in ranks:
            assert rank.receive()["ready"]
        ranks[victim].signal()
        for rank in all_but(ranks, victim):
            lost = check_lost(rank, victim, "all_reduce")
            said = rf"rank {victim} \(host \S+, pid {ranks[victim].pid}\) (died|closed its link)"
            where = rf" during all_reduce #\d+, {place(reduces_until_broken, '# here')}"
            assert re.fullmatch(rf"{said}({where})?", lost["text"]), lost["text"]


@pytest.mark.parametrize("how", ["idle", "recv", "recv from anyone", "send"])
@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_outside_a_collective_is_the_culprit_of_peer_lost(job: StartJob, victim: int, how: str) -> None:
    operation = {"idle": "barrier", "send": "send"}.get(how, "recv")
    with job(idles, 3, how) as ranks:
        for rank in ranks:
            assert rank.receive()["ready"]
        if how != "idle":
            for rank in all_but(ranks, victim):
                rank.send(victim)
        ranks[victim].signal()
        if how == "idle":
            for rank in all_but(ranks, victim):
                rank.send()
        for rank in all_but(ranks, victim):
            check_lost(rank, victim, operation)


def reduces_until_several_are_lost(here: Here) -> None:
    verdict.DECISION_SECONDS = 0.5  # long enough for both ranks to end on a busy machine
    reduces_until_broken(here, 8, "none")


@pytest.mark.parametrize("order", [(1, 3), (3, 1)])
def test_peer_lost_after_ranks_are_killed_at_once_names_the_lowest(job: StartJob, order: tuple[int, int]) -> None:
    with job(reduces_until_several_are_lost, 4) as ranks:
        for rank in ranks:
            assert rank.receive()["ready"]
        for victim in order:
            ranks[victim].signal()
        for rank in all_but(ranks, *order):
            check_lost(rank, 1, "all_reduce")
