"""What each collective does, said once: its arguments checked, its exchanges named, its result assembled.

A function here checks everything that can be checked without a peer and returns an `Operation`. A group runs it at once
on the caller's thread; a stream runs it in its turn. Both use the same `Exchange`, which carries out one schedule.
"""

from __future__ import annotations

import itertools
import json
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array, DType, View, check_reduction, view
from gradwire.collectives import algorithms
from gradwire.errors import ArrayError, GradwireError, InvalidRank, InvalidSize, UnsupportedOp
from gradwire.executors.plan import ragged_bounds

MAX_VALUE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """What an exchange is: everything that all ranks must agree on, and nothing else."""

    collective: str
    dtype: DType
    counts: int | tuple[int, ...]
    op: str | None = None
    root: int | None = None
    algorithm: str = "auto"
    call: str = ""  # how the user's call reads, where it is not just this exchange
    items: tuple[str, ...] = ()


class Exchange(Protocol):
    """Carries out one schedule as the group's next call."""

    rank: int
    size: int

    def __call__(self, shape: Shape, x: Array, out: Array) -> None: ...

    def disagree(self) -> GradwireError:
        """Ranks turn out to have meant different things: break the group, and the error to raise."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A checked call, ready to run."""

    name: str
    body: Callable[[Exchange], Any]


def _nothing(dtype: DType) -> Array:
    return np.empty(0, dtype.storage)


def check_algorithm(collective: str, algorithm: str) -> None:
    if algorithm != "auto" and algorithm not in algorithms(collective):
        known = ", ".join(("auto", *algorithms(collective)))
        raise UnsupportedOp(f"{collective} has no algorithm {algorithm!r}; it has: {known}", operation=collective)


def check_root(root: int, size: int) -> int:
    if not isinstance(root, (int, np.integer)) or isinstance(root, bool) or not 0 <= root < size:
        raise InvalidRank(f"root {root!r} is not one of the ranks 0 … {size - 1}", rank=_rank_or_none(root))
    return int(root)


def _rank_or_none(value: object) -> int | None:
    return int(value) if isinstance(value, (int, np.integer)) else None


def all_reduce(x: Any, op: str, out: Any, algorithm: str) -> Operation:
    check_algorithm("all_reduce", algorithm)
    if isinstance(x, (numbers.Number, np.generic)):
        if out is not None:
            raise ArrayError("a number has no out=; the result is returned")
        return _all_reduce_number(x, op, algorithm)
    source = view(x, writable=out is None)
    target, result = _destination(source, x, out)
    check_reduction(op, source.dtype)
    shape = Shape("all_reduce", source.dtype, source.flat.size, op, None, algorithm)

    def body(exchange: Exchange) -> Any:
        exchange(shape, source.flat, target.flat)
        target.store()
        return result

    return Operation("all_reduce", body)


def _all_reduce_number(x: Any, op: str, algorithm: str) -> Operation:
    array = arrays.number_as_array(x)
    check_reduction(op, arrays.dtype_of(array))
    shape = Shape("all_reduce", arrays.dtype_of(array), 1, op, None, algorithm)

    def body(exchange: Exchange) -> Any:
        exchange(shape, array, array)
        return array[0] if isinstance(x, np.generic) else array[0].item()

    return Operation("all_reduce", body)


def _destination(source: View, x: Any, out: Any) -> tuple[View, Any]:
    """Where a reduction of x goes: its own memory, or `out`, which must match it and not overlap it half-way."""
    if out is None or out is x:
        return source, x
    target = view(out, writable=True)
    if target.dtype != source.dtype or target.array.size != source.array.size:
        raise ArrayError(f"out is {arrays.describe(target.array)}, which does not fit {arrays.describe(source.array)}")
    if np.may_share_memory(target.flat, source.flat) and not _same_place(target.flat, source.flat):
        raise ArrayError("out overlaps x: pass x itself as out, or memory of its own")
    return target, out


def _same_place(a: Array, b: Array) -> bool:
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


def broadcast(x: Any, root: int, size: int, rank: int, algorithm: str) -> Operation:
    check_algorithm("broadcast", algorithm)
    root = check_root(root, size)
    source = view(x, writable=rank != root)
    shape = Shape("broadcast", source.dtype, source.flat.size, None, root, algorithm)

    def body(exchange: Exchange) -> Any:
        exchange(shape, source.flat if exchange.rank == root else _nothing(source.dtype), source.flat)
        if exchange.rank != root:
            source.store()
        return x

    return Operation("broadcast", body)


