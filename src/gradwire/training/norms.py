"""The norm of replicated arrays, and clipping by it, with the same bits on all ranks even if their CPUs differ.

The rounding of a sum depends on the order of its additions, which differs between vector units. So each rank sums the
squares of a different share of the elements, and these sums are all-reduced: all ranks get the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import ConfigError
from gradwire.host import native_core
from gradwire.training.engine_group import AnyGroup

CHUNK = 1 << 15  # elements squared at a time, so that they stay in the CPU caches
_TINY = 1e-6  # the same constant as in torch.nn.utils.clip_grad_norm_


def global_norm(group: AnyGroup, flats: Iterable[Array]) -> float:
    """Return the 2-norm of all elements of flat arrays that are the same on all ranks. All ranks call it."""
    mine = sum(squares(flat[_share(flat.size, group.rank, group.size)]) for flat in flats)
    return math.sqrt(group.all_reduce(float(mine)))


def _share(count: int, rank: int, size: int) -> slice:
    return slice(count * rank // size, count * (rank + 1) // size)


def squares(flat: Array) -> float:
    """Return the sum of the squares of all elements, in double precision."""
    if native_core.available():
        return native_core.native.sum_squares(native_core.native.DType[arrays.dtype_of(flat).name], flat.view(np.uint8))
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    total = 0.0
    for at in range(0, flat.size, CHUNK):
        chunk = flat[at : at + CHUNK].astype(np.float64)
        total += float(chunk @ chunk)
    return total


def scale(flats: Iterable[Array], factor: float) -> None:
    """Multiply arrays by a factor in place, with one rounding per element."""
    for flat in flats:
        parts = flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
        # A 16-bit factor would be rounded, or underflow to 0.
        exact = parts.dtype.type if parts.dtype.itemsize > 2 else np.float32
        np.multiply(parts, np.array([factor], exact), out=parts, casting="unsafe")


def check_norm(max_norm: float) -> float:
    """Return a limit of the norm as a float; raise `ConfigError` if it is NaN or negative."""
    if not float(max_norm) >= 0:
        raise ConfigError(f"max_norm is {max_norm!r}: it must be a number, 0 or more")
    return float(max_norm)


def clip(group: AnyGroup, flats: Sequence[Array], max_norm: float) -> float:
    """Scale replicated flat arrays so that their norm is at most `max_norm`, and return the norm before.

    All ranks call it.
    """
    limit = check_norm(max_norm)
    norm = global_norm(group, flats)
    factor = clip_factor(norm, limit)
    if factor < 1.0:
        scale(flats, factor)
    return norm


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that reduces the norm to at most `max_norm`; 1 if the norm is small enough.

    >>> clip_factor(0.5, 1.0), round(clip_factor(4.0, 1.0), 3)
    (1.0, 0.25)
    """
    return min(1.0, max_norm / (norm + _TINY))
