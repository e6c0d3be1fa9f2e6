"""Implements the numeric rules that give equal expressions equal bits, in NumPy.

Terms are folded from left to right in the accumulator's type. Integers wrap around. In min and max the result is NaN if
an operand is NaN, and −0 is less than +0. A mean is a true division by the number of ranks in the accumulator's type.
The result is rounded to the element type once, at the end. The payload bits of NaNs are not specified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradwire.arrays import Array

Combine = Callable[[Array, Array, Array], None]
"""combine(a, b, out): out = a ∘ b; out may be a or b."""


def combiner(op: str, accumulator: np.dtype[Any]) -> Combine:
    """Return the function that folds two operands of the accumulator's type."""
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
    """Multiply by parts. NumPy's complex product uses fused multiply-add only for elements that fill a vector register.

    So the bits of its result would depend on the length of the array.
    """
    real, imaginary = a.real * b.real, a.real * b.imag
    real -= a.imag * b.imag
    imaginary += a.imag * b.real
    out.real, out.imag = real, imaginary


def _signed_zero_extremum(ufunc: Any, *, least: bool) -> Combine:
    """Return min or max with −0 < +0. NumPy may return either of two zeros, depending on the CPU."""

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
    """Return a context without NumPy's floating-point warnings: overflow and NaN are valid results of a reduction."""
    return np.errstate(all="ignore")


def finish(dst: Array, src: Array, divisor: int | None) -> None:
    """Round the complete result to the element type, after the division for a mean."""
    if divisor is None:
        if not same_memory(dst, src):
            np.copyto(dst, src, casting="same_kind")
        return
    if src.dtype.kind == "c":  # dividing the real and imaginary parts is more exact than complex division
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
    """Return whether two arrays of equal size have the same memory and dtype."""
    return bool(a.dtype == b.dtype and a.__array_interface__["data"][0] == b.__array_interface__["data"][0])
