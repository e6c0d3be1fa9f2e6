"""Means weighted by each rank's number of samples, for gradients and for reported losses."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import ArrayError, ConfigError
from gradwire.operations.types import Exchange, Operation, Shape
from gradwire.training import norms
from gradwire.training.communicator import Communicator
from gradwire.training.engine_group import group_for

_F64 = arrays.parse_dtype("float64")


def checked(weight: Any) -> float:
    """Return a weight as a float; raise `ConfigError` unless it is a finite number of at least 0."""
    if isinstance(weight, numbers.Real) and not isinstance(weight, bool):
        number = float(weight)
        if math.isfinite(number) and number >= 0:
            return number
    raise ConfigError(f"the weight is {weight!r}: it must be a finite number, 0 or more")


class Weights:
    """The weights of all ranks in one mean. They are known after `operation` has run.

    `call` is the call that passed the weight, for errors. `mine` is not checked here.
    """

    def __init__(self, mine: float, size: int, call: str = "GradientSync.begin") -> None:
        self.mine = mine
        self.by_rank = np.full(size, mine)
        self._call = call

    def operation(self) -> Operation:
        """Return the operation that gathers the weights of all ranks."""
        size = self.by_rank.size
        shape = Shape("all_gather", _F64, (1,) * size, call=f"{self._call}(weight)")

        def body(exchange: Exchange) -> None:
            if size > 1:
                exchange(shape, np.array([self.mine]), self.by_rank)

        return Operation(self._call, body)

    def check(self, generation: int | None) -> None:
        """Raise the same `ConfigError` on all ranks if a weight is invalid or if all are 0, after the exchange."""
        facts: dict[str, Any] = {"operation": self._call, "generation": generation}
        for rank, weight in enumerate(self.by_rank.tolist()):
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(
                    f"the weight of rank {rank} is {weight!r}: it must be a finite number, 0 or more",
                    culprit=rank,
                    **facts,
                )
        if not 0 < self.total < math.inf:
            raise ConfigError(f"the weights of all ranks add up to {self.total!r}, so there is no mean", **facts)

    @property
    def total(self) -> float:
        """The sum of all weights, added in rank order so that all ranks get the same bits."""
        return float(sum(self.by_rank.tolist()))

    @property
    def share(self) -> float:
        """This rank's share of the total weight, 0 to 1."""
        return self.mine / self.total if self.total else 0.0

    def scale_input(self, flat: Array) -> None:
        """Scale this rank's array so that the plain mean over ranks is the weighted mean, up to `scale_result`."""
        if self._differ:
            # Most factors are near 1, so 16-bit types lose less precision than with a sum of arrays scaled by `share`.
            norms.scale([flat], self.share * self.by_rank.size / self._deferred_factor(flat))

    def scale_result(self, flat: Array) -> None:
        """Scale the plain mean by the factor that `scale_input` has left out."""
        if self._differ and self._deferred_factor(flat) > 1:
            norms.scale([flat], self._deferred_factor(flat))

    @property
    def _differ(self) -> bool:
        return bool((self.by_rank != self.by_rank[0]).any())

    def _deferred_factor(self, flat: Array) -> float:
        """Return the factor to apply after the exchange instead of before: else float16 could overflow.

        It is the factor of the rank with the largest weight, so that no rank scales its values up before the exchange.
        """
        if flat.dtype != np.float16:
            return 1.0
        return float(self.by_rank.max()) / self.total * self.by_rank.size


def weighted_mean(group: Communicator, value: Any, weight: float) -> Any:
    """Return the weighted mean of a number or array over all ranks, with the same bits on all ranks.

    Args:
        group: The group whose ranks are averaged, or another `Communicator`. All of them must call it.
        value: A number, or an array of real numbers with the same shape on all ranks.
        weight: The weight of this rank, for example its number of samples. The value of a rank with weight 0 is
            ignored, even if it is NaN.

    Returns:
        A float for a number. For an array, a new array: of the same dtype for floating-point numbers, of float64 for
        integers and booleans. If all weights are 0, the mean is NaN.

    Raises:
        ConfigError: The weight is not a finite number of at least 0.
        ArrayError: The value is not an array of real numbers.

    >>> import gradwire as gw
    >>> with gw.init() as group: gw.weighted_mean(group, 0.25, weight=32)
    0.25
    """
    calls = group_for(group)
    weight = checked(weight)
    number = isinstance(value, (numbers.Real, np.generic))
    array = np.asarray(value) if number else arrays.as_array(value)
    if array.dtype.kind not in "fiub" and array.dtype != arrays.parse_dtype("bfloat16").storage:
        raise ArrayError(f"weighted_mean does not support {array.dtype}: pass real numbers")
    sums = np.zeros(array.size + 1)
    sums[-1] = weight
    if weight:
        sums[:-1] = array.reshape(-1).astype(np.float64) * weight
    calls.all_reduce(sums)
    means = sums[:-1] / sums[-1] if sums[-1] else np.full(array.size, np.nan)
    if number:
        return float(means[0])
    return means.reshape(array.shape).astype(array.dtype if array.dtype.kind not in "iub" else np.float64)
