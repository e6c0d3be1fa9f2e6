"""Coordinated checkpoints: begun for an epoch of training, complete when every live worker has reported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gradwire.membership.answers import CheckpointStatus, Refusal


class Checkpoints:
    """One checkpoint at a time. Those who were at work when it began take part; whoever is lost is not waited for."""

    def __init__(self) -> None:
        self.epoch: int | None = None  # of the one that is under way
        self.last: int | None = None  # the last complete one
        self._parts: tuple[str, ...] = ()  # in rank order
        self._reported: set[str] = set()

    def begin(self, epoch: int, live: Collection[str]) -> CheckpointStatus | Refusal:
        """Begin the checkpoint of `epoch`; whoever comes second finds it begun."""
        if epoch < 0:
            return Refusal(f"an epoch is not negative, as {epoch} is")
        if self.epoch is None and (self.last is None or epoch > self.last):
            self.epoch, self._parts, self._reported = epoch, tuple(live), set()
        return self.status(epoch, live)

    def report(self, epoch: int, name: str, live: Collection[str]) -> CheckpointStatus | Refusal:
        """`name` has written its part."""
        if epoch == self.epoch:
            self._reported.add(name)
            self.settle(live)
        return self.status(epoch, live)

    def settle(self, live: Collection[str]) -> bool:
        """Close the checkpoint if nobody is waited for any more; True if it is complete now.

        If all who took part were lost before any reported, there is no such checkpoint.
        """
        if self.epoch is None or self._waiting_for(live):
            return False
        complete = bool(self._reported)
        if complete:
            self.last = self.epoch
        self.epoch = None
        return complete

    def status(self, epoch: int, live: Collection[str]) -> CheckpointStatus | Refusal:
        if epoch == self.epoch:
            return CheckpointStatus(epoch, self._waiting_for(live), complete=False)
        if epoch == self.last:
            return CheckpointStatus(epoch, (), complete=True)
        if self.epoch is not None:
            waiting = ", ".join(self._waiting_for(live)[:4])
            return Refusal(f"the checkpoint of epoch {self.epoch} is under way, and waits for {waiting}")
        if self.last is not None and epoch < self.last:
            return Refusal(f"the checkpoint of epoch {epoch} is over: the last one is of epoch {self.last}")
        return Refusal(f"no checkpoint of epoch {epoch} has begun")

    def _waiting_for(self, live: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name in self._parts if name in live and name not in self._reported)

    def snapshot(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "last": self.last,
            "parts": list(self._parts),
            "reported": sorted(self._reported),
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> Checkpoints:
        checkpoints = cls()
        checkpoints.epoch, checkpoints.last = snapshot["epoch"], snapshot["last"]
        checkpoints._parts, checkpoints._reported = tuple(snapshot["parts"]), set(snapshot["reported"])
        return checkpoints
