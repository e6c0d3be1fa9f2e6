"""The exchange itself, on arrays as NumPy sees them; called from plain Python and by compiled programs alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from gradwire.arrays import Array
from gradwire.errors import ArrayError, GradwireError as NotFinite
from gradwire.group import Group
from gradwire.jax import trees

_BITS = 1 << 16  # elements that are looked at in one go: they stay in the cache


def group_of(source: Any) -> Group:
    """A group, or the present group of whatever has one: of an elastic run, always the present generation's."""
    group = source if isinstance(source, Group) else getattr(source, "group", None)
    if not isinstance(group, Group):
        raise ArrayError(f"expected a group, or a run with a group, got {type(source).__name__}")
    return group


def reduced(source: Any, names: Sequence[str], arrays: Sequence[Array], op: str, check_finite: bool) -> list[Array]:
    """The arrays of all ranks reduced, in fresh memory; the given ones are only read."""
    group = group_of(source)
    results = trees.copied(group, arrays)
    group.all_reduce_named(dict(zip(names, results, strict=True)), op)
    if check_finite and op in ("sum", "mean") and not all(map(is_finite, results)):
        raise _blame(group, names, arrays)
    return results


def is_finite(array: Array) -> bool:
    """Whether no element is infinite or not a number; integers never are."""
    if array.dtype.kind not in "fc" and array.dtype != ml_dtypes.bfloat16:
        return True
    flat = array.reshape(-1)
    return all(bool(np.isfinite(flat[at : at + _BITS]).all()) for at in range(0, flat.size, _BITS))


def _blame(group: Group, names: Sequence[str], arrays: Sequence[Array]) -> Exception:
    """Who brought what is not finite. All ranks see the same bits, so all are here: each tells the first it brought."""
    mine = next((name for name, array in zip(names, arrays, strict=True) if not is_finite(array)), None)
    for rank, name in enumerate(group.all_gather_values(mine)):
        if name is not None:
            return NotFinite(f"{name!r} on rank {rank} has elements that are NaN or infinite", culprit=rank)
    return NotFinite("the sum over all ranks has elements that are infinite, though no rank's are: they are too large")
