"""Compares arrays bit by bit. All NaNs count as equal."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.arrays import Array


def bits(array: Any) -> bytes:
    """Return the bytes of an array, with one bit pattern for all NaNs: their payloads are not guaranteed."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    if flat.dtype.kind in "fV":  # ml_dtypes' own kinds are V
        flat = np.where(flat != flat, flat.dtype.type(np.nan), flat)
    return bytes(flat.tobytes())


def assert_same(result: Any, expected: Any, what: object = "") -> None:
    """Assert that two arrays have the same dtype, shape and bits."""
    if expected is None:
        assert result is None, what
        return
    assert isinstance(result, np.ndarray), what
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), what
    if bits(result) != bits(expected):
        differ = [i for i, (a, b) in enumerate(zip(_units(result), _units(expected), strict=True)) if a != b]
        first = differ[0]
        raise AssertionError(
            f"{what}: {len(differ)} of {result.size} elements differ, the first is [{first}]: "
            f"{result.reshape(-1)[first]!r} instead of {expected.reshape(-1)[first]!r}"
        )


def _units(array: Array) -> list[bytes]:
    return [bits(element) for element in array.reshape(-1)]
