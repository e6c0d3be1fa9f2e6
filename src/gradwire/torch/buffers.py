"""Buffers of a model (running means, counters): all ranks take those of rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradwire.arrays import Array
from gradwire.group import Group
from gradwire.torch.views import as_array
from gradwire.training import agreement_check

_LINE = 16  # bytes: where an array may begin


class Buffers:
    """All buffers of a model, in one broadcast."""

    def __init__(self, model: Any) -> None:
        # By place, not by tensor: a model may put another tensor there.
        places = [(path, owner, name) for path, owner in model.named_modules() for name in owner._buffers]
        self._places = [(f"{path}.{name}" if path else name, owner, name) for path, owner, name in places]
        self._memory: tuple[Group, Array] | None = None
        self._alike: tuple[Group, list[Any]] | None = None  # as all ranks had them when they last told each other

    def arrays(self) -> dict[str, Array]:
        """The buffers as they are now."""
        found = {path: owner._buffers.get(name) for path, owner, name in self._places}
        return {path: as_array(path, tensor) for path, tensor in found.items() if tensor is not None}

    def are_alike(self, group: Group) -> None:
        """All ranks have the same ones as this."""
        self._alike = group, _kinds(self.arrays())

    def remember(self) -> dict[str, Array]:
        """Copies of what they hold now, for `restore`."""
        return {path: array.copy() for path, array in self.arrays().items()}

    def restore(self, remembered: dict[str, Array]) -> None:
        """Let them hold what they did then."""
        for path, array in self.arrays().items():
            if path in remembered and remembered[path].shape == array.shape:
                array[...] = remembered[path]

    def broadcast(self, group: Group, root: int = 0) -> None:
        """Let all ranks have the root's."""
        found = self.arrays()
        arrays = list(found.values())
        if group.size == 1:
            return
        if self._alike != (group, _kinds(found)):  # a model may have put others there
            agreement_check.check_and_gather(group, "buffers", describe(found))
            self.are_alike(group)
        if not arrays:
            return
        sizes = [-(-array.nbytes // _LINE) * _LINE for array in arrays]
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
        # Through NumPy: for autograd nothing has been changed that a graph, still to be run, might need unchanged.
        if group.rank != root:
            for slot, array in zip(slots, arrays, strict=True):
                array[...] = slot

    def _room(self, group: Group, nbytes: int) -> Array:
        if self._memory is None or self._memory[0] is not group or self._memory[1].size != nbytes:
            self._memory = group, group.empty(nbytes, np.uint8)
        return self._memory[1]


def describe(buffers: Mapping[str, Array]) -> list[str]:
    """What ranks must have in common."""
    return [f"{name!r}: {one.dtype}{list(one.shape)}" for name, one in buffers.items()]


def _kinds(buffers: Mapping[str, Array]) -> list[Any]:
    return [(name, one.dtype, one.shape) for name, one in buffers.items()]
