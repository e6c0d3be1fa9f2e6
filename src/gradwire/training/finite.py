"""Checks whether arrays hold only finite numbers, in the native core without the GIL, or with NumPy."""

from __future__ import annotations

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import NotFinite
from gradwire.host import native_core
from gradwire.training.engine_group import AnyGroup

CHUNK = 1 << 16  # elements that NumPy checks at a time, so that its temporary arrays stay in the CPU caches


def all_finite(array: Array) -> bool:
    """Return whether no element of a contiguous array is NaN or infinite.

    >>> all_finite(np.ones(3)), all_finite(np.array([1.0, np.inf]))
    (True, False)
    """
    flat = array.reshape(-1)
    if native_core.available():
        return native_core.native.all_finite(native_core.native.DType[arrays.dtype_of(flat).name], flat.view(np.uint8))
    return all(bool(np.isfinite(flat[at : at + CHUNK]).all()) for at in range(0, flat.size, CHUNK))


def copy_finite(to: Array, source: Array) -> bool | None:
    """Copy `source` into the contiguous array `to`, and return whether all elements are finite.

    Return None if the copy could not check this: without the native core, for other layouts, and for overlapping
    arrays.

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
    """Describe how many elements of an array are NaN or infinite.

    >>> faults(np.array([1.0, np.inf, np.nan, np.nan]))
    '2 NaN and 1 infinite of 4 elements'
    """
    nans, infinite = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    found = [f"{number} {kind}" for number, kind in ((nans, "NaN"), (infinite, "infinite")) if number]
    return f"{' and '.join(found)} of {array.size} element{'s' if array.size != 1 else ''}"


def not_finite(group: AnyGroup, found: list[list[str]]) -> NotFinite:
    """Return the same error on all ranks: about the lowest rank with a fault, and its first faulty tensor.

    `found` lists this rank's faulty tensors, as pairs of a name and a description. All ranks call it.
    """
    by_rank = group.all_gather_values(found)
    rank, (tensor, faults) = next((rank, pairs[0]) for rank, pairs in enumerate(by_rank) if pairs)
    more = sum(map(len, by_rank)) - 1
    affected = ", ".join(str(rank) for rank, pairs in enumerate(by_rank) if pairs)
    return NotFinite(
        f"the gradient {tensor!r} of rank {rank} is not finite: {faults}"
        + (f" ({more} more such gradients; affected ranks: {affected})" if more else ""),
        culprit=rank,
        tensor=tensor,
        operation="GradientSync",
        generation=group.generation,
    )
