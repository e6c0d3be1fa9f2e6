"""`TopK` sends only the largest values of a bucket, with their positions. The others accumulate in the residual."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradwire.arrays import Array
from gradwire.operations import Exchange, Shape
from gradwire.training.compression.base import BYTE, Compression, Task, check_ratio

SAMPLE = 1 << 15  # sampled elements, from which the smallest magnitude to send is estimated


class TopK(Compression):
    """Send only the values with the largest magnitudes: `TopK(0.01)` sends one value in a hundred.

    Every rank receives the chosen values of all ranks and adds them in rank order. So each rank sends ratio · (n−1)
    times the bucket, plus the positions: this pays off for ratios well below 1/n. Use it with error feedback: without
    it, most values would never be sent.

    Args:
        ratio: The share of the values to send, above 0 and at most 1.
        feedback: Use error feedback; see `Compression`.

    Raises:
        ConfigError: `ratio` is not in that range.

    >>> import gradwire as gw, numpy as np
    >>> one, two = gw.loopback_pair()
    >>> work = TopK(0.5).exchange(one.stream(), np.array([1.0, 5.0, 2.0, 4.0]))
    >>> TopK(0.5).exchange(two, np.array([7.0, 0.0, 0.0, 8.0]))
    array([ 7.,  5.,  0., 12.])
    >>> work.wait()
    array([ 7.,  5.,  0., 12.])
    >>> one.close(); two.close()
    """

    name = "topk"

    def __init__(self, ratio: float = 0.01, *, feedback: bool = True) -> None:
        super().__init__(feedback=feedback)
        self.ratio = check_ratio("ratio", ratio)

    def describe(self) -> str:
        """Return the name and the ratio, which must be the same on all ranks.

        >>> TopK(0.05).describe()
        'topk of 0.05'
        """
        return f"topk of {self.ratio:g}"

    def _reduce(self, exchange: Exchange, task: Task) -> None:
        flat, work = task.flat, task.work
        number = min(flat.size, math.ceil(self.ratio * flat.size))
        place = np.dtype(np.uint32 if flat.size <= 1 << 32 else np.uint64)
        nbytes = number * (work.itemsize + place.itemsize)
        wire = self._scratch_array("wire", nbytes, np.uint8)
        received = self._scratch_array("received", exchange.size * nbytes, np.uint8)

        self._choose(task, *_split(wire, number, work, place))
        exchange(Shape("all_gather", BYTE, (nbytes,) * exchange.size, call=task.call), wire, received)

        total = flat if flat.dtype == work else self._scratch_array("total", flat.size, work)
        total.fill(0)
        for source, encoded in enumerate(received.reshape(exchange.size, nbytes)):
            values, places = _split(encoded, number, work, place)
            if int(places.max()) >= flat.size:
                raise exchange.disagree(f"rank {source} sends element {int(places.max())} of {flat.size}")
            total[places] += values
        if total is not flat:
            np.copyto(flat, total, casting="same_kind")

    def _choose(self, task: Task, values: Array, places: Array) -> None:
        """Move the largest values from the residual plus the bucket into `values` and `places`."""
        kept = self._saved_array(task, "residual", task.flat.size)
        magnitudes = self._scratch_array("magnitudes", task.flat.size, task.work)
        np.multiply(task.flat.astype(task.work, copy=False), task.work.type(task.scale), out=magnitudes)
        np.add(kept, magnitudes, out=kept)
        np.abs(kept, out=magnitudes)
        chosen = largest(magnitudes, values.size)
        np.copyto(places, chosen, casting="unsafe")  # safe: the dtype was chosen for the bucket's size
        np.copyto(values, kept[chosen])
        kept[chosen] = 0
        if not np.isfinite(values).all():  # NaN and infinite values sort first; those not chosen must not be kept
            kept[~np.isfinite(kept)] = 0


def _split(wire: Array, number: int, work: np.dtype[Any], place: np.dtype[Any]) -> tuple[Array, Array]:
    """Return views of the values and of the positions in `wire`."""
    middle = number * work.itemsize
    return wire[:middle].view(work), wire[middle:].view(place)


def largest(magnitudes: Array, number: int) -> Array:
    """Return the positions of the `number` largest magnitudes, in ascending order. NaN counts as the largest.

    >>> largest(np.array([3.0, 9.0, np.nan, 1.0]), 2)
    array([1, 2])
    """
    count = magnitudes.size
    if number == count:
        return np.arange(count)
    candidates = _candidates(magnitudes, number)
    if candidates is None:
        return np.sort(np.argpartition(magnitudes, count - number)[count - number :])
    rest = candidates.size - number
    return np.sort(candidates[np.argpartition(magnitudes[candidates], rest)[rest:]]) if rest else candidates


def _candidates(magnitudes: Array, number: int) -> Array | None:
    """Return at least `number` positions that include those of the largest magnitudes, or None.

    A sample estimates the smallest magnitude to send. The result is None if the sample would be too small, or if the
    estimate turns out to be bad. Then the caller must partition all magnitudes.
    """
    step = magnitudes.size // SAMPLE
    if step < 4:
        return None
    sample = magnitudes[::step]
    above = int(1.2 * number / step) + 32
    if above >= sample.size // 4:
        return None
    least = np.partition(sample, sample.size - above)[sample.size - above]
    found = np.flatnonzero(~(magnitudes < least)) if least > 0 else np.flatnonzero(magnitudes)
    return found if number <= found.size <= magnitudes.size // 2 else None