def reduce(x: Any, op: str, root: int, out: Any, size: int, rank: int, algorithm: str) -> Operation:
    check_algorithm("reduce", algorithm)
    root = check_root(root, size)
    source = view(x, writable=False)
    check_reduction(op, source.dtype)
    target, result = None, None
    if rank == root:
        result = out if out is not None else np.empty(source.array.shape, source.dtype.storage)
        target, _ = _destination(source, x, result)
    shape = Shape("reduce", source.dtype, source.flat.size, op, root, algorithm)

    def body(exchange: Exchange) -> Any:
        exchange(shape, source.flat, _nothing(source.dtype) if target is None else target.flat)
        if target is not None:
            target.store()
        return result

    return Operation("reduce", body)


def barrier(algorithm: str) -> Operation:
    check_algorithm("all_reduce", algorithm)
    shape = Shape("all_reduce", arrays.parse_dtype("uint8"), 1, "max", None, algorithm, "barrier()")

    def body(exchange: Exchange) -> None:
        token = np.zeros(1, np.uint8)
        exchange(shape, token, token)

    return Operation("barrier", body)


# -- what is split or joined along the first axis ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """An array seen as rows along its first axis."""

    flat: Array
    dtype: DType
    rows: int
    tail: tuple[int, ...]

    @property
    def width(self) -> int:
        """Elements of one row."""
        width = 1
        for length in self.tail:
            width *= length
        return width

    def text(self, rows: object = "?") -> str:
        return f"{self.dtype.name}[{', '.join(map(str, (rows, *self.tail)))}]"


def _rows(x: Any) -> _Rows:
    source = view(x, writable=False)
    array = source.array
    if array.ndim == 0:
        return _Rows(source.flat, source.dtype, 1, ())
    return _Rows(source.flat, source.dtype, array.shape[0], tuple(array.shape[1:]))


def _joined(dtype: DType, rows: int, tail: tuple[int, ...]) -> Array:
    try:
        return np.empty((rows, *tail), dtype.storage)
    except (MemoryError, ValueError) as error:
        raise ArrayError(f"no memory for the result, {dtype.name}[{rows}, …]: {error}") from error


def _learn_counts(exchange: Exchange, own: Sequence[int], call: str) -> Array:
    """Everybody's numbers, in rank order: sizes that must be learned are exchanged before what they measure."""
    dtype = arrays.parse_dtype("int64")
    mine = np.asarray(own, np.int64)
    everyones = np.empty((exchange.size, mine.size), np.int64)
    counts = (mine.size,) * exchange.size
    exchange(Shape("all_gather", dtype, counts, call=call), mine, everyones.reshape(-1))
    return everyones


def all_gather(x: Any, algorithm: str) -> Operation:
    check_algorithm("all_gather", algorithm)
    source = _rows(x)
    call = f"all_gather({source.text()}{_algorithm(algorithm)})"

    def body(exchange: Exchange) -> Array:
        rows = [int(n) for n in _learn_counts(exchange, [source.rows], call)[:, 0]]
        result = _joined(source.dtype, sum(rows), source.tail)
        counts = tuple(n * source.width for n in rows)
        shape = Shape("all_gather", source.dtype, counts, None, None, algorithm, call)
        exchange(shape, source.flat, result.reshape(-1))
        return result

    return Operation("all_gather", body)


def gather(x: Any, root: int, size: int, algorithm: str) -> Operation:
    check_algorithm("gather", algorithm)
    root = check_root(root, size)
    source = _rows(x)
    call = f"gather({source.text()}, root={root}{_algorithm(algorithm)})"

    def body(exchange: Exchange) -> Array | None:
        rows = [int(n) for n in _learn_counts(exchange, [source.rows], call)[:, 0]]
        result = _joined(source.dtype, sum(rows), source.tail) if exchange.rank == root else None
        counts = tuple(n * source.width for n in rows)
        shape = Shape("gather", source.dtype, counts, None, root, algorithm, call)
        exchange(shape, source.flat, _nothing(source.dtype) if result is None else result.reshape(-1))
        return result

    return Operation("gather", body)


