"""Tracks checkpoints of the whole job: begun for an epoch, complete when every live worker has reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gradwire.membership.types import CheckpointStatus, Refusal

Alive = Callable[[str], bool]


class Checkpoints:
    """One checkpoint at a time. The members that are live when it begins take part. Members lost later do not count."""

    def __init__(self) -> None:
        self.epoch: int | None = None  # of the checkpoint in progress
        self.last: int | None = None  # the epoch of the last complete checkpoint
        self._left: dict[str, None] = {}  # participants that have not reported, in rank order
        self._reported = False  # whether any participant has reported

    def begin(self, epoch: int, participants: Iterable[str]) -> bool:
        """Begin the checkpoint of `epoch`. Return False if it has already begun or cannot begin."""
        if self.epoch is not None or epoch <= (-1 if self.last is None else self.last):
            return False
        self.epoch, self._left, self._reported = epoch, dict.fromkeys(participants), False
        return True

    def report(self, epoch: int, name: str) -> bool:
        """Record that `name` has written its part. Return False if it has already reported or does not take part."""
        if epoch != self.epoch or name not in self._left:
            return False
        del self._left[name]
        self._reported = True
        return True

    def end_if_complete(self, alive: Alive) -> bool:
        """End the checkpoint if no live participant is missing. Return True if it is complete now.

        If all participants were lost before any of them reported, the checkpoint is discarded.
        """
        if self.epoch is None or any(map(alive, self._left)):
            return False
        if self._reported:
            self.last = self.epoch
        self.epoch, self._left = None, {}
        return self._reported

    def status(self, epoch: int, alive: Alive) -> CheckpointStatus | Refusal:
        """Return the progress of the checkpoint of `epoch`, or why there is none."""
        waiting_for = tuple(filter(alive, self._left))
        if epoch == self.epoch:
            return CheckpointStatus(epoch, waiting_for, complete=False)
        if epoch == self.last:
            return CheckpointStatus(epoch, (), complete=True)
        if self.epoch is not None:
            names = ", ".join(waiting_for[:4])
            return Refusal(f"the checkpoint of epoch {self.epoch} is in progress and waits for {names}")
        last = "" if self.last is None else f"; the last complete one is of epoch {self.last}"
        return Refusal(f"there is no checkpoint of epoch {epoch}{last}")

    def snapshot(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "last": self.last, "left": list(self._left), "reported": self._reported}

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> Checkpoints:
        checkpoints = cls()
        checkpoints.epoch, checkpoints.last = snapshot["epoch"], snapshot["last"]
        checkpoints._left, checkpoints._reported = dict.fromkeys(snapshot["left"]), snapshot["reported"]
        return checkpoints
