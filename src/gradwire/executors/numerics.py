"""The numeric rules that make equal expressions equal bits, in NumPy.

Terms are folded from the left in the order listed, in the accumulator's type. Integers wrap. In min and max a NaN wins
and −0 is less than +0. A mean is a true division by the number of ranks in the accumulator's type, and then the only
rounding happens. Payloads of NaNs are outside the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradwire.arrays import Array

Combine = Callable[[Array, Array, Array], None]
"""combine(a, b, out): out = a ∘ b; out may be a or b."""


def combiner(op: str, accumulator: np.dtype[Any]) -> Combine:
    """The function that folds two operands of the accumulator's type."""
    if op in ("sum", "mean"):
        return _ufunc(np.add)
    if op == "prod":
        return _complex_product if accumulator.kind == "c" else _ufunc(np.multiply)
    ufunc = np.minimum if op == "min" else np.maximum
    if accumulator.kind != "f":
        return _ufunc(ufunc)
    return _signed_zero_extremum(ufunc, least=op == "min")


def _ufunc(ufunc: Any) -> Combine:
    def combine(a: Array, b: Array, out: Array) -> None:
        ufunc(a, b, out=out)

    return combine


def _complex_product(a: Array, b: Array, out: Array) -> None:
    """By parts: NumPy's own product fuses multiply and add where it finds room for a vector, and not elsewhere."""
    real, imaginary = a.real * b.real, a.real * b.imag
    real -= a.imag * b.imag
    imaginary += a.imag * b.real
    out.real, out.imag = real, imaginary


def _signed_zero_extremum(ufunc: Any, *, least: bool) -> Combine:
    """NumPy returns either zero of an equal pair; the order −0 < +0 makes the result independent of the CPU."""

    def combine(a: Array, b: Array, out: Array) -> None:
        zeros = np.flatnonzero((a == 0) & (b == 0))
        if not zeros.size:
            ufunc(a, b, out=out)
            return
        first, second = np.signbit(a[zeros]), np.signbit(b[zeros])
        negative = first | second if least else first & second
        ufunc(a, b, out=out)
        out[zeros] = np.where(negative, out.dtype.type(-0.0), out.dtype.type(0.0))

    return combine


def quiet() -> Any:
    """Overflow and invalid results are results here, not warnings."""
    return np.errstate(all="ignore")


def finish(dst: Array, src: Array, divisor: int | None) -> None:
    """Round the complete result to the element type, after dividing it where it is a mean."""
    if divisor is None:
        if not same_memory(dst, src):
            np.copyto(dst, src, casting="same_kind")
        return
    if src.dtype.kind == "c":  # dividing the parts is exact where complex division would not be
        src, dst = _parts(src), _parts(dst)
    number = src.dtype.type(divisor)
    if src.dtype == dst.dtype:
        np.divide(src, number, dst)
    else:
        np.divide(src, number, src)
        np.copyto(dst, src, casting="same_kind")


def _parts(array: Array) -> Array:
    return array.view(array.real.dtype)


def same_memory(a: Array, b: Array) -> bool:
    """Whether two arrays of equal size are one and the same memory."""
    return bool(a.dtype == b.dtype and a.__array_interface__["data"][0] == b.__array_interface__["data"][0])
