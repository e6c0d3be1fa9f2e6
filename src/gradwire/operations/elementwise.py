"""Defines collectives in which every element of the result depends on the same element of x on all ranks."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from gradwire import arrays
from gradwire.arrays import View, check_reduction, view
from gradwire.errors import ArrayError
from gradwire.operations.registry import collective
from gradwire.operations.types import (
    CallKey,
    Exchange,
    Operation,
    Position,
    Shape,
    check_algorithm,
    check_root,
    nothing,
)


@collective(fast="ELEMENTWISE")
def all_reduce(at: Position, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Operation:
    check_algorithm("all_reduce", algorithm)
    if not isinstance(x, np.ndarray) and isinstance(x, (numbers.Number, np.generic)):
        if out is not None:
            raise ArrayError("a number takes no out=; the result is returned")
        return _all_reduce_number(x, op, algorithm)
    source = view(x, writable=out is None, instead="pass out= for the result, or a copy")
    source, target, result = _destination(source, x, out)
    check_reduction(op, source.dtype, "all_reduce")
    shape = Shape("all_reduce", source.dtype, source.flat.size, op, None, algorithm)
    key = CallKey("all_reduce", source.dtype, op, None, source.flat.size) if algorithm == "auto" else None

    def body(exchange: Exchange) -> Any:
        exchange(shape, source.load(), target.flat, key)
        target.store()
        return result

    return Operation("all_reduce", body)


def _all_reduce_number(x: Any, op: str, algorithm: str) -> Operation:
    array = arrays.number_as_array(x)
    dtype = arrays.dtype_of(array)
    check_reduction(op, dtype, "all_reduce")
    shape = Shape("all_reduce", dtype, 1, op, None, algorithm)

    def body(exchange: Exchange) -> Any:
        exchange(shape, array, array)
        return array[0] if isinstance(x, np.generic) else array[0].item()

    return Operation("all_reduce", body)


def _destination(source: View, x: Any, out: Any) -> tuple[View, View, Any]:
    """Return the source and the target of a reduction of x, and the object to return to the caller.

    The target is x or `out`. `out` must have the same dtype and size as x, and be the same memory or not overlap.
    """
    if out is None:
        return source, source, x
    target = view(out, writable=True)
    if target.dtype != source.dtype or target.array.size != source.array.size:
        raise ArrayError(f"out is {arrays.describe(target.array)}, which does not fit {arrays.describe(source.array)}")
    if arrays.overlap(target, source):
        if not arrays.same_place(target, source):
            raise ArrayError("out overlaps x: pass x itself as out, or separate memory")
        source = target  # both have the same memory, but x may be a read-only view
    return source, target, out


@collective(fast="ELEMENTWISE")
def broadcast(at: Position, x: Any, root: int = 0, *, algorithm: str = "auto") -> Operation:
    check_algorithm("broadcast", algorithm)
    root = check_root(root, at.size)
    source = view(x, writable=at.rank != root)
    shape = Shape("broadcast", source.dtype, source.flat.size, None, root, algorithm)
    key = CallKey("broadcast", source.dtype, None, root, source.flat.size) if algorithm == "auto" else None

    def body(exchange: Exchange) -> Any:
        if at.rank == root:
            exchange(shape, source.load(), source.flat, key)
        else:
            exchange(shape, nothing(source.dtype), source.flat, key)
            source.store()
        return x

    return Operation("broadcast", body)


@collective()
def reduce(
    at: Position, x: Any, op: str = "sum", root: int = 0, *, out: Any = None, algorithm: str = "auto"
) -> Operation:
    check_algorithm("reduce", algorithm)
    root = check_root(root, at.size)
    source = view(x, writable=False)
    check_reduction(op, source.dtype, "reduce")
    target, result = None, None
    if at.rank == root:
        result = np.empty(source.array.shape, source.dtype.storage) if out is None else out
        source, target, _ = _destination(source, x, result)
    shape = Shape("reduce", source.dtype, source.flat.size, op, root, algorithm)

    def body(exchange: Exchange) -> Any:
        exchange(shape, source.load(), nothing(source.dtype) if target is None else target.flat)
        if target is not None:
            target.store()
        return result

    return Operation("reduce", body)


@collective(schedule="all_reduce", fast="NO_ARRAY")
def barrier(at: Position, *, algorithm: str = "auto") -> Operation:
    check_algorithm("all_reduce", algorithm)
    shape = Shape("all_reduce", arrays.parse_dtype("uint8"), 1, "max", None, algorithm, "barrier()")

    def body(exchange: Exchange) -> None:
        token = np.zeros(1, np.uint8)
        exchange(shape, token, token, CallKey("barrier", None) if algorithm == "auto" else None)

    return Operation("barrier", body)
