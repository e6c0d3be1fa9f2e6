"""Defines collectives with results in the caller's memory, as torch calls them. All ranks know all sizes.

The input or the result may consist of several arrays, which are treated as one array after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.arrays import Array, DType, View, check_reduction, view
from gradwire.errors import ArrayError, InvalidSize
from gradwire.operations.split_join import exchange_counts
from gradwire.operations.types import Exchange, Operation, Shape, check_root, nothing


@dataclass(frozen=True, slots=True)
class Strip:
    """Several arrays as one flat array. It needs no copy if the arrays are adjacent in memory."""

    views: tuple[View, ...]
    whole: Array | None  # the memory of all arrays, if they are adjacent

    @classmethod
    def of(cls, arrays: Sequence[Any], *, writable: bool) -> Strip:
        views = tuple(view(one, writable=writable) for one in arrays)
        if not views:
            raise ArrayError("the list of arrays is empty")
        if any(one.dtype is not views[0].dtype for one in views):
            raise ArrayError(f"the arrays have different dtypes: {', '.join(one.dtype.name for one in views)}")
        return cls(views, _adjacent_memory(views))

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
        """Return the current elements of all arrays."""
        if self.whole is not None:
            return self.whole
        if len(self.views) == 1:
            return self.views[0].load()
        return np.concatenate([one.load() for one in self.views])

    def buffer(self) -> Array:
        """Return memory for new elements, which `store` copies to the arrays."""
        return np.empty(self.size, self.dtype.storage) if self.whole is None else self.whole

    def store(self, flat: Array) -> None:
        if self.whole is not None:
            return
        at = 0
        for one in self.views:
            one.flat[:] = flat[at : at + one.flat.size]
            one.store()
            at += one.flat.size


def _adjacent_memory(views: Sequence[View]) -> Array | None:
    """Return the memory of all views as one array; None if they are not adjacent."""
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
    """Gather the x of all ranks into `out`, in rank order. `counts` has the number of elements of each rank's x."""
    _check(out, x, sum(counts))
    if x.size != counts[rank]:
        raise InvalidSize(f"rank {rank} sends {x.size} elements, but the result has room for {counts[rank]} from it")
    shape = Shape("all_gather", x.dtype, tuple(counts))
    return Operation("all_gather", _one_exchange(shape, x, out))


def reduce_scatter_into(out: Strip, x: Strip, op: str, counts: Sequence[int], rank: int) -> Operation:
    """Reduce x into `out`, which receives this rank's part. `counts` has the sizes of the parts."""
    check_reduction(op, x.dtype, "reduce_scatter")
    _check(out, x, counts[rank])
    if x.size != sum(counts):
        raise InvalidSize(f"{x.size} elements cannot be split by {list(counts)}")
    return Operation("reduce_scatter", _one_exchange(Shape("reduce_scatter", x.dtype, tuple(counts), op), x, out))


def gather_into(out: Strip | None, x: Strip, root: int, size: int) -> Operation:
    """Gather the x of all ranks into `out` on the root. All ranks send the same number of elements."""
    root = check_root(root, size)
    if out is not None:
        _check(out, x, x.size * size)
        _check_even(out, x.size)
    return Operation("gather", _one_exchange(Shape("gather", x.dtype, (x.size,) * size, None, root), x, out))


def scatter_into(out: Strip, x: Strip | None, root: int, size: int) -> Operation:
    """Scatter the root's x: `out` receives this rank's part. All ranks receive the same number of elements."""
    root = check_root(root, size)
    if x is not None and x.size != out.size * size:
        raise InvalidSize(f"{x.size} elements cannot be split into {size} parts of {out.size}")
    if x is not None:
        _check_even(x, out.size)
    return Operation("scatter", _one_exchange(Shape("scatter", out.dtype, (out.size,) * size, None, root), x, out))


def all_to_all_into(out: Strip, x: Strip, received: Sequence[int], sent: Sequence[int], *, even: bool) -> Operation:
    """Send part j of x to rank j. If not `even`, the ranks first exchange the sizes of the parts.

    `even` means that all parts of all ranks have the same size.
    """
    if out.size != sum(received) or x.size != sum(sent):
        raise InvalidSize(f"{out.size} and {x.size} elements cannot be split by {list(received)} and {list(sent)}")
    _check(out, x, x.size if even else out.size)
    if even:
        shape = Shape("all_to_all", x.dtype, (sent[0],) * len(sent) ** 2)
        return Operation("all_to_all", _one_exchange(shape, x, out))
    call = f"all_to_all({x.dtype.name}, counts)"

    def body(exchange: Exchange) -> None:
        table = exchange_counts(exchange, sent, call)
        arriving = [int(n) for n in table[:, exchange.rank]]
        if arriving != list(received):
            raise exchange.disagree(f"rank {exchange.rank} expects {list(received)}, the others send it {arriving}")
        counts = tuple(int(n) for n in table.reshape(-1))
        _one_exchange(Shape("all_to_all", x.dtype, counts, call=call), x, out)(exchange)

    return Operation("all_to_all", body)


def _one_exchange(shape: Shape, x: Strip | None, out: Strip | None) -> Any:
    def body(exchange: Exchange) -> None:
        result = nothing(shape.dtype) if out is None else out.buffer()
        source = nothing(shape.dtype) if x is None else x.load()
        if np.may_share_memory(source, result) and not _in_place(shape, source, result, exchange.rank):
            source = source.copy()
        exchange(shape, source, result)
        if out is not None:
            out.store(result)

    return body


def _in_place(shape: Shape, source: Array, result: Array, rank: int) -> bool:
    """Return whether the smaller array is this rank's part of the larger: then the collective works in place."""
    if shape.collective == "all_to_all":
        return False
    assert isinstance(shape.counts, tuple)
    before = sum(shape.counts[:rank]) * source.itemsize
    whole, part = (result, source) if shape.collective in ("all_gather", "gather") else (source, result)
    return bool(part.ctypes.data - whole.ctypes.data == before)


def _check_even(parts: Strip, elements: int) -> None:
    """Raise `InvalidSize` if there are several arrays, one for each rank, and their sizes are not `elements`."""
    if len(parts.views) > 1 and any(count != elements for count in parts.counts):
        raise InvalidSize(f"the arrays have {list(parts.counts)} elements, but each rank has {elements}")


def _check(out: Strip, x: Strip, elements: int) -> None:
    if out.dtype is not x.dtype:
        raise ArrayError(f"the result is {out.dtype.name}, but the input is {x.dtype.name}")
    if out.size != elements:
        raise InvalidSize(f"the result has room for {out.size} elements, but there are {elements}")
