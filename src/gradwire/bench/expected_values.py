"""Generate inputs whose results are known exactly, and count the wrong elements of a result.

An input repeats a row of random numbers. The length of the row is prime, so a result with swapped, shifted or missing
parts is not correct by accident. The row is short, so writing an input reads little memory. Rows differ between ranks
and, with a period of `CYCLE`, between iterations, so the result of the previous iteration counts as wrong.

The numbers are small integers, so sums are exact in any order, even in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.bench.cases import ROOT, Case

Array = npt.NDArray[Any]
ROW = 4093
CYCLE = 7

_FOLDS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}
# Exclusive upper bounds of the random numbers. Products of 1s and 2s are exact, and all inputs fit into int8 and into a
# mantissa of 8 bits.
_LIMITS = {"none": 100, "sum": 6, "mean": 6, "min": 100, "max": 100, "prod": 3}


def numpy_dtype(name: Any) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    found: np.dtype[Any] = np.dtype(name)
    return found


def _epsilon(dtype: np.dtype[Any]) -> float:
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


@dataclass(frozen=True)
class Part:
    """Consecutive elements of a result, which repeat a row."""

    first: int
    count: int
    row: Array


class Values:
    """The inputs and the expected results of one rank in a case."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.dtype = numpy_dtype(case.dtype)
        self._rows = [[self._row(source, turn) for source in range(case.size)] for turn in range(CYCLE)]
        self._parts = [list(self._expected(turn)) for turn in range(CYCLE)]

    def write(self, x: Array, iteration: int) -> None:
        """Write the input of an iteration into x."""
        repeat(self._rows[iteration % CYCLE][self.rank], x)

    def wrong_at_ends(self, result: Array | None, iteration: int) -> int:
        """Return how many of the first and last elements of each part are wrong. This check is cheap."""
        wrong = 0
        for part in self._parts[iteration % CYCLE]:
            assert result is not None
            for at in (0, part.count - 1):
                wrong += not bool(self._same(result[part.first + at], part.row[at % len(part.row)]))
        return wrong

    def wrong(self, result: Array | None, iteration: int) -> int:
        """Return how many elements of the whole result are wrong."""
        wrong = 0
        for part in self._parts[iteration % CYCLE]:
            assert result is not None
            if len(result) < part.first + part.count:
                return part.first + part.count - len(result)
            wrong += self._wrong_in(result[part.first : part.first + part.count], part.row)
        return wrong

    def _wrong_in(self, x: Array, row: Array) -> int:
        whole = len(x) // len(row) * len(row)
        right = np.count_nonzero(self._same(x[:whole].reshape(-1, len(row)), row))
        right += np.count_nonzero(self._same(x[whole:], row[: len(x) - whole]))
        return len(x) - int(right)

    def _same(self, x: Array, expected: Array) -> Any:
        if self.case.op != "mean":
            return x == expected
        # Engines may divide by n or multiply by 1/n. The rounding difference is not an error.
        wide = np.complex128 if self.dtype.kind == "c" else np.float64
        x, expected = np.asarray(x).astype(wide), np.asarray(expected).astype(wide)
        return np.abs(x - expected) <= np.abs(expected) * (4 * _epsilon(self.dtype))

    def _row(self, rank: int, turn: int) -> Array:
        numbers = np.random.default_rng((rank, turn)).integers(1, _LIMITS[self.case.op], ROW)
        return (numbers % 2 if self.case.dtype == "bool" else numbers).astype(self.dtype)

    def _expected(self, turn: int) -> Iterator[Part]:
        """Yield the parts of the result. Each row is rotated to the offset at which its part begins in the input."""
        case, rows, offset = self.case, self._rows[turn], self.rank * self.case.count
        if not case.gets(self.rank):
            return
        match case.collective:
            case "all_reduce" | "reduce":
                yield Part(0, case.count, self._reduced(rows))
            case "reduce_scatter":
                yield Part(0, case.count, np.roll(self._reduced(rows), -offset))
            case "broadcast":
                yield Part(0, case.count, rows[ROOT])
            case "scatter":
                yield Part(0, case.count, np.roll(rows[ROOT], -offset))
            case "sendrecv":
                yield Part(0, case.count, rows[self.rank - 1])
            case "all_gather" | "gather":
                for source, row in enumerate(rows):
                    yield Part(source * case.count, case.count, row)
            case "all_to_all":
                for source, row in enumerate(rows):
                    yield Part(source * case.count, case.count, np.roll(row, -offset))

    def _reduced(self, rows: list[Array]) -> Array:
        wide = [row.astype(np.float32) if self.dtype.itemsize == 2 and self.dtype.kind in "fV" else row for row in rows]
        total = reduce(_FOLDS[self.case.op], wide)
        return (total / len(rows) if self.case.op == "mean" else total).astype(self.dtype)


def repeat(row: Array, x: Array) -> None:
    """Fill x with repetitions of the row."""
    whole = len(x) // len(row) * len(row)
    x[:whole].reshape(-1, len(row))[:] = row
    x[whole:] = row[: len(x) - whole]
