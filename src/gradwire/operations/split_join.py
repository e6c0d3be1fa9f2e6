"""Collectives that split or join arrays along their first axis.

Lengths that only some ranks know are exchanged before what they measure; nothing else is allocated by hearsay.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array, Counts, DType, View, check_reduction, view
from gradwire.errors import ArrayError, GradwireError, InvalidSize
from gradwire.operations.types import (
    CallKey,
    Declined,
    Exchange,
    Operation,
    Shape,
    algorithm_text,
    check_algorithm,
    check_root,
    nothing,
)
from gradwire.operations.values import broadcast_bytes
from gradwire.wire import parse_json

_COUNT = arrays.parse_dtype("int64")
_MOST = 1 << 48  # rows, or elements of a row


@dataclass(frozen=True, slots=True)
class _Rows:
    """An array seen as rows along its first axis; a number in an array is one row."""

    view: View
    rows: int
    tail: tuple[int, ...]

    @property
    def dtype(self) -> DType:
        return self.view.dtype

    @property
    def width(self) -> int:
        """Elements of one row."""
        return math.prod(self.tail)

    def text(self, rows: object = "?") -> str:
        return arrays.shape_text(self.dtype.name, (rows, *self.tail))


def _rows(x: Any) -> _Rows:
    source = view(x, writable=False)
    rows, *tail = source.array.shape or (1,)
    return _Rows(source, rows, tuple(tail))


def _joined(dtype: DType, rows: int, tail: tuple[int, ...]) -> Array:
    try:
        return np.empty((rows, *tail), dtype.storage)
    except (MemoryError, ValueError) as error:
        raise ArrayError(f"no memory for the result, {dtype.name}[{rows}, …]: {error}") from error


@dataclass(frozen=True, slots=True)
class _Room:
    """The caller's memory for a result."""

    out: Any
    view: View

    @property
    def elements(self) -> int:
        return self.view.array.size

    def filled(self, fill: Callable[[Array], None]) -> Any:
        fill(self.view.flat)
        self.view.store()
        return self.out

    def __str__(self) -> str:
        return arrays.describe(self.view.array)


def _room(x: _Rows, out: Any) -> _Room | None:
    """How large it must be may be known only later."""
    if out is None:
        return None
    room = _Room(out, view(out, writable=True))
    if room.view.dtype != x.dtype:
        raise ArrayError(f"out is {room}, x is {x.text(x.rows)}")
    if arrays.overlap(room.view, x.view):
        raise ArrayError("out overlaps x: pass memory of its own")
    return room


def learn_counts(exchange: Exchange, own: Sequence[int], call: str, form: CallKey | None = None) -> Array:
    """Everybody's numbers, in rank order."""
    mine = np.asarray(own, np.int64)
    everyones = np.empty((exchange.size, mine.size), np.int64)
    counts = (mine.size,) * exchange.size
    # Never to be taken for what is counted, which may be as many numbers of the same type.
    shape = Shape("all_gather", _COUNT, counts, call=call, items=("counts",))
    exchange(shape, mine, everyones.reshape(-1), form)
    _check_rows(everyones.reshape(-1))
    return everyones


def _check_rows(rows: Iterable[int]) -> None:
    if min(rows) < 0:
        raise InvalidSize(f"a peer announced {min(rows)} rows")


def all_gather(x: Any, out: Any, algorithm: str) -> Operation:
    check_algorithm("all_gather", algorithm)
    source = _rows(x)
    room = _room(source, out)
    form = CallKey("all_gather", source.dtype, row_shape=source.tail) if algorithm == "auto" else None

    def body(exchange: Exchange) -> Any:
        call = f"all_gather({source.text()}{algorithm_text(algorithm)})"
        rows = [int(n) for n in learn_counts(exchange, [source.rows], call, form)[:, 0]]
        return _gather_rows(exchange, source, rows, room, algorithm)

    return Operation("all_gather", body)


