"""All-reduce of a dict of arrays: small ones packed into one exchange, large ones in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array, DType, View, check_reduction, view
from gradwire.errors import ArrayError, UnsupportedOp
from gradwire.operations.types import Exchange, Operation, Shape, algorithm_text, check_algorithm

ALONE_BYTES = 1 << 20
"""From here on an exchange of its own costs less than copying the array to others and back."""


def all_reduce_named(tensors: Mapping[str, Any], op: str, algorithm: str) -> Operation:
    check_algorithm("all_reduce", algorithm)
    views = _views(tensors, op)
    items = tuple(f"{name!r}: {arrays.describe(one.array)}" for name, one in views.items())
    batches = list(_batches(views.values()))
    call = f"all_reduce_named({len(items)} arrays, op={op!r}{algorithm_text(algorithm)})"

    def reduce(exchange: Exchange, dtype: DType, kind: str, flat: Array) -> None:
        exchange(Shape("all_reduce", dtype, flat.size, kind, None, algorithm, call, items), flat, flat)

    def body(exchange: Exchange) -> Mapping[str, Any]:
        if not batches:  # still a call that all ranks must make
            reduce(exchange, arrays.parse_dtype("uint8"), "max", np.empty(0, np.uint8))
        # All is read before anything is written: an array may be in the map twice (tied weights).
        flats = [_gathered(batch) for batch in batches]
        for batch, flat in zip(batches, flats, strict=True):
            reduce(exchange, batch[0].dtype, op, flat)
        for batch, flat in zip(batches, flats, strict=True):
            _spread(flat, batch)
        return tensors

    return Operation("all_reduce_named", body)


def _views(tensors: Mapping[str, Any], op: str) -> dict[str, View]:
    """The arrays by name, in the order of their names."""
    if not isinstance(tensors, Mapping):
        raise ArrayError(f"expected a dict of arrays by name, got {type(tensors).__name__}")
    for name in tensors:
        if not isinstance(name, str):
            raise ArrayError(f"the key {name!r} is a {type(name).__name__}: arrays are told apart by strings")
    check_reduction(op, arrays.parse_dtype("float32"))  # an op that nobody knows is an error of an empty map too
    views: dict[str, View] = {}
    for name in sorted(tensors):
        try:
            views[name] = view(tensors[name], writable=True)
            check_reduction(op, views[name].dtype)
        except (ArrayError, UnsupportedOp) as error:
            error.args = (f"{name!r}: {error.message}", *error.args[1:])
            raise
    _part_overlapping(list(views.values()))
    return views


def _part_overlapping(views: Sequence[View]) -> None:
    """Give arrays that share memory private copies, so that none is reduced where another still has to be read."""

    in_place = [(int(one.flat.__array_interface__["data"][0]), one) for one in views if not one.private]
    end, last = 0, None
    for begin, one in sorted(in_place, key=lambda place: place[0]):
        if begin < end and last is not None:
            _make_private(last)
            _make_private(one)
        if begin + one.flat.nbytes > end:
            end, last = begin + one.array.nbytes, one


def _make_private(one: View) -> None:
    if not one.private:
        one.flat, one.private = np.empty_like(one.flat), True


def _batches(views: Iterable[View]) -> Iterator[list[View]]:
    """Arrays that travel together. All ranks must find the same: it follows from names, dtypes and sizes alone."""
    small: dict[DType, list[View]] = {}
    for one in views:
        if one.flat.nbytes >= ALONE_BYTES:
            yield [one]
        else:
            small.setdefault(one.dtype, []).append(one)
    yield from small.values()


def _gathered(batch: Sequence[View]) -> Array:
    return batch[0].load() if len(batch) == 1 else np.concatenate([one.load() for one in batch])


def _spread(flat: Array, batch: Sequence[View]) -> None:
    at = 0
    for one in batch:
        if len(batch) > 1:
            one.flat[:] = flat[at : at + one.flat.size]
            at += one.flat.size
        one.store()
