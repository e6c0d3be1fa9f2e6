"""Means weighted by each rank's number of samples: for gradients and for reported losses."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import ArrayError, ConfigError
from gradwire.group import Group
from gradwire.operations.types import Exchange, Operation, Shape
from gradwire.training import norms

_F64 = arrays.parse_dtype("float64")


def checked(weight: Any) -> float:
    """A weight as a float; `ConfigError` for one that is none."""
    if isinstance(weight, numbers.Real) and not isinstance(weight, bool):
        number = float(weight)
        if math.isfinite(number) and number >= 0:
            return number
    raise ConfigError(f"a weight of {weight!r}: it must be a number, 0 or more")


class Weights:
    """What each rank counts in one mean; known to all after `operation` has run."""

    def __init__(self, mine: Any, size: int) -> None:
        self.mine = checked(mine)
        self.everyones = np.full(size, self.mine)

    def operation(self) -> Operation:
        size = self.everyones.size
        shape = Shape("all_gather", _F64, (1,) * size, call="GradientSync.begin(weight)")

        def body(exchange: Exchange) -> None:
            if size > 1:
                exchange(shape, np.array([self.mine]), self.everyones)

        return Operation("GradientSync.begin", body)

    @property
    def total(self) -> float:
        """Added up in the order of ranks, so that all find the same."""
        return float(sum(self.everyones.tolist()))

    @property
    def share(self) -> float:
        """This rank's part of the mean, 0 to 1."""
        return self.mine / self.total if self.total else 0.0

    def apply(self, flat: Array) -> None:
        """Scale an array so that the plain mean over ranks is the weighted one; nothing to do if all weigh the same."""
        if self._differ:
            # Near 1 for most: half types lose less than if each rank scaled by its share and all were summed.
            norms.scale([flat], self.share * self.everyones.size / self._put_off(flat))

    def settle(self, flat: Array) -> None:
        """Scale the mean by what `apply` has put off."""
        if self._differ and self._put_off(flat) > 1:
            norms.scale([flat], self._put_off(flat))

    @property
    def _differ(self) -> bool:
        return bool((self.everyones != self.everyones[0]).any())

    def _put_off(self, flat: Array) -> float:
        """By which factor values are too small in between: scaled up on the heaviest rank, float16 would overflow."""
        if flat.dtype != np.float16:
            return 1.0
        return float(self.everyones.max()) / self.total * self.everyones.size


def weighted_mean(group: Group, value: Any, weight: float) -> Any:
    """The mean over ranks of a number or array, each counting by its weight; the same bits on all ranks.

    The value of a rank with weight 0 does not count, whatever it is; if no rank has a weight, the mean is NaN. Arrays
    must be of equal shapes; numbers give a float, arrays an array of their dtype.

    >>> import gradwire as gw
    >>> with gw.init() as group: gw.weighted_mean(group, 0.25, weight=32)
    0.25
    """
    weight = checked(weight)
    number = isinstance(value, (numbers.Real, np.generic))
    array = np.asarray(value) if number else arrays.as_array(value)
    if array.dtype.kind not in "fiub" and array.dtype != arrays.parse_dtype("bfloat16").storage:
        raise ArrayError(f"the weighted mean of {array.dtype} is not known: pass real numbers")
    sums = np.zeros(array.size + 1)
    sums[-1] = weight
    if weight:
        sums[:-1] = array.reshape(-1).astype(np.float64) * weight
    group.all_reduce(sums)
    means = sums[:-1] / sums[-1] if sums[-1] else np.full(array.size, np.nan)
    if number:
        return float(means[0])
    return means.reshape(array.shape).astype(array.dtype if array.dtype.kind not in "iub" else np.float64)
