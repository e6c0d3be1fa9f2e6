"""The simulated disk below the coordinator's journal, with the faults of a real one.

It promises what `membership.journal.Journal` promises:

kill         everything that was saved is there again; an entry whose fsync was not over is there or not, as a whole
power loss   the same if the journal is durable; otherwise the entries of the last half minute may be lost, or the file
             is damaged
damaged      the journal refuses to be opened until an operator moves the file away: the next start is a new run
full         saving raises `JournalError`, and the file stays as it was
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from random import Random
from typing import Any

from gradwire.errors import JournalError

WRITE_BACK_SECONDS = 30.0  # in which an operating system writes what no fsync has asked for
ENTRIES_KEPT = 256


class Disk:
    """Holds one journal; time is an argument."""

    def __init__(self, durable: bool = True) -> None:
        self.full = False
        self.fsync_seconds = 0.0  # that the next entries take
        self._durable = durable
        self._damaged = False
        self._entries: deque[tuple[float, str]] = deque(maxlen=ENTRIES_KEPT)  # each with its time, oldest first

    def load(self) -> dict[str, Any] | None:
        """The snapshot that was saved last; None if there is no journal."""
        if self._damaged:
            raise JournalError("the coordinator's journal is damaged: move the file away to start the job anew")
        return json.loads(self._entries[-1][1]) if self._entries else None

    def save(self, snapshot: Mapping[str, Any], now: float) -> float:
        """Add an entry; returns the seconds after which it is on the disk."""
        if self.full:
            raise JournalError("the coordinator's journal: its disk is full")
        self._entries.append((now, json.dumps(snapshot)))
        return self.fsync_seconds if self._durable else 0.0

    def drop(self, count: int) -> None:
        """The fsync of the last entries was cut short, and they are rolled back when the file is opened."""
        for _ in range(count):
            self._entries.pop()

    def lose_power(self, now: float, random: Random) -> None:
        """Lose what was not on the disk yet; that may damage the file."""
        if self._durable:
            return
        recent = sum(now - saved_at < WRITE_BACK_SECONDS for saved_at, _ in self._entries)
        lost = random.randint(0, recent)
        self._damaged = lost > 0 and random.random() < 0.5
        self.drop(lost)

    def remove(self) -> None:
        """An operator moves the journal away."""
        self._entries.clear()
        self._damaged = False