def all_gather_rows(x: Any, rows: Sequence[int], out: Any) -> Operation:
    """The second half of an all_gather: all ranks know how many rows each of them brings."""
    source = _rows(x)
    room = _room(source, out)

    def body(exchange: Exchange) -> Any:
        _check_rows(rows)
        return _gather_rows(exchange, source, rows, room, "auto")

    return Operation("all_gather", body)


def _gather_rows(exchange: Exchange, source: _Rows, rows: Sequence[int], room: _Room | None, algorithm: str) -> Any:
    counts = tuple(n * source.width for n in rows)
    call = f"all_gather({source.text()}{algorithm_text(algorithm)})"
    shape = Shape("all_gather", source.dtype, counts, None, None, algorithm, call)
    form = CallKey("all_gather", source.dtype, None, None, tuple(rows), source.tail) if algorithm == "auto" else None
    if room is not None and room.elements == sum(counts):
        return room.filled(lambda flat: exchange(shape, source.view.load(), flat, form))
    result = _joined(source.dtype, sum(rows), source.tail)
    exchange(shape, source.view.load(), result.reshape(-1), form)
    if room is not None:  # of another size, which the others could not know: they have their result
        return Declined(ArrayError(f"out is {room}, and the result {source.text(sum(rows))}"))
    return result


def gather(x: Any, root: int, size: int, algorithm: str) -> Operation:
    check_algorithm("gather", algorithm)
    root = check_root(root, size)
    source = _rows(x)
    call = f"gather({source.text()}, root={root}{algorithm_text(algorithm)})"

    def body(exchange: Exchange) -> Array | None:
        rows = [int(n) for n in learn_counts(exchange, [source.rows], call)[:, 0]]
        result = _joined(source.dtype, sum(rows), source.tail) if exchange.rank == root else None
        counts = tuple(n * source.width for n in rows)
        shape = Shape("gather", source.dtype, counts, None, root, algorithm, call)
        exchange(shape, source.view.load(), nothing(source.dtype) if result is None else result.reshape(-1))
        return result

    return Operation("gather", body)


