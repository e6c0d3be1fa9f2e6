"""Defines the all-reduce of a dict of arrays: small arrays are packed into one exchange, large ones are not copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array, DType, View, check_reduction, view
from gradwire.errors import ArrayError, UnsupportedOp
from gradwire.operations.registry import collective
from gradwire.operations.types import Exchange, Operation, Position, Shape, algorithm_text, check_algorithm

SEPARATE_BYTES = 1 << 20
"""An array of at least this size has its own exchange, which costs less than packing and unpacking the array."""


@collective(schedule="all_reduce")
def all_reduce_named(
    at: Position, tensors: Mapping[str, Any], op: str = "sum", *, algorithm: str = "auto"
) -> Operation:
    check_algorithm("all_reduce", algorithm, "all_reduce_named")
    views = _views(tensors, op)
    items = tuple(f"{name!r}: {arrays.describe(tensor.array)}" for name, tensor in views.items())
    batches = list(_batches(views.values()))
    call = f"all_reduce_named({len(items)} arrays, op={op!r}{algorithm_text(algorithm)})"

    def reduce(exchange: Exchange, dtype: DType, kind: str, flat: Array) -> None:
        exchange(Shape("all_reduce", dtype, flat.size, kind, None, algorithm, call, items), flat, flat)

    def body(exchange: Exchange) -> Mapping[str, Any]:
        if not batches:  # an empty dict is also a call that all ranks must make
            reduce(exchange, arrays.parse_dtype("uint8"), "max", np.empty(0, np.uint8))
        # All arrays are read before any is written, because an array may be in the dict twice (tied weights).
        flats = [_pack(batch) for batch in batches]
        for batch, flat in zip(batches, flats, strict=True):
            reduce(exchange, batch[0].dtype, op, flat)
        for batch, flat in zip(batches, flats, strict=True):
            _unpack(flat, batch)
        return tensors

    return Operation("all_reduce_named", body)


def _views(tensors: Mapping[str, Any], op: str) -> dict[str, View]:
    """Return views of the arrays by name, in the order of their names."""
    if not isinstance(tensors, Mapping):
        raise ArrayError(f"expected a dict of arrays by name, got {type(tensors).__name__}")
    for name in tensors:
        if not isinstance(name, str):
            raise ArrayError(f"the key {name!r} is a {type(name).__name__}: the names of arrays must be strings")
    # An unknown op is an error even if the dict is empty.
    check_reduction(op, arrays.parse_dtype("float32"), "all_reduce_named")
    views: dict[str, View] = {}
    for name in sorted(tensors):
        try:
            views[name] = view(tensors[name], writable=True)
            check_reduction(op, views[name].dtype, "all_reduce_named")
        except (ArrayError, UnsupportedOp) as error:
            error.args = (f"{name!r}: {error.message}", *error.args[1:])
            raise
    _separate_overlapping(list(views.values()))
    return views


def _separate_overlapping(views: Sequence[View]) -> None:
    """Give arrays that share memory private copies, so that no array is reduced before another has been read."""

    in_place = [(int(tensor.flat.__array_interface__["data"][0]), tensor) for tensor in views if not tensor.private]
    end, last = 0, None
    for begin, current in sorted(in_place, key=lambda entry: entry[0]):
        if begin < end and last is not None:
            _make_private(last)
            _make_private(current)
        if begin + current.flat.nbytes > end:
            end, last = begin + current.array.nbytes, current


def _make_private(shared: View) -> None:
    if not shared.private:
        shared.flat, shared.private = np.empty_like(shared.flat), True


def _batches(views: Iterable[View]) -> Iterator[list[View]]:
    """Yield the arrays of each exchange. All ranks yield the same, because only names, dtypes and sizes matter."""
    small: dict[DType, list[View]] = {}
    for current in views:
        if current.flat.nbytes >= SEPARATE_BYTES:
            yield [current]
        else:
            small.setdefault(current.dtype, []).append(current)
    yield from small.values()


def _pack(batch: Sequence[View]) -> Array:
    return batch[0].load() if len(batch) == 1 else np.concatenate([packed.load() for packed in batch])


def _unpack(flat: Array, batch: Sequence[View]) -> None:
    at = 0
    for packed in batch:
        if len(batch) > 1:
            packed.flat[:] = flat[at : at + packed.flat.size]
            at += packed.flat.size
        packed.store()
