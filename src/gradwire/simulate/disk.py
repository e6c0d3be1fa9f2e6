"""The simulated disk below the coordinator's journal, with the faults of a real one.

It promises what `membership.journal.Journal` promises:

kill         everything that was saved is there again; an entry whose fsync was not over is there or not, as a whole
power loss   the same if the journal is durable; otherwise the last entries may be lost or torn, and the journal is
             refused until an operator moves the file away: the next start is a new run
full         saving raises `JournalError`, and the file stays as it was
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
        self.fsync_seconds = 0.0  # that the next entries take
        self._durable = durable
        self._refused = False
        self._entries: deque[str] = deque(maxlen=ENTRIES_KEPT)  # oldest first

    def load(self) -> dict[str, Any] | None:
        """The snapshot that was saved last; None if there is no journal."""
        if self._refused:
            raise JournalError("the coordinator's journal may lack its last entries: move the file away to start anew")
        return json.loads(self._entries[-1]) if self._entries else None

    def save(self, snapshot: Mapping[str, Any]) -> float:
        """Add an entry; returns the seconds after which it is on the disk."""
        if self.full:
            raise JournalError("the coordinator's journal: its disk is full")
        self._entries.append(json.dumps(snapshot))
        return self.fsync_seconds if self._durable else 0.0

    def drop(self, count: int) -> None:
        """The fsync of the last entries was cut short, and they are rolled back when the file is opened."""
        for _ in range(count):
            self._entries.pop()

    def lose_power(self, random: Random) -> None:
        """The machine is started anew; entries that were not on the disk yet are lost."""
        if not self._durable:
            self.drop(random.randint(0, len(self._entries)))
            self._refused = True

    def accept(self) -> None:
        """Believe what is left after a loss of power, which the journal does not."""
        self._refused = False

    def remove(self) -> None:
        """An operator moves the journal away."""
        self._entries.clear()
        self._refused = False