def _split(rows: int, size: int, counts: Counts | None, name: str) -> tuple[int, ...]:
    """Rows for each rank: as the caller says, or equal parts."""
    if counts is None:
        if rows % size:
            raise InvalidSize(f"{rows} rows cannot be split evenly over {size} ranks; say how with {name}=")
        return (rows // size,) * size
    parts = _counts(counts, size, name)
    if sum(parts) != rows:
        raise InvalidSize(f"{name}={list(parts)} add up to {sum(parts)}, but there are {rows} rows")
    return parts


def _counts(counts: Counts, size: int, name: str) -> tuple[int, ...]:
    try:
        parts = tuple(map(operator.index, counts))
    except TypeError as error:
        raise InvalidSize(f"{name}={counts!r} must be a sequence of {size} whole numbers") from error
    if len(parts) != size or any(n < 0 for n in parts):
        raise InvalidSize(f"{name}={list(parts)} must be {size} numbers, none of them negative")
    return parts


def reduce_scatter(x: Any, op: str, counts: Counts | None, out: Any, size: int, rank: int, algorithm: str) -> Operation:
    check_algorithm("reduce_scatter", algorithm)
    source = _rows(x)
    check_reduction(op, source.dtype)
    parts = _split(source.rows, size, counts, "counts")
    elements = tuple(n * source.width for n in parts)
    room = _room(source, out)
    if room is not None and room.elements != elements[rank]:
        raise ArrayError(f"out is {room}, and this rank's part {source.text(parts[rank])}")
    shape = Shape("reduce_scatter", source.dtype, elements, op, None, algorithm)
    evenly = counts is None and algorithm == "auto"
    form = CallKey("reduce_scatter", source.dtype, op, None, sum(elements)) if evenly else None

    def body(exchange: Exchange) -> Any:
        if room is not None:
            return room.filled(lambda flat: exchange(shape, source.view.load(), flat, form))
        result = _joined(source.dtype, parts[rank], source.tail)
        exchange(shape, source.view.load(), result.reshape(-1), form)
        return result

    return Operation("reduce_scatter", body)


def scatter(x: Any, root: int, counts: Counts | None, size: int, rank: int, algorithm: str) -> Operation:
    """Only the root knows what is scattered; if that cannot be, all ranks are told and raise the same."""
    check_algorithm("scatter", algorithm)
    root = check_root(root, size)
    expected = None if counts is None else _counts(counts, size, "counts")
    source, announced = _to_scatter(x, expected, size) if rank == root else (None, b"")
    call = f"scatter(root={root}{algorithm_text(algorithm)})"

    def body(exchange: Exchange) -> Array | Declined:
        received = broadcast_bytes(exchange, announced, root, call)
        if isinstance(received, Declined):
            return received
        try:
            dtype, tail, parts = _announced(received, exchange.size)
        except ValueError as error:
            raise exchange.disagree(f"rank {root} announces what cannot be scattered: {error}") from error
        if expected is not None and list(expected) != parts:
            reason = f"rank {exchange.rank} expects counts={list(expected)}, rank {root} splits by {parts}"
            raise exchange.disagree(reason)
        result = _joined(dtype, parts[exchange.rank], tail)
        shape = Shape("scatter", dtype, tuple(n * math.prod(tail) for n in parts), None, root, algorithm, call)
        exchange(shape, nothing(dtype) if source is None else source.view.load(), result.reshape(-1))
        return result

    return Operation("scatter", body)


def _to_scatter(x: Any, counts: Counts | None, size: int) -> tuple[_Rows | None, bytes | GradwireError]:
    """The root's array and what it announces: dtype, shape of a row and counts, or why there is nothing to scatter."""
    if x is None:
        return None, ArrayError("the root of a scatter must pass the array")
    try:
        source = _rows(x)
        parts = _split(source.rows, size, counts, "counts")
    except (ArrayError, InvalidSize) as error:
        return None, error
    return source, json.dumps([source.dtype.name, source.tail, parts]).encode()


def _announced(data: bytes, size: int) -> tuple[DType, tuple[int, ...], list[int]]:
    """The dtype, the shape of a row and the counts that a root has told; ValueError if it tells nonsense."""
    match parse_json(data):
        case [str(name), list(tail), list(parts)] if len(parts) == size:
            if all(type(n) is int and 0 <= n < _MOST for n in (*tail, *parts)):
                return arrays.dtype_called(name), tuple(tail), parts
    raise ValueError(f"malformed announcement {data[:200]!r}")


def all_to_all(x: Any, send_counts: Counts | None, recv_counts: Counts | None, size: int, algorithm: str) -> Operation:
    check_algorithm("all_to_all", algorithm)
    source = _rows(x)
    sent = _split(source.rows, size, send_counts, "send_counts")
    wanted = None if recv_counts is None else _counts(recv_counts, size, "recv_counts")
    even = send_counts is None and recv_counts is None
    rows = source.rows if even else "?"
    call = f"all_to_all({source.text(rows)}{'' if even else ', counts'}{algorithm_text(algorithm)})"

    def body(exchange: Exchange) -> Array:
        table = np.tile(np.asarray(sent, np.int64), (size, 1)) if even else learn_counts(exchange, sent, call)
        got = [int(n) for n in table[:, exchange.rank]]
        if wanted is not None and list(wanted) != got:
            reason = f"rank {exchange.rank} expects recv_counts={list(wanted)}, the others send it {got}"
            raise exchange.disagree(reason)
        result = _joined(source.dtype, sum(got), source.tail)
        counts = tuple(int(n) * source.width for n in table.reshape(-1))
        shape = Shape("all_to_all", source.dtype, counts, None, None, algorithm, call)
        exchange(shape, source.view.load(), result.reshape(-1))
        return result

    return Operation("all_to_all", body)
