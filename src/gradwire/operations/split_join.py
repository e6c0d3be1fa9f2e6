"""Defines collectives that split or join arrays along their first axis.

Lengths that only some ranks know are exchanged before the data, and only these lengths decide how much is allocated.
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
from gradwire.operations.registry import collective
from gradwire.operations.types import (
    CallKey,
    Declined,
    Exchange,
    Operation,
    Position,
    Shape,
    algorithm_text,
    check_algorithm,
    check_root,
    nothing,
)
from gradwire.operations.values import broadcast_bytes
from gradwire.wire import parse_json

_COUNT = arrays.parse_dtype("int64")
_MAX_LENGTH = 1 << 48  # of an axis


@dataclass(frozen=True, slots=True)
class _Rows:
    """An array as rows along its first axis. A zero-dimensional array is one row."""

    view: View
    rows: int
    tail: tuple[int, ...]

    @property
    def dtype(self) -> DType:
        return self.view.dtype

    @property
    def width(self) -> int:
        """The number of elements of one row."""
        return math.prod(self.tail)

    def text(self, rows: object = "?") -> str:
        return arrays.shape_text(self.dtype.name, (rows, *self.tail))


def _rows(x: Any) -> _Rows:
    source = view(x, writable=False)
    rows, *tail = source.array.shape or (1,)
    return _Rows(source, rows, tuple(tail))


def _allocate(dtype: DType, rows: int, tail: tuple[int, ...]) -> Array:
    try:
        return np.empty((rows, *tail), dtype.storage)
    except (MemoryError, ValueError) as error:
        raise ArrayError(f"cannot allocate the result, {dtype.name}[{rows}, …]: {error}") from error


@dataclass(frozen=True, slots=True)
class _Destination:
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


def _destination(x: _Rows, out: Any) -> _Destination | None:
    """Return `out` as a destination, without a check of its size, which may be known only later."""
    if out is None:
        return None
    destination = _Destination(out, view(out, writable=True))
    if destination.view.dtype != x.dtype:
        raise ArrayError(f"out is {destination}, x is {x.text(x.rows)}")
    if arrays.overlap(destination.view, x.view):
        raise ArrayError("out overlaps x: pass separate memory")
    return destination


def exchange_counts(exchange: Exchange, own: Sequence[int], call: str, key: CallKey | None = None) -> Array:
    """Gather the counts of all ranks; row r of the result has those of rank r."""
    own_counts = np.asarray(own, np.int64)
    all_counts = np.empty((exchange.size, own_counts.size), np.int64)
    lengths = (own_counts.size,) * exchange.size
    # `items` gives this exchange another fingerprint than the exchange of the data, which may have the same shape.
    shape = Shape("all_gather", _COUNT, lengths, call=call, items=("counts",))
    exchange(shape, own_counts, all_counts.reshape(-1), key)
    _check_rows(all_counts.reshape(-1))
    return all_counts


def _check_rows(rows: Iterable[int]) -> None:
    if min(rows) < 0:
        raise InvalidSize(f"a peer announced {min(rows)} rows")


@collective(fast="JOINED_ROWS")
def all_gather(at: Position, x: Any, *, out: Any = None, algorithm: str = "auto") -> Operation:
    check_algorithm("all_gather", algorithm)
    source = _rows(x)
    destination = _destination(source, out)
    key = CallKey("all_gather", source.dtype, row_shape=source.tail) if algorithm == "auto" else None

    def body(exchange: Exchange) -> Any:
        call = f"all_gather({source.text()}{algorithm_text(algorithm)})"
        rows = [int(n) for n in exchange_counts(exchange, [source.rows], call, key)[:, 0]]
        return _gather_rows(exchange, source, rows, destination, algorithm)

    return Operation("all_gather", body)


def all_gather_rows(x: Any, rows: Sequence[int], out: Any) -> Operation:
    """Return the second half of an all_gather: all ranks already know the number of rows of each rank."""
    source = _rows(x)
    destination = _destination(source, out)

    def body(exchange: Exchange) -> Any:
        _check_rows(rows)
        return _gather_rows(exchange, source, rows, destination, "auto")

    return Operation("all_gather", body)


def _gather_rows(
    exchange: Exchange, source: _Rows, rows: Sequence[int], destination: _Destination | None, algorithm: str
) -> Any:
    counts = tuple(n * source.width for n in rows)
    call = f"all_gather({source.text()}{algorithm_text(algorithm)})"
    shape = Shape("all_gather", source.dtype, counts, None, None, algorithm, call)
    key = CallKey("all_gather", source.dtype, None, None, tuple(rows), source.tail) if algorithm == "auto" else None
    if destination is not None and destination.elements == sum(counts):
        return destination.filled(lambda flat: exchange(shape, source.view.load(), flat, key))
    result = _allocate(source.dtype, sum(rows), source.tail)
    exchange(shape, source.view.load(), result.reshape(-1), key)
    if destination is not None:  # its size is wrong; the other ranks did not know this and have their result
        return Declined(ArrayError(f"out is {destination}, but the result is {source.text(sum(rows))}"))
    return result


@collective()
def gather(at: Position, x: Any, root: int = 0, *, algorithm: str = "auto") -> Operation:
    check_algorithm("gather", algorithm)
    root = check_root(root, at.size)
    source = _rows(x)
    call = f"gather({source.text()}, root={root}{algorithm_text(algorithm)})"

    def body(exchange: Exchange) -> Array | None:
        rows = [int(n) for n in exchange_counts(exchange, [source.rows], call)[:, 0]]
        result = _allocate(source.dtype, sum(rows), source.tail) if exchange.rank == root else None
        counts = tuple(n * source.width for n in rows)
        shape = Shape("gather", source.dtype, counts, None, root, algorithm, call)
        exchange(shape, source.view.load(), nothing(source.dtype) if result is None else result.reshape(-1))
        return result

    return Operation("gather", body)


def _split(rows: int, size: int, counts: Counts | None, name: str) -> tuple[int, ...]:
    """Return the number of rows of each rank: the caller's counts, or equal parts."""
    if counts is None:
        if rows % size:
            raise InvalidSize(f"{rows} rows cannot be split evenly over {size} ranks; pass the sizes as {name}=")
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
        raise InvalidSize(f"{name}={list(parts)} must be {size} non-negative numbers")
    return parts


