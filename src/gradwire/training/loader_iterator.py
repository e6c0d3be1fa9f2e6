"""Finds the iterator of torch's DataLoader that takes indices from a sampler, and counts the batches it has yielded.

A DataLoader with workers takes the indices of several batches ahead (`num_workers` · `prefetch_factor`). So the indices
that it has taken are not yet samples that the program has received. DataLoader does not report the yielded batches to
its sampler, and has no public counter of them. But its iterators take indices in their method `_next_index`, and count
the yielded batches in `_num_yielded` and the batches sent to workers in `_send_idx`. So a sampler looks for this method
among its callers when its first index is taken. Without such a caller, a program iterates over the sampler directly,
and each index that is taken counts as used.

The iterators of torch 1.2 to 2.13 have these attributes, and so do those of torchdata's StatefulDataLoader. This module
does not import torch.
"""

from __future__ import annotations

import sys
from typing import Any

from gradwire.errors import ConfigError

MAX_CALLERS = 16  # between the sampler and the loader's iterator: the batch sampler, and wrappers around it
UNORDERED = (
    "the batch sampler has taken samples of several batches at once, so that the position of the run is unknown: with "
    "run=, a batch sampler must take its samples in order, batch by batch"
)


class LoaderIterator:
    """The iterator of a DataLoader. It holds no reference to it: the workers end when the program drops the iterator.

    Attributes:
        prefetches: Whether it takes the indices of batches ahead, for worker processes.
        least: The fewest samples of a batch: the batch size with `drop_last`, otherwise 1.
    """

    def __init__(self, iterator: Any, least: int) -> None:
        self._attributes = vars(iterator)  # these remain readable after the iterator has ended
        self._latest = 0, 0
        self.least = least
        self.prefetches = bool(self._attributes.get("_num_workers"))
        counted = {"_num_yielded", "_send_idx"} if self.prefetches else {"_num_yielded"}
        if not counted <= set(self._attributes) or (self.prefetches and not self._attributes.get("_in_order", True)):
            raise ConfigError(
                "this DataLoader does not yield its batches in the order of its sampler, or does not count them as "
                "torch 2.13 does: a sampler with run= needs in_order=True, or num_workers=0"
            )

    @property
    def yielded(self) -> int:
        """The number of batches that the program has received."""
        return self._counts()[0]

    @property
    def begun(self) -> int:
        """The number of batches whose indices have been taken completely."""
        return self._counts()[1]

    def _counts(self) -> tuple[int, int]:
        """Return both numbers. They do not fall when persistent workers begin the next epoch in the same iterator."""
        yielded = int(self._attributes["_num_yielded"])
        begun = int(self._attributes["_send_idx"]) if self.prefetches else yielded
        self._latest = max(self._latest[0], yielded), max(self._latest[1], begun)
        return self._latest


def find_calling_loader() -> LoaderIterator | None:
    """Return the DataLoader iterator that takes an index now, or None if another program does."""
    frame = sys._getframe(1)
    least = 1
    for _ in range(MAX_CALLERS):
        caller = frame.f_back
        if caller is None:
            return None
        frame, owner = caller, caller.f_locals.get("self")
        if hasattr(type(owner), "_next_index"):
            if frame.f_code.co_name != "_next_index":
                raise ConfigError(UNORDERED)
            return LoaderIterator(owner, least)
        batch_size = getattr(owner, "batch_size", None)
        if frame.f_code.co_name == "__iter__" and getattr(owner, "drop_last", False) and isinstance(batch_size, int):
            least = batch_size
    return None
