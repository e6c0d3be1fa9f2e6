"""Reducing collectives with torch's reduce ops. Some of them are composed of several gradwire operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold_up

import numpy as np

from gradwire.arrays import Array
from gradwire.operations import Exchange, Operation, Position, elementwise
from gradwire.operations.preallocated import Strip, all_gather_into, reduce_scatter_into
from gradwire.torch.backend.tensors import Reduction


def all_reduce(at: Position, x: Array, how: Reduction) -> Operation:
    """Return the all-reduce of x, in place."""
    if how.fold is not None:
        return _fold(at, x, how)
    reducing = elementwise.all_reduce(at, x, how.op)
    if how.plain:
        return reducing

    def body(exchange: Exchange) -> None:
        if how.factor is not None:
            np.multiply(x, x.dtype.type(how.factor), out=x)
        reducing.body(exchange)
        if how.divides:
            x[...] = divided(x, at.size)

    return Operation("all_reduce", body)


def _fold(at: Position, x: Array, how: Reduction) -> Operation:
    parts = np.empty((at.size, *x.shape), x.dtype)
    room, given, counts = Strip.of([parts], writable=True), Strip.of([x], writable=False), (x.size,) * at.size

    def body(exchange: Exchange) -> None:
        all_gather_into(room, given, counts, exchange.rank).body(exchange)
        assert how.fold is not None
        x[...] = fold_up(how.fold, parts)

    return Operation("all_reduce", body)


def reduce(at: Position, x: Array, how: Reduction, root: int) -> Operation:
    """Return the reduce of x, in place on the root."""
    out = x if at.rank == root else None
    if how.plain:
        return elementwise.reduce(at, x, how.op, root, out=out)
    return _by_all_reduce("reduce", at, [x], how, out, slice(None))


def reduce_scatter(at: Position, out: Array, xs: Sequence[Array], how: Reduction, counts: Sequence[int]) -> Operation:
    """Return the reduce-scatter of the joined arrays `xs` into `out`."""
    target, given = Strip.of([out], writable=True), Strip.of(xs, writable=False)
    plain = reduce_scatter_into(target, given, how.op, counts, at.rank)  # checks all sizes, also for other ops
    if how.plain:
        return plain
    if how.fold is not None:
        begin = sum(counts[: at.rank])
        return _by_all_reduce("reduce_scatter", at, xs, how, out, slice(begin, begin + counts[at.rank]))

    def body(exchange: Exchange) -> None:
        flat = given.load()
        if how.factor is not None:
            flat = np.multiply(flat, flat.dtype.type(how.factor))
        scaled = Strip.of([flat], writable=False)
        reduce_scatter_into(target, scaled, how.op, counts, at.rank).body(exchange)
        if how.divides:
            out[...] = divided(out, at.size)

    return Operation("reduce_scatter", body)


def _by_all_reduce(
    name: str, at: Position, xs: Sequence[Array], how: Reduction, out: Array | None, part: slice
) -> Operation:
    """All-reduce the whole data, and keep one part of the result. Used only for rare reduce ops."""

    def body(exchange: Exchange) -> None:
        whole = np.concatenate([x.reshape(-1) for x in xs])
        all_reduce(at, whole, how).body(exchange)
        if out is not None:
            out[...] = whole[part].reshape(out.shape)

    return Operation(name, body)


def divided(x: Array, n: int) -> Array:
    """Divide integers by n, rounding towards zero as in C."""
    wide = x if x.dtype.itemsize == 8 else x.astype(np.int64)  # n may not fit into x's dtype
    down: Array = wide // wide.dtype.type(n)
    down += ((wide < 0) & (down * wide.dtype.type(n) != wide)).astype(wide.dtype)
    return down.astype(x.dtype)
