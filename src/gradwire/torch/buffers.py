"""Broadcasts the buffers of a model (running means, counters) from one rank to all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradwire.arrays import Array
from gradwire.group import Group
from gradwire.torch.views import as_array
from gradwire.training import agreement_check

_ALIGNMENT = 16  # bytes


class Buffers:
    """The buffers of a model."""

    def __init__(self, model: Any) -> None:
        # Module and name, not the tensor: a model may assign a new tensor to a buffer.
        places = [(path, owner, name) for path, owner in model.named_modules() for name in owner._buffers]
        self._places = [(f"{path}.{name}" if path else name, owner, name) for path, owner, name in places]
        self._memory: tuple[Group, Array] | None = None
        self._checked: tuple[Group, list[Any]] | None = None  # names, dtypes and shapes that all ranks have agreed on

    def arrays(self) -> dict[str, Array]:
        """Return the current buffers by name."""
        found = {path: owner._buffers.get(name) for path, owner, name in self._places}
        return {path: as_array(path, tensor) for path, tensor in found.items() if tensor is not None}

    def mark_checked(self, group: Group) -> None:
        """Note that all ranks have buffers of the same names, dtypes and shapes."""
        self._checked = group, _kinds(self.arrays())

    def snapshot(self) -> dict[str, Array]:
        """Return copies of the buffers, for `restore`."""
        return {path: array.copy() for path, array in self.arrays().items()}

    def restore(self, snapshot: dict[str, Array]) -> None:
        """Set the buffers to the values of an earlier `snapshot`."""
        for path, array in self.arrays().items():
            if path in snapshot and snapshot[path].shape == array.shape:
                array[...] = snapshot[path]

    def broadcast(self, group: Group, root: int = 0) -> None:
        """Copy the root's buffers to all ranks, in one broadcast."""
        found = self.arrays()
        arrays = list(found.values())
        if group.size == 1:
            return
        if self._checked != (group, _kinds(found)):  # a model may have assigned buffers of other shapes
            agreement_check.check_and_gather(group, "buffers", describe(found))
            self.mark_checked(group)
        if not arrays:
            return
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        flat = self._room(group, sum(sizes))
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        slots = [
            part[: array.nbytes].view(array.dtype).reshape(array.shape)
            for part, array in zip(parts, arrays, strict=True)
        ]
        if group.rank == root:
            for slot, array in zip(slots, arrays, strict=True):
                slot[...] = array
        group.broadcast(flat, root)
        # Write through NumPy: autograd would count a write to the tensors as a change, and refuse a later backward.
        if group.rank != root:
            for slot, array in zip(slots, arrays, strict=True):
                array[...] = slot

    def _room(self, group: Group, nbytes: int) -> Array:
        if self._memory is None or self._memory[0] is not group or self._memory[1].size != nbytes:
            self._memory = group, group.empty(nbytes, np.uint8)
        return self._memory[1]


def describe(buffers: Mapping[str, Array]) -> list[str]:
    """Return the names, dtypes and shapes of buffers, which must be the same on all ranks."""
    return [f"{name!r}: {one.dtype}{list(one.shape)}" for name, one in buffers.items()]


def _kinds(buffers: Mapping[str, Array]) -> list[Any]:
    return [(name, one.dtype, one.shape) for name, one in buffers.items()]
