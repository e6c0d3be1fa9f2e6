"""Learns, in the first backward pass of a generation, the order in which gradients are completed."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.training.gradients import GradientSync


class ReadyOrder:
    """Records the order in which hooks fire, and the parameters whose hooks fire more than once."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._seen: dict[int, None] = {}  # indices of parameters, in the order in which their hooks last fired
        self.twice: set[int] = set()  # indices of parameters whose hooks fire more than once in a backward pass
        self.is_learning = True
        self._ordered = False  # whether the ranks have agreed on the order in this generation

    def begin(self) -> None:
        """Start recording a backward pass."""
        self._seen = {}

    def see(self, index: int) -> None:
        """Record that the hook of a parameter has fired."""
        if index in self._seen:
            self.twice.add(index)
        self._seen.pop(index, None)  # move the index to the end: the last time counts
        self._seen[index] = None

    def end(self, sync: GradientSync) -> bool:
        """End a backward pass. After the first one, order the buckets as rank 0 recorded. All ranks call it.

        Return whether gradients may have moved to other places.
        """
        if not self.is_learning:
            return False
        reorders = not self._ordered
        if reorders:
            last = [self._names[index] for index in self._seen if index in self.twice]
            sync.reorder([*(name for index in self._seen if (name := self._names[index]) not in last), *last])
            self._ordered = True
        self.is_learning = not self._seen  # a rank without data still has to learn which hooks fire twice
        return reorders

    def learn_again(self) -> None:
        """Start over in a new generation, in which rank 0 may have a different order."""
        self._seen, self.is_learning, self._ordered = {}, True, False
