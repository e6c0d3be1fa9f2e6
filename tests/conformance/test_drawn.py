"""Tests random calls on groups, subgroups and streams against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.cases import Case
from conformance.strategies import cases, subsets
from gradwire.collectives import REDUCING
from gradwire.group import Group
from gradwire.group.stream import Stream
from gradwire.topology import Topology
from support.array_bits import assert_same, bits
from support.crews import Crew

FEW = settings.default.max_examples // 4 if settings.default else 25
IN_PLACE = ("all_reduce", "broadcast")


def check_call(crew: Crew, ranks: tuple[int, ...], case: Case) -> None:
    """Make a call on a subgroup of these ranks; check results, returned objects and inputs afterwards."""
    size = len(ranks)

    def call(group: Group) -> tuple[Any, Any] | None:
        if group.rank not in ranks:
            return None
        if size < group.size:
            group = group.subgroup(ranks)
        x = case.input(group.rank, size)
        return x, case.call(group, x, group.rank, size)

    answers = [answer for answer in crew.run(call) if answer is not None]
    inputs = case.inputs(size)
    case.check(inputs, [result for _, result in answers], restricted(crew.topology, ranks), crew.inside(ranks))
    for rank, (x, result) in enumerate(answers):
        in_place = case.collective in IN_PLACE and not (case.out and case.collective in REDUCING)
        assert (result is x) == in_place
        if not in_place:
            assert_same(x, inputs[rank], f"x on rank {rank} after {case}")


def restricted(topology: Topology, ranks: tuple[int, ...]) -> Topology:
    return Topology.of([str(topology.host_of(rank)) for rank in ranks])


@settings(max_examples=FEW)
@given(data=st.data())
def test_random_call_agrees_with_the_oracle(crew: Crew, data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from(subsets(crew.size)))
    check_call(crew, ranks, data.draw(cases(len(ranks))))


@pytest.mark.soak
@given(data=st.data())
def test_many_random_calls_agree_with_the_oracle(crew: Crew, data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from(subsets(crew.size)))
    check_call(crew, ranks, data.draw(cases(len(ranks))))


@settings(max_examples=FEW // 2)
@given(data=st.data())
def test_random_calls_on_streams_and_group_run_in_program_order(crew: Crew, data: st.DataObject) -> None:
    """Calls on three streams and on the group itself run in the order in which the program makes them."""
    drawn = data.draw(st.lists(st.tuples(cases(crew.size), st.integers(0, 3)), min_size=1, max_size=8))

    def program(group: Group) -> list[Any]:
        streams = [group.stream() for _ in range(3)]
        queues: list[Group | Stream] = [group, *streams]
        answers = [
            case.call(queues[where], case.input(group.rank, group.size), group.rank, group.size)
            for case, where in drawn
        ]
        for stream in streams:
            stream.synchronize()
        return [answer.result if where else answer for answer, (_, where) in zip(answers, drawn, strict=True)]

    results = crew.run(program)
    for position, (case, _) in enumerate(drawn):
        case.check(case.inputs(crew.size), [result[position] for result in results], crew.topology, crew.inside())


@settings(max_examples=FEW // 2)
@given(data=st.data())
def test_queued_call_sees_what_earlier_calls_wrote(crew: Crew, data: st.DataObject) -> None:
    """Arrays, strided ones too, are read when the work runs, not when it is queued."""
    case = data.draw(cases(crew.size, ("all_reduce",)))
    times = data.draw(st.integers(1, 4))

    def program(group: Group) -> Any:
        stream = group.stream()
        x = case.input(group.rank, group.size)
        for _ in range(times):
            stream.all_reduce(x, "max" if "max" in case.kind.ops else "prod", algorithm=case.algorithm)
            stream.broadcast(x, root=crew.size - 1)
        works = [stream.all_gather(x), stream.reduce(x, case.op, root=0)]
        return [x, *(work.wait() for work in works)]

    results = crew.run(program)
    assert len({bits(result[0]) for result in results}) == 1
    assert len({bits(result[1]) for result in results}) == 1
    assert bits(results[0][1][: results[0][0].shape[0]]) == bits(results[0][0])
