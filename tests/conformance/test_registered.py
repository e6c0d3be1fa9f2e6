"""Tests arrays of `group.empty`, which peers access in place, and repeated calls, which the core runs by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from conformance.cases import Case
from gradwire import Group
from gradwire.arrays import Array
from gradwire.topology import Topology
from support.crews import TRANSPORTS, Crew, crew_of

pytestmark = pytest.mark.skipif("shm" not in TRANSPORTS, reason="shared memory needs the native core")
HOSTS = {"2": "aa", "3": "aaa", "5": "aaaaa", "2+2": "aabb", "1+2": "baa"}
REGISTERED_ON: dict[str, Callable[[int], bool]] = {
    "all": lambda rank: True,
    "one": lambda rank: rank == 0,
    "others": lambda rank: rank != 0,
}


@pytest.fixture(scope="module", params=HOSTS)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with crew_of("shm", Topology.of(list(HOSTS[request.param]))) as crew:
        yield crew


def cases(size: int) -> Iterator[Case]:
    """Yield calls with arrays too small and large enough to be read in place, of odd lengths, and with many tiles."""
    # The third size is reduced in one shot. If all ranks have registered arrays, they split the work.
    kinds = [("float32", 3), ("float32", 2049), ("bfloat16", 20_001), ("float16", 100_001), ("float32", 400_003)]
    for turn, (dtype, rows) in enumerate(kinds):
        op = ("sum", "mean", "max")[turn % 3]
        for out in (False, True):
            yield Case("all_reduce", dtype, (rows,), op, out=out)
        for algorithm in ("direct", "ring", "tree", "halving", "star"):
            yield Case("all_reduce", dtype, (rows,), op, algorithm=algorithm, out=turn % 2 == 0)
        yield Case("broadcast", dtype, (rows,), root=turn % size)
        yield Case("all_gather", dtype, tuple(rows // (rank + 1) for rank in range(size)))
        yield Case("reduce_scatter", dtype, (rows // size * size // size,) * size, op, pass_counts=False)
        yield Case("reduce_scatter", dtype, tuple(rows // (rank + 1) for rank in range(size)), op)
        yield Case("all_to_all", dtype, tuple(rows // (i + 1) for i in range(size * size)))


@pytest.mark.parametrize("ranks", REGISTERED_ON)
def test_registered_arrays_on_some_or_all_ranks_agree_with_the_oracle(crew: Crew, ranks: str) -> None:
    calls = list(cases(crew.size))
    inputs = [case.inputs(crew.size) for case in calls]

    def make_calls(group: Group) -> list[list[Any]]:
        results = []
        for case, given in zip(calls, inputs, strict=True):
            x = given[group.rank]
            registered = group.empty(x.shape, case.dtype) if REGISTERED_ON[ranks](group.rank) else np.empty_like(x)
            results.append([call_on(case, group, registered, x) for _ in range(2)])
        return results

    results = crew.run(make_calls)
    for position, case in enumerate(calls):
        for turn in range(2):
            answers = [results[rank][position][turn] for rank in range(crew.size)]
            case.check(inputs[position], answers, crew.topology, crew.inside())


def call_on(case: Case, group: Group, memory: Array, x: Array) -> Any:
    """Make the call on x copied into this memory; return a copy of the result, which may be in this memory."""
    memory[...] = x
    result = case.call(group, memory, group.rank, group.size)
    return np.array(result) if isinstance(result, np.ndarray) else result


def test_all_reduce_into_a_registered_out_agrees_with_the_oracle(crew: Crew) -> None:
    case = Case("all_reduce", "float32", (300_001,))
    inputs = case.inputs(crew.size)

    def program(group: Group) -> Array:
        x, out = group.empty(300_001), group.empty(300_001)
        for _ in range(3):
            x[...], out[...] = inputs[group.rank], np.nan
            assert group.all_reduce(x, out=out) is out
            assert np.array_equal(x, inputs[group.rank])
        return np.array(out)

    case.check(inputs, crew.run(program), crew.topology, crew.inside())


def test_repeated_calls_agree_with_the_oracle(crew: Crew) -> None:
    calls = [
        Case("all_reduce", "float64", (1000,), "mean"),
        Case("all_reduce", "int32", (7,), "max", out=True),
        Case("broadcast", "uint8", (99,), root=1),
        Case("reduce_scatter", "float32", (30,) * crew.size, pass_counts=False, tail=(2, 3)),
        Case("all_gather", "int16", tuple(range(1, crew.size + 1)), tail=(4,)),
        Case("all_gather", "int16", tuple(range(crew.size, 0, -1)), tail=(4,)),
        Case("all_gather", "float32", (5,) * crew.size),
    ]
    inputs = [case.inputs(crew.size) for case in calls]

    def make_calls(group: Group) -> list[list[Any]]:
        rounds = []
        for _ in range(3):
            pairs = zip(calls, inputs, strict=True)
            rounds.append([case.call(group, x[group.rank].copy(), group.rank, group.size) for case, x in pairs])
            group.barrier()
        return rounds

    results = crew.run(make_calls)
    for turn in range(3):
        for position, case in enumerate(calls):
            answers = [results[rank][turn][position] for rank in range(crew.size)]
            case.check(inputs[position], answers, crew.topology, crew.inside())


def test_result_memory_is_not_reused_while_the_result_is_referenced(crew: Crew) -> None:
    """The memory of a result is reused only when no reference to the result is left."""

    def program(group: Group) -> None:
        x = np.ones((60_000, 2), np.float32)
        held = [group.all_gather(x * turn)[:1] for turn in range(1, 5)]  # a view keeps a reference to the result
        assert [part[0, 0] for part in held] == [1, 2, 3, 4]
        for turn in range(1, 5):
            result = group.all_gather(x * turn)
            assert (result == turn).all()
            result.shape = (-1,)
            result.setflags(write=False)
            del result
        kept = group.all_gather(x)
        weak = weakref.ref(kept)
        del kept
        result = group.all_gather(x * 7)
        assert weak() is not result
        assert (result == 7).all()
        assert result.flags.writeable

    crew.run(program)
