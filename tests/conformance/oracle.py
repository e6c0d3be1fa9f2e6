"""Computes the expected result of a collective from the inputs of all ranks, in the simplest way.

Reductions are folded in the order of the schedule's expression, in the accumulator's type. The numeric rules are
implemented here a second time, in their simplest form. So the comparison is exact for floats too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from gradwire.arrays import Array, DType, dtype_of
from gradwire.collectives import Schedule, build, choose, verify
from gradwire.collectives.expressions import Expression
from gradwire.executors.plan import even_bounds, ragged_bounds
from gradwire.topology import Topology


def reduced(
    collective: str,
    inputs: Sequence[Array],
    op: str,
    algorithm: str,
    topology: Topology,
    *,
    root: int = 0,
    counts: Sequence[int] | None = None,
    inside: str = "tcp",
) -> Array:
    """Return the flat result of a reduction of flat inputs. `counts`, if given, has the elements of each segment."""
    dtype = dtype_of(inputs[0])
    count = inputs[0].size
    chosen = choose(collective, algorithm, count * dtype.itemsize, topology, transport=inside)
    schedule = build(collective, chosen, topology.size, topology=topology, root=root)
    bounds = even_bounds(count, schedule.segments, dtype.itemsize) if counts is None else ragged_bounds(counts)
    result = np.empty(count, dtype.storage)
    for segment, expression in _expressions(schedule).items():
        part = slice(bounds[segment], bounds[segment + 1])
        result[part] = folded(expression, [x[part] for x in inputs], op, dtype)
    return result


@lru_cache
def _expressions(schedule: Schedule) -> dict[int, Expression]:
    return verify(schedule)


def folded(expression: Expression, inputs: Sequence[Array], op: str, dtype: DType) -> Array:
    """Return the result of one segment: folded in the accumulator's type, divided for a mean, then rounded once."""
    with np.errstate(all="ignore"):
        total = _value(expression, [x.astype(dtype.accumulator) for x in inputs], OPS[op])
        if op == "mean":
            total = _divided(total, len(inputs))
        result: Array = total.astype(dtype.storage)
        return result


def _value(expression: Expression, inputs: Sequence[Array], combine: Callable[[Array, Array], Array]) -> Array:
    if isinstance(expression, int):
        return inputs[expression]
    left, right = expression
    return combine(_value(left, inputs, combine), _value(right, inputs, combine))


def _divided(total: Array, ranks: int) -> Array:
    parts = total.view(total.real.dtype)
    mean: Array = (parts / parts.dtype.type(ranks)).view(total.dtype)
    return mean


def _least(a: Array, b: Array) -> Array:
    smaller = np.where((a < b) | ((a == b) & np.signbit(a)), a, b) if a.dtype.kind == "f" else np.where(a < b, a, b)
    return np.where(a != a, a, np.where(b != b, b, smaller))


def _greatest(a: Array, b: Array) -> Array:
    larger = np.where((a > b) | ((a == b) & np.signbit(b)), a, b) if a.dtype.kind == "f" else np.where(a > b, a, b)
    return np.where(a != a, a, np.where(b != b, b, larger))


def _product(a: Array, b: Array) -> Array:
    if a.dtype.kind != "c":
        return np.asarray(a * b)
    result = np.empty_like(a)
    result.real = a.real * b.real - a.imag * b.imag
    result.imag = a.real * b.imag + a.imag * b.real
    return result


def _sum(a: Array, b: Array) -> Array:
    return np.asarray(a + b)


OPS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": _sum,
    "mean": _sum,
    "prod": _product,
    "min": _least,
    "max": _greatest,
}
