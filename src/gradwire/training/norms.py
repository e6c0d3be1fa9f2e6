"""The norm of replicated arrays, and clipping by it: the same bits on all ranks, even if their CPUs differ.

Sums round by the order in which they are made, which vector units choose differently. So each rank squares only its own
share, and the shares' sums are all-reduced: all ranks see the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import ConfigError
from gradwire.group import Group
from gradwire.host import native_core

CHUNK = 1 << 15  # elements that are squared in one go: in the cache
_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_, whose results ours equal


def global_norm(group: Group, flats: Iterable[Array]) -> float:
    """The 2-norm of all elements of flat arrays that are the same on all ranks."""
    mine = sum(squares(flat[_share(flat.size, group.rank, group.size)]) for flat in flats)
    return math.sqrt(group.all_reduce(float(mine)))


def _share(count: int, rank: int, size: int) -> slice:
    return slice(count * rank // size, count * (rank + 1) // size)


def squares(flat: Array) -> float:
    """The sum of the squares of all elements, added up in double precision."""
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
    """Multiply in place, rounding once per element."""
    for flat in flats:
        parts = flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
        exact = (
            parts.dtype.type if parts.dtype.itemsize > 2 else np.float32
        )  # a half would round the factor, or lose it
        np.multiply(parts, np.array([factor], exact), out=parts, casting="unsafe")


def check_norm(max_norm: float) -> float:
    """A greatest norm; `ConfigError` for one that is none."""
    if not float(max_norm) >= 0:
        raise ConfigError(f"a greatest norm of {max_norm!r}: it must be a number, 0 or more")
    return float(max_norm)


def clip(group: Group, flats: Sequence[Array], max_norm: float) -> float:
    """Scale flat arrays that are the same on all ranks so that their norm is at most max_norm; returns what it was."""
    greatest = check_norm(max_norm)
    norm = global_norm(group, flats)
    factor = clip_factor(norm, greatest)
    if factor < 1.0:
        scale(flats, factor)
    return norm


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply by so that the norm is at most max_norm; 1 where it is.

    >>> clip_factor(0.5, 1.0), round(clip_factor(4.0, 1.0), 3)
    (1.0, 0.25)
    """
    return min(1.0, max_norm / (norm + _TINY))