@collective(fast="SPLIT_ROWS")
def reduce_scatter(
    at: Position,
    x: Any,
    op: str = "sum",
    *,
    counts: Counts | None = None,
    out: Any = None,
    algorithm: str = "auto",
) -> Operation:
    check_algorithm("reduce_scatter", algorithm)
    source = _rows(x)
    check_reduction(op, source.dtype, "reduce_scatter")
    parts, rank = _split(source.rows, at.size, counts, "counts"), at.rank
    elements = tuple(n * source.width for n in parts)
    destination = _destination(source, out)
    if destination is not None and destination.elements != elements[rank]:
        raise ArrayError(f"out is {destination}, but this rank's part is {source.text(parts[rank])}")
    shape = Shape("reduce_scatter", source.dtype, elements, op, None, algorithm)
    evenly = counts is None and algorithm == "auto"
    key = CallKey("reduce_scatter", source.dtype, op, None, sum(elements)) if evenly else None

    def body(exchange: Exchange) -> Any:
        if destination is not None:
            return destination.filled(lambda flat: exchange(shape, source.view.load(), flat, key))
        result = _allocate(source.dtype, parts[rank], source.tail)
        exchange(shape, source.view.load(), result.reshape(-1), key)
        return result

    return Operation("reduce_scatter", body)


@collective()
def scatter(
    at: Position, x: Any = None, root: int = 0, *, counts: Counts | None = None, algorithm: str = "auto"
) -> Operation:
    """Only the root knows the array. If the array cannot be scattered, all ranks receive and raise the root's error."""
    check_algorithm("scatter", algorithm)
    root = check_root(root, at.size)
    expected = None if counts is None else _counts(counts, at.size, "counts")
    source, announcement = _to_scatter(x, expected, at.size) if at.rank == root else (None, b"")
    call = f"scatter(root={root}{algorithm_text(algorithm)})"

    def body(exchange: Exchange) -> Array | Declined:
        received = broadcast_bytes(exchange, announcement, root, call)
        if isinstance(received, Declined):
            return received
        try:
            dtype, tail, parts = _parse_announcement(received, exchange.size)
        except ValueError as error:
            raise exchange.disagree(f"rank {root} announces an invalid scatter: {error}") from error
        if expected is not None and list(expected) != parts:
            reason = f"rank {exchange.rank} expects counts={list(expected)}, rank {root} splits by {parts}"
            raise exchange.disagree(reason)
        result = _allocate(dtype, parts[exchange.rank], tail)
        shape = Shape("scatter", dtype, tuple(n * math.prod(tail) for n in parts), None, root, algorithm, call)
        exchange(shape, nothing(dtype) if source is None else source.view.load(), result.reshape(-1))
        return result

    return Operation("scatter", body)


def _to_scatter(x: Any, counts: Counts | None, size: int) -> tuple[_Rows | None, bytes | GradwireError]:
    """Return the root's array and its announcement: dtype, shape of a row and counts, or the error."""
    if x is None:
        return None, ArrayError("the root of a scatter must pass the array")
    try:
        source = _rows(x)
        parts = _split(source.rows, size, counts, "counts")
    except (ArrayError, InvalidSize) as error:
        return None, error
    return source, json.dumps([source.dtype.name, source.tail, parts]).encode()


def _parse_announcement(data: bytes, size: int) -> tuple[DType, tuple[int, ...], list[int]]:
    """Return the dtype, the shape of a row and the counts that the root announced; raise ValueError if invalid."""
    match parse_json(data):
        case [str(name), list(tail), list(parts)] if len(parts) == size:
            if all(type(n) is int and 0 <= n < _MAX_LENGTH for n in (*tail, *parts)):
                return arrays.dtype_by_name(name), tuple(tail), parts
    raise ValueError(f"malformed announcement {data[:200]!r}")


@collective()
def all_to_all(
    at: Position,
    x: Any,
    send_counts: Counts | None = None,
    recv_counts: Counts | None = None,
    *,
    algorithm: str = "auto",
) -> Operation:
    check_algorithm("all_to_all", algorithm)
    source = _rows(x)
    sent = _split(source.rows, at.size, send_counts, "send_counts")
    expected = None if recv_counts is None else _counts(recv_counts, at.size, "recv_counts")
    even = send_counts is None and recv_counts is None
    rows = source.rows if even else "?"
    call = f"all_to_all({source.text(rows)}{'' if even else ', counts'}{algorithm_text(algorithm)})"

    def body(exchange: Exchange) -> Array:
        table = np.tile(np.asarray(sent, np.int64), (at.size, 1)) if even else exchange_counts(exchange, sent, call)
        arriving = [int(n) for n in table[:, exchange.rank]]
        if expected is not None and list(expected) != arriving:
            reason = f"rank {exchange.rank} expects recv_counts={list(expected)}, the others send it {arriving}"
            raise exchange.disagree(reason)
        result = _allocate(source.dtype, sum(arriving), source.tail)
        counts = tuple(int(n) * source.width for n in table.reshape(-1))
        shape = Shape("all_to_all", source.dtype, counts, None, None, algorithm, call)
        exchange(shape, source.view.load(), result.reshape(-1))
        return result

    return Operation("all_to_all", body)
