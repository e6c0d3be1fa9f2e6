"""The order in which gradients become complete, learned in the first backward of a generation."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.training.gradients import GradientSync


class ReadyOrder:
    """Learns in the first backward in which order gradients become complete, and whose hooks fire more than once."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._seen: dict[int, None] = {}  # indices of parameters, by the last time that their hooks fired
        self.twice: set[int] = set()  # indices of those whose hooks fire more than once in a backward
        self.is_learning = True
        self._ordered = False  # whether ranks have told each other the order of this generation

    def begin(self) -> None:
        """A backward begins."""
        self._seen = {}

    def see(self, index: int) -> None:
        """The hook of a parameter has fired."""
        if index in self._seen:
            self.twice.add(index)
        self._seen.pop(index, None)  # the last time counts
        self._seen[index] = None

    def end(self, sync: GradientSync) -> bool:
        """A backward has ended: after the first one buckets are filled in the order that rank 0 saw. All ranks call it.

        True if gradients may lie elsewhere now.
        """
        if not self.is_learning:
            return False
        tells = not self._ordered
        if tells:
            last = [self._names[index] for index in self._seen if index in self.twice]
            sync.reorder([*(name for index in self._seen if (name := self._names[index]) not in last), *last])
            self._ordered = True
        self.is_learning = not self._seen  # without data, this rank has yet to see who fires twice
        return tells

    def learn_again(self) -> None:
        """In a new generation: others may have another order."""
        self._seen, self.is_learning, self._ordered = {}, True, False
