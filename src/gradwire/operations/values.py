"""Defines collectives on JSON-like values.

A value that cannot be sent raises an error on all ranks, and the group stays usable.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import ArrayError, GradwireError, InvalidSize
from gradwire.executors.plan import ragged_bounds
from gradwire.operations.registry import collective
from gradwire.operations.types import Declined, Exchange, Operation, Position, Shape, check_root, nothing
from gradwire.wire import parse_json

MAX_VALUE_BYTES = 256 << 20
MAX_TEXT = 2000
_BYTE = arrays.parse_dtype("uint8")
_KINDS: dict[str, type[GradwireError]] = {"ArrayError": ArrayError, "InvalidSize": InvalidSize}


@collective(schedule="broadcast")
def broadcast_value(at: Position, value: Any = None, root: int = 0) -> Operation:
    root = check_root(root, at.size)
    call = f"broadcast_value(root={root})"
    data = encode_or_error(value) if at.rank == root else b""

    def body(exchange: Exchange) -> Any:
        received = broadcast_bytes(exchange, data, root, call)
        return received if isinstance(received, Declined) else decode(received)

    return Operation("broadcast_value", body)


@collective(schedule="all_gather")
def all_gather_values(at: Position, value: Any) -> Operation:
    data = encode_or_error(value)
    call = "all_gather_values()"

    def body(exchange: Exchange) -> list[Any] | Declined:
        message, size = _message(data)
        announced = np.empty(exchange.size, np.int64)
        shape = Shape("all_gather", arrays.dtype_of(announced), (1,) * exchange.size, call=call)
        exchange(shape, np.array([size], np.int64), announced)
        sizes = [_checked_size(n) for n in announced]
        joined = np.empty(sum(map(abs, sizes)), np.uint8)
        exchange(Shape("all_gather", _BYTE, tuple(map(abs, sizes)), call=call), message, joined)
        bounds = itertools.pairwise(ragged_bounds([abs(n) for n in sizes]))
        texts = [joined[a:b].tobytes() for a, b in bounds]
        for rank, size in enumerate(sizes):
            if size < 0:
                return _declined(texts[rank], rank, exchange.rank, data, call)
        values = [decode(text) for text in texts]
        return next((one for one in values if isinstance(one, Declined)), values)

    return Operation("all_gather_values", body)


def encode_or_error(value: Any) -> bytes | GradwireError:
    """Return a value as bytes, or the error if it cannot be encoded."""
    try:
        _check_keys(value)
        data = json.dumps(value, separators=(",", ":"), default=_python_number).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return ArrayError(
            f"only JSON-like values can be sent (numbers, strings, lists, dicts with string keys, None): {error}"
        )
    if len(data) > MAX_VALUE_BYTES:
        return InvalidSize(f"a value of {len(data)} bytes is too large (more than {MAX_VALUE_BYTES}): send an array")
    return data


def _python_number(value: Any) -> bool | int | float:
    """Return a number of NumPy as a number of Python; raise TypeError for everything else that JSON does not have."""
    number = value.item() if isinstance(value, np.generic) else None
    if not isinstance(number, (bool, int, float)):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return number


def _check_keys(value: Any) -> None:
    """Raise TypeError for keys that are not strings: `json.dumps` would silently convert some of them to strings."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a string")
            _check_keys(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _check_keys(entry)


def decode(data: bytes) -> Any:
    """Return the value, or `Declined` if it is nested too deeply for this rank's stack."""
    try:
        return parse_json(data)
    except ValueError as error:
        return Declined(ArrayError(f"a value of {len(data)} bytes cannot be decoded on this rank: {error}"))


def broadcast_bytes(exchange: Exchange, data: bytes | GradwireError, root: int, call: str) -> bytes | Declined:
    """Send the root's bytes, or its error, to every rank."""
    message, size = _message(data)
    length = np.array([size], np.int64)
    _broadcast(exchange, length, root, call)
    size = _checked_size(length[0])
    if exchange.rank != root:
        message = np.empty(abs(size), np.uint8)
    _broadcast(exchange, message, root, call)
    text = message.tobytes()
    return _declined(text, root, exchange.rank, data, call) if size < 0 else text


def _broadcast(exchange: Exchange, array: Array, root: int, call: str) -> None:
    dtype = arrays.dtype_of(array)
    source = array if exchange.rank == root else nothing(dtype)
    exchange(Shape("broadcast", dtype, array.size, None, root, "auto", call), source, array)


def _message(data: bytes | GradwireError) -> tuple[Array, int]:
    """Return the message with a value or an error, and its size. The size of an error is negative."""
    if not isinstance(data, GradwireError):
        return np.frombuffer(data, np.uint8), len(data)
    text = json.dumps([type(data).__name__, data.message[:MAX_TEXT]]).encode()
    return np.frombuffer(text, np.uint8), -len(text)


def _declined(text: bytes, source: int, rank: int, data: bytes | GradwireError, call: str) -> Declined:
    """Return the outcome of a call that failed on rank `source`. On that rank it has the original error."""
    operation = call.partition("(")[0]
    if rank == source and isinstance(data, GradwireError):
        data.rank, data.operation = rank, operation
        return Declined(data)
    match decode(text):
        case [str(kind), str(reason)]:
            error = _KINDS.get(kind, ArrayError)
        case _:
            error, reason = ArrayError, "the rank gave no reason"
    return Declined(error(f"{call} failed on rank {source}: {reason}", rank=source, operation=operation))


def _checked_size(claimed: Any) -> int:
    if abs(int(claimed)) > MAX_VALUE_BYTES:
        raise InvalidSize(f"a peer announced a value of {claimed} bytes")
    return int(claimed)
