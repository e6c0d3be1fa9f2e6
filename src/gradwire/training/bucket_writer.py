"""Copies gradients into buckets, and checks on the way whether they are finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradwire.arrays import Array, dtype_of
from gradwire.host import native_core
from gradwire.training import finite

_CACHED = 8 << 20  # bytes of all gradients together: more will not be in the caches any more when they are exchanged
_LARGE = 32 << 10  # bytes of one


class BucketWriter:
    """Writes gradients to their places in buckets, and looks on the way whether they are finite.

    Those in `finite` are not looked at again before they leave. Code that changes one in another way calls
    `look_again`.
    """

    def __init__(self, gradients: Mapping[str, Array]) -> None:
        self._gradients = gradients
        self._many = sum(place.nbytes for place in gradients.values()) > _CACHED
        self._known: dict[str, Any] = {}  # those that were taken from addresses, as the core knows them
        self.finite: set[str] = set()

    def write(self, name: str, gradient: Array) -> None:
        """Copy a gradient into its place, and look on the way whether it is finite."""
        place = self._gradients[name]
        if gradient is not place:
            self._found(name, finite.copy_finite(place, gradient))

    def take(self, name: str, address: int) -> bool:
        """The same, for a framework that knows where a gradient lies: without gaps, of its place's size and dtype.

        False if nothing was done: without the core, or if it lies in the place itself.
        """
        known = self._known.get(name)
        if known is None:
            if not native_core.available():
                return False
            array = self._gradients[name].reshape(-1)
            streams = self._many and array.nbytes >= _LARGE
            dtype = native_core.native.DType[dtype_of(array).name]
            known = self._known[name] = native_core.native.BucketSlot(dtype, array.view(np.uint8), streams)
        found: bool | None = known.copy_from(address)
        self._found(name, found)
        return found is not None

    def add(self, name: str, gradient: Array) -> None:
        """Add a gradient to what is in its place."""
        place = self._gradients[name]
        np.add(place, gradient, out=place, casting="same_kind")
        self.look_again(name)

    def look_again(self, name: str) -> None:
        """What was found finite has changed since."""
        self.finite.discard(name)

    def _found(self, name: str, is_finite: bool | None) -> None:
        if is_finite:
            self.finite.add(name)
        else:
            self.finite.discard(name)
