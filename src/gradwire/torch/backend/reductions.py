"""Reducing collectives with torch's reduce ops, some of which are composed of ours."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold_up
from typing import Any

import numpy as np

from gradwire import operations
from gradwire.arrays import Array
from gradwire.operations import Exchange, Operation
from gradwire.operations.preallocated import Strip, all_gather_into, reduce_scatter_into
from gradwire.torch.backend.tensors import Reduction


def all_reduce(x: Array, how: Reduction, size: int) -> Operation:
    """In place."""
    if how.plain:
        return operations.all_reduce(x, how.op, None, "auto")
    if how.fold is not None:
        return _fold(x, how, size)
    reducing = operations.all_reduce(x, how.op, None, "auto")

    def body(exchange: Exchange) -> None:
        if how.factor is not None:
            np.multiply(x, x.dtype.type(how.factor), out=x)
        reducing.body(exchange)
        if how.divides:
            x[...] = divided(x, size)

    return Operation("all_reduce", body)


def _fold(x: Array, how: Reduction, size: int) -> Operation:
    parts = np.empty((size, *x.shape), x.dtype)
    room, given, counts = Strip.of([parts], writable=True), Strip.of([x], writable=False), (x.size,) * size

    def body(exchange: Exchange) -> None:
        all_gather_into(room, given, counts, exchange.rank).body(exchange)
        assert how.fold is not None
        x[...] = fold_up(how.fold, parts)

    return Operation("all_reduce", body)


def reduce(x: Array, how: Reduction, root: int, rank: int, size: int) -> Operation:
    """In place on the root."""
    if how.plain:
        return operations.reduce(x, how.op, root, x if rank == root else None, size, rank, "auto")
    return _by_all_reduce("reduce", [x], how, size, lambda whole: x if rank == root else None, slice(None))


def reduce_scatter(
    out: Array, xs: Sequence[Array], how: Reduction, counts: Sequence[int], rank: int, size: int
) -> Operation:
    """The sum of what the ranks bring for this one."""
    target, given = Strip.of([out], writable=True), Strip.of(xs, writable=False)
    plain = reduce_scatter_into(target, given, how.op, counts, rank)  # looks at all sizes
    if how.plain:
        return plain
    if how.fold is not None:
        begin = sum(counts[:rank])
        return _by_all_reduce("reduce_scatter", xs, how, size, lambda whole: out, slice(begin, begin + counts[rank]))

    def body(exchange: Exchange) -> None:
        flat = given.load()
        if how.factor is not None:
            flat = np.multiply(flat, flat.dtype.type(how.factor))
        scaled = Strip.of([flat], writable=False)
        reduce_scatter_into(target, scaled, how.op, counts, rank).body(exchange)
        if how.divides:
            out[...] = divided(out, size)

    return Operation("reduce_scatter", body)


def _by_all_reduce(name: str, xs: Sequence[Array], how: Reduction, size: int, home: Any, part: slice) -> Operation:
    """Reduce everything on all ranks, and keep a part of it: for ops that are rare."""

    def body(exchange: Exchange) -> None:
        whole = np.concatenate([x.reshape(-1) for x in xs])
        all_reduce(whole, how, size).body(exchange)
        out = home(whole)
        if out is not None:
            out[...] = whole[part].reshape(out.shape)

    return Operation(name, body)


def divided(x: Array, n: int) -> Array:
    """Integers divided, towards zero as in C."""
    wide = x if x.dtype.itemsize == 8 else x.astype(np.int64)  # n may not be a number of x's type
    down: Array = wide // wide.dtype.type(n)
    down += ((wide < 0) & (down * wide.dtype.type(n) != wide)).astype(wide.dtype)
    return down.astype(x.dtype)
