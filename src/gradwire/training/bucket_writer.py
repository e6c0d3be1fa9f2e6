"""Copies gradients into buckets, and checks during the copy whether they are finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradwire.arrays import Array, dtype_of
from gradwire.host import native_core
from gradwire.training import finite

# Gradients bypass the CPU caches if all of them together exceed _CACHED bytes (they would be evicted before the
# exchange anyway) and the gradient itself has at least _LARGE bytes.
_CACHED = 8 << 20
_LARGE = 32 << 10


class BucketWriter:
    """Writes gradients to their places in buckets, and checks during the copy whether they are finite.

    `finite` holds the names of gradients that passed this check; they are not checked again before they are sent.
    Code that changes such a gradient by other means must call `mark_unchecked`.
    """

    def __init__(self, gradients: Mapping[str, Array]) -> None:
        self._gradients = gradients
        self._many = sum(place.nbytes for place in gradients.values()) > _CACHED
        self._slots: dict[str, Any] = {}  # the native core's object for each place that `copy_from` has used
        self.finite: set[str] = set()

    def write(self, name: str, gradient: Array) -> None:
        """Copy a gradient into its place, and check whether it is finite."""
        place = self._gradients[name]
        if gradient is not place:
            self._record(name, finite.copy_finite(place, gradient))

    def copy_from(self, name: str, address: int) -> bool:
        """Copy a gradient from a memory address into its place, and check whether it is finite.

        The memory must be contiguous, and have the size and dtype of the place. Return False if nothing was copied:
        the native core is missing, or the address is the place itself.
        """
        slot = self._slots.get(name)
        if slot is None:
            if not native_core.available():
                return False
            array = self._gradients[name].reshape(-1)
            streams = self._many and array.nbytes >= _LARGE
            dtype = native_core.native.DType[dtype_of(array).name]
            slot = self._slots[name] = native_core.native.BucketSlot(dtype, array.view(np.uint8), streams)
        is_finite: bool | None = slot.copy_from(address)
        self._record(name, is_finite)
        return is_finite is not None

    def add(self, name: str, gradient: Array) -> None:
        """Add a gradient to the values in its place."""
        place = self._gradients[name]
        np.add(place, gradient, out=place, casting="same_kind")
        self.mark_unchecked(name)

    def mark_unchecked(self, name: str) -> None:
        """Note that a gradient has changed, so that it is checked again before it is sent."""
        self.finite.discard(name)

    def _record(self, name: str, is_finite: bool | None) -> None:
        if is_finite:
            self.finite.add(name)
        else:
            self.finite.discard(name)
