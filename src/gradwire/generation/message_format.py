"""The description of a point-to-point message: the dtype and the shape of the array that was sent.

It is little-endian, and precedes the data of an eager message and follows the header of an offer:

    offset  size  field
         0     1  dtype      the code of the dtype
         1     1  dimensions at most `MAX_DIMENSIONS`
         2     1  waits      1 if a thread of the sender waits until the message is received, 0 if not
         3  8 * n  shape     the length of each axis

A description is valid only if its dtype and shape give exactly the number of bytes that the header announces.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from gradwire.arrays import DType, View, dtype_by_code, raw
from gradwire.wire import WireError

MAX_DIMENSIONS = 64  # of a NumPy array
MAX_LENGTH = (1 << 63) - 1  # of an axis
_FIXED = struct.Struct("<BBB")
MAX_DESCRIPTION = _FIXED.size + 8 * MAX_DIMENSIONS


class Description(NamedTuple):
    """The dtype and the shape of an array, and whether a thread of the sender waits until the array is received."""

    dtype: DType
    shape: tuple[int, ...]
    waits: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pack(self) -> bytes:
        count = len(self.shape)
        return struct.pack(f"<BBB{count}Q", self.dtype.code, count, self.waits, *self.shape)


def parse_description(data: memoryview | bytes) -> Description:
    """Return the description that `data` begins with; raise `WireError` if there is no valid one."""
    if len(data) < _FIXED.size:
        raise WireError(f"a message of {len(data)} bytes without a description")
    code, dimensions, waits = _FIXED.unpack_from(data)
    dtype = dtype_by_code(code)
    if dtype is None or dimensions > MAX_DIMENSIONS or waits > 1:
        raise WireError(f"a message of dtype {code} with {dimensions} dimensions and flag {waits}")
    if len(data) < description_bytes(dimensions):
        raise WireError(f"a message of {len(data)} bytes with {dimensions} dimensions")
    shape = struct.unpack_from(f"<{dimensions}Q", data, _FIXED.size)
    if any(length > MAX_LENGTH for length in shape):
        raise WireError(f"a message with an axis of {max(shape)} elements")
    return Description(dtype, shape, bool(waits))


def description_bytes(dimensions: int) -> int:
    """Return the size of a description with this number of dimensions."""
    return _FIXED.size + 8 * dimensions


class OutgoingMessage(NamedTuple):
    """An array to send: its bytes, its dtype and its shape."""

    data: memoryview
    dtype: DType
    shape: tuple[int, ...]

    @classmethod
    def of(cls, source: View) -> OutgoingMessage:
        """Return the message with the current elements of an array."""
        return cls(raw(source.load()), source.dtype, source.array.shape)

    def description(self, *, waits: bool) -> bytes:
        return Description(self.dtype, self.shape, waits).pack()
