"""Expected values: correct results pass, and every kind of wrong result is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradwire.arrays import parse_dtype
from gradwire.bench.cases import COLLECTIVES, ITEMSIZE, Case
from gradwire.bench.expected_values import CYCLE, ROW, Array, Values

SIZE = 3
MOVING = [name for name, kind in COLLECTIVES.items() if not kind.reduces and name != "barrier"]
REDUCING = [name for name, kind in COLLECTIVES.items() if kind.reduces]


def carried_out(case: Case, inputs: list[Array]) -> list[Array | None]:
    """Compute a collective with NumPy, and return the results by rank."""
    n, c = case.size, case.count
    fold: Any = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}.get(case.op)
    total = inputs[0]
    if fold is not None:
        for x in inputs[1:]:
            total = fold(total, x)
        total = (total / n).astype(total.dtype) if case.op == "mean" else total
    match case.collective:
        case "all_reduce":
            return [total] * n
        case "reduce":
            return [total, *[None] * (n - 1)]
        case "reduce_scatter":
            return [total[rank * c : (rank + 1) * c] for rank in range(n)]
        case "broadcast":
            return [inputs[0]] * n
        case "scatter":
            return [inputs[0][rank * c : (rank + 1) * c] for rank in range(n)]
        case "all_gather":
            return [np.concatenate(inputs)] * n
        case "gather":
            return [np.concatenate(inputs), *[None] * (n - 1)]
        case "all_to_all":
            return [np.concatenate([x[rank * c : (rank + 1) * c] for x in inputs]) for rank in range(n)]
        case "sendrecv":
            return [inputs[rank - 1] for rank in range(n)]
    raise AssertionError(case.collective)


def of_all_ranks(case: Case, iteration: int) -> tuple[list[Values], list[Array | None]]:
    values = [Values(case, rank) for rank in range(case.size)]
    inputs = [np.empty(case.puts(rank), values[rank].dtype) for rank in range(case.size)]
    for one, x in zip(values, inputs, strict=True):
        one.write(x, iteration)
    return values, carried_out(case, inputs)


@pytest.mark.parametrize("count", [1, 2, ROW, 2 * ROW + 17])
@pytest.mark.parametrize("collective", MOVING + REDUCING)
def test_values_count_only_wrong_elements(collective: str, count: int) -> None:
    case = Case(collective, "float32", "sum" if collective in REDUCING else "none", count, SIZE)
    values, results = of_all_ranks(case, iteration=4)
    for one, result in zip(values, results, strict=True):
        assert one.wrong(result, 4) == one.wrong_at_ends(result, 4) == 0
        if result is None:
            continue
        spoiled = result.copy()
        spoiled[-1] += 1
        assert one.wrong(spoiled, 4) == 1
        assert one.wrong_at_ends(spoiled, 4) >= 1
        assert one.wrong(result[:-1], 4) == 1, "a missing element must count as wrong"
        if count >= ROW:
            assert one.wrong(result, 5) > count // 2, "the result of the previous iteration must count as wrong"
            assert one.wrong(np.roll(result, 64), 4) > count // 2, "a shifted result must count as wrong"


@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype in ITEMSIZE for op in sorted(parse_dtype(dtype).ops)])
def test_values_are_exact_in_every_dtype_and_op(dtype: str, op: str) -> None:
    values, results = of_all_ranks(Case("all_reduce", dtype, op, 100, SIZE), 0)
    assert [one.wrong(result, 0) for one, result in zip(values, results, strict=True)] == [0] * SIZE


def test_values_differ_between_ranks_and_iterations() -> None:
    case = Case("sendrecv", "int8", "none", 100, SIZE)
    seen = set()
    for rank in range(SIZE):
        for iteration in range(CYCLE):
            x = np.empty(100, np.int8)
            Values(case, rank).write(x, iteration)
            seen.add(x.tobytes())
    assert len(seen) == SIZE * CYCLE
