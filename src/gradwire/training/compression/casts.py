"""`F16` and `BF16` send every element as float16 or bfloat16: half the bytes of float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.arrays import Array, bfloat16
from gradwire.host import native_core
from gradwire.training.compression.rounding import Rounding


class _Cast(Rounding):
    grain = 32  # elements: a whole cache line

    half: np.dtype[Any]
    largest: float

    def _nbytes(self, count: int) -> int:
        return count * 2

    def _encode(self, x: Array, wire: Array, spare: Array) -> None:
        halves = wire.view(self.half)
        self._narrow(wire, x)
        self._decode(wire, spare)
        if np.isfinite(spare).all():
            np.subtract(x, spare, out=x)
            return
        # Finite values beyond the range of the half type are clipped; the rest stays in the residual for later steps.
        # NaN and infinite values are sent as they are, and leave no residual.
        cut = np.isinf(spare) & np.isfinite(x)
        spare[cut] = np.copysign(self.largest, x[cut])
        halves[cut] = spare[cut].astype(self.half)
        np.subtract(x, spare, out=x)
        x[~np.isfinite(x)] = 0

    # The kernels of the native core convert many times faster than NumPy, with the same bits as the result.

    def _narrow(self, wire: Array, x: Array) -> None:
        if native_core.available() and x.dtype == np.float32:
            kernels = native_core.native.kernels
            dtype, op = native_core.native.DType[self.half.name], native_core.native.ReduceOp.sum
            kernels.finish(kernels.builds()[-1], dtype, op, wire, x, 0)
        else:
            np.copyto(wire.view(self.half), x, casting="unsafe")

    def _decode(self, wire: Array, out: Array) -> None:
        if native_core.available() and out.dtype == np.float32:
            kernels = native_core.native.kernels
            dtype, op = native_core.native.DType[self.half.name], native_core.native.ReduceOp.sum
            kernels.fold(kernels.builds()[-1], dtype, op, out, [(wire, False)])
        else:
            np.copyto(out, wire.view(self.half))


class F16(_Cast):
    """Send every element as float16: 11 significant bits, magnitudes from 6e-8 to 65504.

    A larger value is clipped to 65504, and error feedback sends the rest in the following steps.

    Args:
        feedback: Use error feedback; see `Compression`.

    >>> import gradwire as gw, numpy as np
    >>> one, two = gw.loopback_pair()
    >>> work = F16().exchange(one.stream(), np.ones(3, np.float32), scale=0.5)
    >>> F16().exchange(two, np.arange(3.0, dtype=np.float32), scale=0.5)
    array([0.5, 1. , 1.5], dtype=float32)
    >>> work.wait()
    array([0.5, 1. , 1.5], dtype=float32)
    >>> one.close(); two.close()
    """

    name = "f16"
    half = np.dtype(np.float16)
    largest = float(np.finfo(np.float16).max)


class BF16(_Cast):
    """Send every element as bfloat16: 8 significant bits, and the range of float32.

    Args:
        feedback: Use error feedback; see `Compression`.

    >>> import gradwire as gw, numpy as np
    >>> with gw.init() as group: BF16().exchange(group, np.ones(2))
    array([1., 1.])
    """

    name = "bf16"
    half = bfloat16()
    largest = (2 - 2**-7) * 2.0**127
