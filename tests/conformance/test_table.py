"""Tests every collective with each of its algorithms, over all dtypes, ops, roots and kinds of counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from conformance.cases import DTYPES, Case
from gradwire.arrays import REDUCE_OPS, parse_dtype
from gradwire.collectives import COLLECTIVES, REDUCING, ROOTED, algorithms
from gradwire.group import Group
from support.crews import Crew

MANY = 3  # ranks; with this many or more, only the slow tests try every op


def cases(collective: str, size: int, thorough: bool) -> Iterator[Case]:
    """Yield calls of all dtypes for each algorithm. Roots and counts alternate, and, unless `thorough`, ops too."""
    shapes = list(rows_of(collective, size))
    turn = 0
    for algorithm in ("auto", *algorithms(collective)):
        for dtype in DTYPES:
            ops = [op for op in REDUCE_OPS if op in parse_dtype(dtype).ops] if collective in REDUCING else ["sum"]
            if not thorough and len(ops) > 2:
                ops = [ops[turn % len(ops)], ops[(turn + 2) % len(ops)]]
            for op in ops:
                root = turn % size if collective in ROOTED else 0
                fill = ("mixed", "special", "exact")[turn % 3]
                rows = shapes[turn % len(shapes)]
                yield Case(collective, dtype, rows, op, root, algorithm, fill=fill, out=turn % 2 == 0)
                turn += 1


def rows_of(collective: str, size: int) -> Iterator[tuple[int, ...]]:
    """Yield even, uneven, odd and zero counts."""
    if collective in ("all_reduce", "reduce", "broadcast"):
        yield from [(1,), (37,), (0,), (64 * size,), (1000,)]
        return
    parts = size * size if collective == "all_to_all" else size
    yield (16,) * parts
    yield (0,) * parts
    yield (1,) * parts
    yield tuple(i * 7 % 5 for i in range(parts))
    yield tuple(33 * (i == parts - 1) for i in range(parts))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collective_with_every_algorithm_and_dtype_agrees_with_the_oracle(crew: Crew, collective: str) -> None:
    run(crew, list(cases(collective, crew.size, thorough=crew.size < MANY)))


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_collective_with_every_op_on_many_ranks_agrees_with_the_oracle(crew: Crew, collective: str) -> None:
    run(crew, list(cases(collective, crew.size, thorough=True)))


def run(crew: Crew, calls: Sequence[Case]) -> None:
    """Make calls one after the other on all ranks, then compare the results with the oracle."""
    inputs = [case.inputs(crew.size) for case in calls]

    def make_calls(group: Group) -> list[object]:
        pairs = zip(calls, inputs, strict=True)
        return [case.call(group, given[group.rank].copy(), group.rank, group.size) for case, given in pairs]

    results = crew.run(make_calls)
    for position, case in enumerate(calls):
        case.check(
            inputs[position], [results[rank][position] for rank in range(crew.size)], crew.topology, crew.inside()
        )
