"""Checks whether arrays hold only finite numbers: in the core without the GIL, or by NumPy."""

from __future__ import annotations

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import NotFinite
from gradwire.group import Group
from gradwire.host import native_core

CHUNK = 1 << 16  # elements that NumPy looks at in one go: what it makes of them stays in the cache


def all_finite(array: Array) -> bool:
    """Whether no element of a contiguous array is NaN or infinite.

    >>> all_finite(np.ones(3)), all_finite(np.array([1.0, np.inf]))
    (True, False)
    """
    flat = array.reshape(-1)
    if native_core.available():
        return native_core.native.all_finite(native_core.native.DType[arrays.dtype_of(flat).name], flat.view(np.uint8))
    return all(bool(np.isfinite(flat[at : at + CHUNK]).all()) for at in range(0, flat.size, CHUNK))


def copy_finite(to: Array, source: Array) -> bool | None:
    """Copy, and say whether all of it is finite; None if that would take a second look. `to` is contiguous.

    >>> place = np.zeros(2)
    >>> copy_finite(place, np.ones(2)) in (True, None), place
    (True, array([1., 1.]))
    """
    if native_core.available() and source.flags.c_contiguous and source.dtype == to.dtype and source.size:
        one, other = to.reshape(-1), source.reshape(-1)
        if not np.may_share_memory(one, other):
            dtype = native_core.native.DType[arrays.dtype_of(one).name]
            return native_core.native.copy_finite(dtype, one.view(np.uint8), other.view(np.uint8))
    np.copyto(to, source, casting="same_kind")
    return None


def faults(array: Array) -> str:
    """What is not finite in an array, in words.

    >>> faults(np.array([1.0, np.inf, np.nan, np.nan]))
    '2 NaN and 1 infinite of 4 elements'
    """
    nans, infinite = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    found = [f"{number} {kind}" for number, kind in ((nans, "NaN"), (infinite, "infinite")) if number]
    return f"{' and '.join(found)} of {array.size} element{'s' if array.size != 1 else ''}"


def not_finite(group: Group, found: list[list[str]]) -> NotFinite:
    """The same error on all ranks, about the lowest rank that has found something, and its first tensor."""
    everyones = group.all_gather_values(found)
    rank, (tensor, faults) = next((rank, told[0]) for rank, told in enumerate(everyones) if told)
    more = sum(map(len, everyones)) - 1
    return NotFinite(
        f"the gradient {tensor!r} of rank {rank} is not finite: {faults}"
        + (f" ({more} more on ranks {', '.join(str(r) for r, told in enumerate(everyones) if told)})" if more else ""),
        culprit=rank,
        tensor=tensor,
        operation="GradientSync",
        generation=group.generation,
    )
