"""Simulate the disk of the coordinator's journal, with the faults of a real disk.

It keeps the promises of `membership.coordinator.journal.Journal`:

kill         All saved entries are there again. An entry whose fsync had not finished is either complete or missing.
power loss   If the journal is durable, the same. Otherwise the last entries may be lost or torn, and the journal is
             refused until an operator moves the file away; the next start then begins a new run.
full         Saving raises `JournalError`, and the file does not change.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from random import Random
from typing import Any

from gradwire.errors import JournalError

ENTRIES_KEPT = 256


class Disk:
    """Holds one journal."""

    def __init__(self, durable: bool = True) -> None:
        self.full = False
        self.fsync_seconds = 0.0  # the duration of the next fsyncs
        self._durable = durable
        self._refused = False
        self._entries: deque[str] = deque(maxlen=ENTRIES_KEPT)  # oldest first

    def load(self) -> dict[str, Any] | None:
        """Return the snapshot that was saved last, or None if there is no journal."""
        if self._refused:
            raise JournalError("the coordinator's journal may lack its last entries: move the file away to start anew")
        return json.loads(self._entries[-1]) if self._entries else None

    def save(self, snapshot: Mapping[str, Any]) -> float:
        """Add an entry, and return the seconds until it is on the disk."""
        if self.full:
            raise JournalError("the coordinator's journal: its disk is full")
        self._entries.append(json.dumps(snapshot))
        return self.fsync_seconds if self._durable else 0.0

    def drop(self, count: int) -> None:
        """Remove the last `count` entries, whose fsync did not finish: opening the file rolls them back."""
        for _ in range(count):
            self._entries.pop()

    def lose_power(self, random: Random) -> None:
        """Apply a power loss. Without fsync some of the last entries are lost, and the journal is refused."""
        if not self._durable:
            self.drop(random.randint(0, len(self._entries)))
            self._refused = True

    def accept(self) -> None:
        """Accept the entries left after a power loss, which the real journal refuses. For tests of that rule."""
        self._refused = False

    def remove(self) -> None:
        """Remove the journal, as an operator who moves the file away."""
        self._entries.clear()
        self._refused = False
