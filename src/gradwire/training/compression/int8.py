"""A quarter of the bytes (of float32): whole numbers from −127 to 127, and a scale for each block of elements."""

from __future__ import annotations

import operator
from typing import SupportsIndex

import numpy as np

from gradwire.arrays import Array
from gradwire.errors import ConfigError
from gradwire.training.compression.rounding import Rounding

LEVELS = 127
_SCALE = np.dtype(np.float32)
_LARGEST = float(np.finfo(_SCALE).max)
_LEAST = 1e-35  # below, a block counts as zeros: its scale would not be a normal number


class Int8(Rounding):
    """Each block of `block` elements as int8, in steps of 1/127 of its largest magnitude, and that step as a float32.

    With 256 elements to a block a float32 takes 8.125 bits. A value that is not finite makes its whole block NaN.

    >>> import gradwire as gw, numpy as np
    >>> one, two = gw.loopback_pair()
    >>> work = Int8().exchange(one.stream(), np.array([127.0, 1.2], np.float32))
    >>> Int8().exchange(two, np.array([0.0, 0.0], np.float32))   # 0.2 of 1.2 is sent another time
    array([127.,   1.], dtype=float32)
    >>> work.wait()
    array([127.,   1.], dtype=float32)
    >>> one.close(); two.close()
    """

    name = "int8"

    def __init__(self, block: SupportsIndex = 256, *, feedback: bool = True) -> None:
        super().__init__(feedback=feedback)
        try:
            self.block = self.grain = operator.index(block)
        except TypeError:
            self.block = 0
        if not 1 <= self.block <= 1 << 20:
            raise ConfigError(f"block is {block!r}: it must be a whole number of elements, from 1 to {1 << 20}")

    def describe(self) -> str:
        """Ranks must cut blocks alike.

        >>> Int8(64).describe()
        'int8 by 64'
        """
        return f"int8 by {self.block}"

    def _nbytes(self, count: int) -> int:
        return -(-count // self.block) * _SCALE.itemsize + count

    def _runs(self, wire: Array, *arrays: Array) -> list[tuple[Array, Array, list[Array]]]:
        """The scales, the numbers and the arrays as rows of a block each: all whole blocks, and the short last one."""
        count = arrays[0].size
        blocks = -(-count // self.block)
        whole = count // self.block
        scales = wire[: blocks * _SCALE.itemsize].view(_SCALE)
        numbers = wire[blocks * _SCALE.itemsize :].view(np.int8)
        runs = []
        for first, last, start, stop in ((0, whole, 0, whole * self.block), (whole, blocks, whole * self.block, count)):
            if last > first:
                rows = [one[start:stop].reshape(last - first, -1) for one in (numbers, *arrays)]
                runs.append((scales[first:last], rows[0], rows[1:]))
        return runs

    def _encode(self, x: Array, wire: Array, spare: Array) -> None:
        for scales, numbers, (values, steps) in self._runs(wire, x, spare):
            largest = np.maximum(values.max(axis=1), -values.min(axis=1))
            sound = True
            if not (largest <= _LARGEST).all():
                sound = False
                largest = self._mend(values, largest)
            inverse = np.where(largest > _LEAST, LEVELS / largest, 0).astype(values.dtype)
            np.divide(largest, LEVELS, out=largest)
            largest[inverse == 0] *= 0  # which leaves NaN as it is
            np.copyto(scales, largest, casting="same_kind")
            np.multiply(values, inverse[:, None], out=steps)
            np.rint(steps, out=steps)
            if not sound:
                np.clip(steps, -LEVELS, LEVELS, out=steps)
            np.copyto(numbers, steps, casting="unsafe")
            np.multiply(steps, scales[:, None], out=steps)
            np.subtract(values, steps, out=values)
            if not sound:
                values[~np.isfinite(values)] = 0

    @staticmethod
    def _mend(values: Array, largest: Array) -> Array:
        """Blocks that are not finite become zeros with the scale NaN; others keep within what a scale can say."""
        lost = ~np.isfinite(largest)
        values[lost] = 0
        return np.where(lost, np.nan, np.minimum(largest, _LARGEST)).astype(largest.dtype)

    def _decode(self, wire: Array, out: Array) -> None:
        for scales, numbers, (values,) in self._runs(wire, out):
            np.copyto(values, numbers)
            np.multiply(values, scales[:, None], out=values)
