"""Collectives into memory that the caller already has, for sizes that all ranks know: torch's way to call them.

What is exchanged may lie in several arrays: they count as one, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.arrays import Array, DType, View, check_reduction, view
from gradwire.errors import ArrayError, InvalidSize
from gradwire.operations.split_join import learn_counts
from gradwire.operations.types import Exchange, Operation, Shape, check_root, nothing


@dataclass(frozen=True, slots=True)
class Strip:
    """Arrays side by side, as one flat array: their own memory where they follow each other in it."""

    views: tuple[View, ...]
    whole: Array | None  # the memory of all, if it is one piece

    @classmethod
    def of(cls, arrays: Sequence[Any], *, writable: bool) -> Strip:
        views = tuple(view(one, writable=writable) for one in arrays)
        if not views:
            raise ArrayError("there is no array in the list")
        if any(one.dtype is not views[0].dtype for one in views):
            raise ArrayError(f"the arrays are of several types: {', '.join(one.dtype.name for one in views)}")
        return cls(views, _one_piece(views))

    @property
    def dtype(self) -> DType:
        return self.views[0].dtype

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(one.flat.size for one in self.views)

    @property
    def size(self) -> int:
        return sum(self.counts)

    def load(self) -> Array:
        """The elements as they are now."""
        if self.whole is not None:
            return self.whole
        if len(self.views) == 1:
            return self.views[0].load()
        return np.concatenate([one.load() for one in self.views])

    def room(self) -> Array:
        """Memory for new elements, which `store` brings home."""
        return np.empty(self.size, self.dtype.storage) if self.whole is None else self.whole

    def store(self, flat: Array) -> None:
        if self.whole is not None:
            return
        at = 0
        for one in self.views:
            one.flat[:] = flat[at : at + one.flat.size]
            one.store()
            at += one.flat.size


def _one_piece(views: Sequence[View]) -> Array | None:
    if any(one.private for one in views):
        return None
    if len(views) == 1:
        return views[0].flat
    filled = [one.flat for one in views if one.flat.size]
    if not filled:
        return views[0].flat
    end = first = filled[0].__array_interface__["data"][0]
    for flat in filled:
        if flat.__array_interface__["data"][0] != end:
            return None
        end += flat.nbytes
    itemsize = filled[0].itemsize
    return np.lib.stride_tricks.as_strided(filled[0], ((end - first) // itemsize,), (itemsize,))


def all_gather_into(out: Strip, x: Strip, counts: Sequence[int], rank: int) -> Operation:
    """Everybody's x, in rank order; `counts` says how many elements each rank brings."""
    _check(out, x, sum(counts))
    if x.size != counts[rank]:
        raise InvalidSize(f"rank {rank} brings {x.size} elements, and the result has room for {counts[rank]} of them")
    shape = Shape("all_gather", x.dtype, tuple(counts))
    return Operation("all_gather", _one_exchange(shape, x, out))


def reduce_scatter_into(out: Strip, x: Strip, op: str, counts: Sequence[int], rank: int) -> Operation:
    """This rank's part of the reduced x; `counts` says how it is split."""
    check_reduction(op, x.dtype)
    _check(out, x, counts[rank])
    if x.size != sum(counts):
        raise InvalidSize(f"{x.size} elements cannot be split by {list(counts)}")
    return Operation("reduce_scatter", _one_exchange(Shape("reduce_scatter", x.dtype, tuple(counts), op), x, out))


def gather_into(out: Strip | None, x: Strip, root: int, size: int) -> Operation:
    """Everybody's x on the root, which alone has room for them; all bring equally many elements."""
    root = check_root(root, size)
    if out is not None:
        _check(out, x, x.size * size)
        _check_even(out, x.size)
    return Operation("gather", _one_exchange(Shape("gather", x.dtype, (x.size,) * size, None, root), x, out))


def scatter_into(out: Strip, x: Strip | None, root: int, size: int) -> Operation:
    """This rank's part of the root's x, of which all get equally many elements."""
    root = check_root(root, size)
    if x is not None and x.size != out.size * size:
        raise InvalidSize(f"{x.size} elements cannot be split into {size} parts of {out.size}")
    if x is not None:
        _check_even(x, out.size)
    return Operation("scatter", _one_exchange(Shape("scatter", out.dtype, (out.size,) * size, None, root), x, out))


def all_to_all_into(out: Strip, x: Strip, received: Sequence[int], sent: Sequence[int], *, even: bool) -> Operation:
    """Part j of x to rank j; `even` says that all parts of all ranks are alike, so that nobody has to ask."""
    if out.size != sum(received) or x.size != sum(sent):
        raise InvalidSize(f"{out.size} and {x.size} elements cannot be split by {list(received)} and {list(sent)}")
    _check(out, x, x.size if even else out.size)
    if even:
        shape = Shape("all_to_all", x.dtype, (sent[0],) * len(sent) ** 2)
        return Operation("all_to_all", _one_exchange(shape, x, out))
    call = f"all_to_all({x.dtype.name}, counts)"

    def body(exchange: Exchange) -> None:
        table = learn_counts(exchange, sent, call)
        got = [int(n) for n in table[:, exchange.rank]]
        if got != list(received):
            raise exchange.disagree(f"rank {exchange.rank} expects {list(received)}, the others send it {got}")
        counts = tuple(int(n) for n in table.reshape(-1))
        _one_exchange(Shape("all_to_all", x.dtype, counts, call=call), x, out)(exchange)

    return Operation("all_to_all", body)


def _one_exchange(shape: Shape, x: Strip | None, out: Strip | None) -> Any:
    def body(exchange: Exchange) -> None:
        room = nothing(shape.dtype) if out is None else out.room()
        given = nothing(shape.dtype) if x is None else x.load()
        if np.may_share_memory(given, room) and not _in_place(shape, given, room, exchange.rank):
            given = given.copy()
        exchange(shape, given, room)
        if out is not None:
            out.store(room)

    return body


def _in_place(shape: Shape, given: Array, room: Array, rank: int) -> bool:
    """Whether the smaller array is this rank's part of the greater: that is how collectives are done in place."""
    if shape.collective == "all_to_all":
        return False
    assert isinstance(shape.counts, tuple)
    before = sum(shape.counts[:rank]) * given.itemsize
    whole, part = (room, given) if shape.collective in ("all_gather", "gather") else (given, room)
    return bool(part.ctypes.data - whole.ctypes.data == before)


def _check_even(parts: Strip, elements: int) -> None:
    """Of several arrays each is for one rank."""
    if len(parts.views) > 1 and any(count != elements for count in parts.counts):
        raise InvalidSize(f"arrays of {list(parts.counts)} elements, where each rank has {elements}")


def _check(out: Strip, x: Strip, elements: int) -> None:
    if out.dtype is not x.dtype:
        raise ArrayError(f"the result is {out.dtype.name}, what is sent {x.dtype.name}")
    if out.size != elements:
        raise InvalidSize(f"the result has room for {out.size} elements, and there are {elements}")