def _split(rows: int, size: int, counts: Sequence[int] | None, name: str) -> tuple[int, ...]:
    """Rows for each rank: as the caller says, or equal parts."""
    if counts is None:
        if rows % size:
            raise InvalidSize(f"{rows} rows cannot be split evenly over {size} ranks; say how with {name}=")
        return (rows // size,) * size
    parts = _counts(counts, size, name)
    if sum(parts) != rows:
        raise InvalidSize(f"{name}={list(parts)} add up to {sum(parts)}, but there are {rows} rows")
    return parts


def _counts(counts: Sequence[int], size: int, name: str) -> tuple[int, ...]:
    try:
        parts = tuple(int(n) for n in counts)
    except (TypeError, ValueError) as error:
        raise InvalidSize(f"{name} must be a sequence of {size} numbers") from error
    if len(parts) != size or any(n < 0 for n in parts):
        raise InvalidSize(f"{name}={list(parts)} must be {size} numbers, none of them negative")
    return parts


def reduce_scatter(x: Any, op: str, counts: Sequence[int] | None, size: int, rank: int, algorithm: str) -> Operation:
    check_algorithm("reduce_scatter", algorithm)
    source = _rows(x)
    check_reduction(op, source.dtype)
    parts = _split(source.rows, size, counts, "counts")
    result = _joined(source.dtype, parts[rank], source.tail)
    elements = tuple(n * source.width for n in parts)
    shape = Shape("reduce_scatter", source.dtype, elements, op, None, algorithm)

    def body(exchange: Exchange) -> Array:
        exchange(shape, source.flat, result.reshape(-1))
        return result

    return Operation("reduce_scatter", body)


def scatter(x: Any, root: int, counts: Sequence[int] | None, size: int, rank: int, algorithm: str) -> Operation:
    check_algorithm("scatter", algorithm)
    root = check_root(root, size)
    expected = None if counts is None else _counts(counts, size, "counts")
    source = None
    if rank == root:
        if x is None:
            raise ArrayError("the root of a scatter must pass the array")
        source = _rows(x)
        expected = _split(source.rows, size, counts, "counts")
    call = f"scatter(root={root}{_algorithm(algorithm)})"

    def body(exchange: Exchange) -> Array:
        plan = None
        if source is not None:
            assert expected is not None
            plan = [source.dtype.name, list(source.tail), list(expected)]
        name, tail, parts = _broadcast_json(exchange, plan, root, call)
        dtype = arrays.parse_dtype(name)
        if expected is not None and list(expected) != parts:
            raise exchange.disagree()
        width = int(np.prod(tail, dtype=np.int64)) if tail else 1
        result = _joined(dtype, parts[exchange.rank], tuple(tail))
        shape = Shape("scatter", dtype, tuple(n * width for n in parts), None, root, algorithm, call)
        exchange(shape, _nothing(dtype) if source is None else source.flat, result.reshape(-1))
        return result

    return Operation("scatter", body)


def all_to_all(
    x: Any, send_counts: Sequence[int] | None, recv_counts: Sequence[int] | None, size: int, algorithm: str
) -> Operation:
    check_algorithm("all_to_all", algorithm)
    source = _rows(x)
    sent = _split(source.rows, size, send_counts, "send_counts")
    wanted = None if recv_counts is None else _counts(recv_counts, size, "recv_counts")
    even = send_counts is None and recv_counts is None
    rows = source.rows if even else "?"
    call = f"all_to_all({source.text(rows)}{'' if even else ', counts'}{_algorithm(algorithm)})"

    def body(exchange: Exchange) -> Array:
        table = np.tile(np.asarray(sent, np.int64), (size, 1)) if even else _learn_counts(exchange, sent, call)
        got = [int(n) for n in table[:, exchange.rank]]
        if wanted is not None and list(wanted) != got:
            raise exchange.disagree()
        result = _joined(source.dtype, sum(got), source.tail)
        counts = tuple(int(n) * source.width for n in table.reshape(-1))
        shape = Shape("all_to_all", source.dtype, counts, None, None, algorithm, call)
        exchange(shape, source.flat, result.reshape(-1))
        return result

    return Operation("all_to_all", body)


def _algorithm(algorithm: str) -> str:
    return "" if algorithm == "auto" else f", algorithm={algorithm!r}"


# -- named maps and values --------------------------------------------------------------------------------------------


def all_reduce_named(tensors: Mapping[str, Any], op: str, algorithm: str) -> Operation:
    check_algorithm("all_reduce", algorithm)
    if not isinstance(tensors, Mapping):
        raise ArrayError(f"expected a dict of arrays by name, got {type(tensors).__name__}")
    views: dict[str, View] = {}
    for name in sorted(tensors, key=str):
        try:
            views[str(name)] = view(tensors[name], writable=True)
            check_reduction(op, views[str(name)].dtype)
        except (ArrayError, UnsupportedOp) as error:
            error.args = (f"{name!r}: {error.message}", *error.args[1:])
            raise
    items = tuple(f"{name!r}: {arrays.describe(v.array)}" for name, v in views.items())
    by_dtype: dict[DType, list[View]] = {}
    for one in views.values():
        by_dtype.setdefault(one.dtype, []).append(one)
    call = f"all_reduce_named({len(items)} arrays, op={op!r}{_algorithm(algorithm)})"

    def body(exchange: Exchange) -> Mapping[str, Any]:
        # An empty map is still a call that all ranks must make.
        for dtype, members in by_dtype.items() or [(arrays.parse_dtype("uint8"), [])]:
            flat = np.concatenate([one.flat for one in members]) if members else np.empty(0, np.uint8)
            kind = op if members else "max"
            exchange(Shape("all_reduce", dtype, flat.size, kind, None, algorithm, call, items), flat, flat)
            at = 0
            for one in members:
                one.flat[:] = flat[at : at + one.flat.size]
                at += one.flat.size
                one.store()
        return tensors

    return Operation("all_reduce_named", body)


def broadcast_value(value: Any, root: int, size: int, rank: int) -> Operation:
    root = check_root(root, size)
    if rank == root:
        _encode(value)

    def body(exchange: Exchange) -> Any:
        return _broadcast_json(exchange, value, root, f"broadcast_value(root={root})")

    return Operation("broadcast_value", body)


def all_gather_values(value: Any) -> Operation:
    data = np.frombuffer(_encode(value), np.uint8)
    call = "all_gather_values()"

    def body(exchange: Exchange) -> list[Any]:
        sizes = [_checked_size(n) for n in _learn_counts(exchange, [data.size], call)[:, 0]]
        joined = np.empty(sum(sizes), np.uint8)
        exchange(Shape("all_gather", arrays.parse_dtype("uint8"), tuple(sizes), call=call), data, joined)
        bounds = ragged_bounds(sizes)
        return [json.loads(joined[a:b].tobytes()) for a, b in itertools.pairwise(bounds)]

    return Operation("all_gather_values", body)


def _encode(value: Any) -> bytes:
    try:
        data = json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ArrayError(
            f"only JSON-like values can be sent (numbers, strings, lists, dicts with string keys, None): {error}"
        ) from error
    if len(data) > MAX_VALUE_BYTES:
        raise InvalidSize(f"a value of {len(data)} bytes is too large; send it as an array (at most {MAX_VALUE_BYTES})")
    return data


def _checked_size(claimed: Any) -> int:
    if not 0 <= claimed <= MAX_VALUE_BYTES:
        raise InvalidSize(f"a peer announced a value of {claimed} bytes")
    return int(claimed)


def _broadcast_json(exchange: Exchange, value: Any, root: int, call: str) -> Any:
    size = np.zeros(1, np.int64)
    data = np.empty(0, np.uint8)
    if exchange.rank == root:
        data = np.frombuffer(_encode(value), np.uint8)
        size[0] = data.size
    _broadcast_exchange(exchange, size, root, call)
    if exchange.rank != root:
        data = np.empty(_checked_size(size[0]), np.uint8)
    _broadcast_exchange(exchange, data, root, call)
    return json.loads(data.tobytes())


def _broadcast_exchange(exchange: Exchange, array: Array, root: int, call: str) -> None:
    dtype = arrays.dtype_of(array)
    brought = array if exchange.rank == root else _nothing(dtype)
    exchange(Shape("broadcast", dtype, array.size, None, root, "auto", call), brought, array)
