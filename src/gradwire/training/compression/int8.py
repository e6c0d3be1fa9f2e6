"""`Int8` sends 8-bit integers and one scale per block of elements: about a quarter of the bytes of float32."""

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
_LEAST = 1e-35  # a block with smaller magnitudes is sent as zeros: its scale would not be a normal float32


class Int8(Rounding):
    """Send each block of elements as int8, in steps of 1/127 of the block's largest magnitude.

    The step size is sent as one float32 per block, so with 256 elements per block an element takes 8.125 bits. A NaN or
    infinite value makes its whole block NaN.

    Args:
        block: The number of elements per block, 1 to 2^20.
        feedback: Use error feedback; see `Compression`.

    Raises:
        ConfigError: `block` is not a whole number in that range.

    >>> import gradwire as gw, numpy as np
    >>> one, two = gw.loopback_pair()
    >>> work = Int8().exchange(one.stream(), np.array([127.0, 1.2], np.float32))
    >>> Int8().exchange(two, np.array([0.0, 0.0], np.float32))   # 1.2 is rounded to 1; 0.2 stays in the residual
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
        """Return the name and the block size, which must be the same on all ranks.

        >>> Int8(64).describe()
        'int8 by 64'
        """
        return f"int8 by {self.block}"

    def _nbytes(self, count: int) -> int:
        return -(-count // self.block) * _SCALE.itemsize + count

    def _runs(self, wire: Array, *arrays: Array) -> list[tuple[Array, Array, list[Array]]]:
        """Return the scales, the int8 numbers and the arrays with one row per block: the full blocks, then the rest."""
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
            in_range = True
            if not (largest <= _LARGEST).all():
                in_range = False
                largest = self._limit(values, largest)
            inverse = np.where(largest > _LEAST, LEVELS / largest, 0).astype(values.dtype)
            np.divide(largest, LEVELS, out=largest)
            largest[inverse == 0] *= 0  # a product, because it keeps NaN
            np.copyto(scales, largest, casting="same_kind")
            np.multiply(values, inverse[:, None], out=steps)
            np.rint(steps, out=steps)
            if not in_range:
                np.clip(steps, -LEVELS, LEVELS, out=steps)
            np.copyto(numbers, steps, casting="unsafe")
            np.multiply(steps, scales[:, None], out=steps)
            np.subtract(values, steps, out=values)
            if not in_range:
                values[~np.isfinite(values)] = 0

    @staticmethod
    def _limit(values: Array, largest: Array) -> Array:
        """Give blocks that are not finite the scale NaN and values of 0; limit all other scales to float32's range."""
        lost = ~np.isfinite(largest)
        values[lost] = 0
        return np.where(lost, np.nan, np.minimum(largest, _LARGEST)).astype(largest.dtype)

    def _decode(self, wire: Array, out: Array) -> None:
        for scales, numbers, (values,) in self._runs(wire, out):
            np.copyto(values, numbers)
            np.multiply(values, scales[:, None], out=values)
