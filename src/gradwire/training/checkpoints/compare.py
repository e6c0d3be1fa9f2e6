"""What differs between two checkpoints: arrays, and values that are not arrays."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.arrays import Array, shape_text
from gradwire.errors import CheckpointError
from gradwire.training.checkpoints.checkpoint import Checkpoint, Stored, ignore_bytes
from gradwire.training.checkpoints.manifest import shard_key
from gradwire.training.state import plain_values

_CHUNK = 1 << 20  # elements that are compared at once

Value = float | str | None


@dataclass(frozen=True, slots=True)
class Difference:
    """An array that differs: with its dtype and shape, which are empty where a checkpoint does not have it.

    `differing` is the number of elements with another value (NaN is equal to NaN), and `largest` their greatest
    absolute difference. Both are None if dtype or shape differ. If `differing` is 0, only bits differ: 0.0 and -0.0.
    """

    name: str
    before: str
    after: str
    elements: int = 0
    differing: int | None = None
    largest: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two checkpoints, and the number of equal arrays.

    `values` has, by name, the value before and after, each as a list of one, or as an empty list where there is none.
    """

    arrays: tuple[Difference, ...]
    equal: int
    values: dict[str, tuple[list[Value], list[Value]]]

    @property
    def is_empty(self) -> bool:
        return not self.arrays and not self.values


def values_of(checkpoint: Checkpoint) -> dict[str, Value]:
    """Return all values of a checkpoint that are not arrays, by name. Those of rank 1's shard begin with `shard:1:`."""
    try:
        found: dict[str, Value] = dict(plain_values(checkpoint.manifest.head.structure))
        for part in checkpoint.manifest.parts:
            if part.shard is not None:
                own = plain_values(part.shard.structure)
                found |= {shard_key(f"{part.rank}:{name}"): value for name, value in own.items()}
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path} is damaged: {error}", step=checkpoint.step) from error
    return found


def compare(before: Checkpoint, after: Checkpoint, on_bytes: Callable[[int], object] = ignore_bytes) -> Comparison:
    """Compare two complete checkpoints. Only arrays with different digests are read.

    Raise `CheckpointError` if one is torn or damaged. `on_bytes` gets the sizes of compared arrays.
    """
    one, other = ({stored.name: stored for stored in (*it.replicated, *it.sharded)} for it in (before, after))
    differences, equal = [], 0
    with contextlib.closing(before.open()) as files, contextlib.closing(after.open()) as other_files:
        for name in one | other:
            old, new = one.get(name), other.get(name)
            if old is None or new is None or _text(old) != _text(new):
                differences.append(Difference(name, _text(old), _text(new)))
            elif old.array.digest == new.array.digest:
                equal += 1
            else:
                differing, largest = difference(files.load(old), other_files.load(new))
                elements = math.prod(old.array.shape)
                differences.append(Difference(name, _text(old), _text(new), elements, differing, largest))
            on_bytes(old.array.nbytes if old is not None else 0)
    return Comparison(tuple(differences), equal, _changed(values_of(before), values_of(after)))


def _changed(before: dict[str, Value], after: dict[str, Value]) -> dict[str, tuple[list[Value], list[Value]]]:
    pairs = {
        name: ([before[name]] if name in before else [], [after[name]] if name in after else [])
        for name in before | after
    }
    return {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}  # repr: nan is equal to nan


def _text(stored: Stored | None) -> str:
    return "" if stored is None else shape_text(stored.array.dtype, stored.array.shape)


def difference(before: Array, after: Array) -> tuple[int, float]:
    """Return how many elements of two arrays of one dtype and shape differ, and their greatest absolute difference.

    >>> difference(np.array([1.0, 2.0, np.nan]), np.array([1.0, 2.5, np.nan]))
    (1, 0.5)
    """
    one, other = before.reshape(-1), after.reshape(-1)
    differing, largest = 0, 0.0
    for start in range(0, one.size, _CHUNK):
        old, new = one[start : start + _CHUNK], other[start : start + _CHUNK]
        unequal = (old != new) & ~((old != old) & (new != new))
        if unequal.any():
            differing += int(np.count_nonzero(unequal))
            largest = float(np.maximum(largest, _distances(old[unequal], new[unequal]).max()))  # NaN if one is NaN
    return differing, largest


def _distances(old: Array, new: Array) -> Any:
    """Return the absolute differences, without overflow."""
    if old.dtype.kind == "b":
        return np.ones(1)
    if old.dtype.kind in "iu":
        distances = np.maximum(old, new) - np.minimum(old, new)  # wraps around, so the unsigned result is exact
        return distances.view(f"u{old.dtype.itemsize}")
    wide = np.complex128 if old.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(old.astype(wide) - new.astype(wide))
