"""The order of a group's calls: each call takes a ticket when it is made, and the tickets are served one at a time."""

from __future__ import annotations

import threading

from gradwire.host import native_core


class Turns:
    """Which ticket is served: what the core's class of this name does, without it. Used with the order's lock held."""

    def __init__(self) -> None:
        self.issued = self.serving = 0

    def take(self) -> int:
        self.issued += 1
        return self.issued - 1

    def pass_on(self) -> int:
        self.serving += 1
        return self.serving


class CallOrder:
    """The tickets of one group. `changed` is the lock of everything here, and is notified when another is served."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.turns = native_core.native.Turns() if native_core.available() else Turns()
        self.closed = False
        self._skipped: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether every call that was made is done."""
        return self.turns.issued == self.turns.serving

    def skip(self, ticket: int) -> None:
        """With the lock held: the call with this ticket will not be made, but others may already wait for it."""
        self._skipped.add(ticket)
        self._pass_skipped()

    def pass_on(self) -> None:
        """The call that was served is done: serve the next one."""
        with self.changed:
            self.turns.pass_on()
            self._pass_skipped()

    def passed_on(self) -> None:
        """The core has passed a turn on."""
        with self.changed:
            self._pass_skipped()

    def _pass_skipped(self) -> None:
        turns = self.turns
        while turns.serving in self._skipped:
            self._skipped.remove(turns.serving)
            turns.pass_on()
        if turns.issued != turns.serving or self.closed:
            self.changed.notify_all()

    def close(self) -> bool:
        """End the waiting of those that only wait for calls; whether it was open until now."""
        with self.changed:
            if self.closed:
                return False
            self.closed = True
            self.changed.notify_all()
            return True

    def abandon(self) -> None:
        """In a forked child: nobody may be there to release the lock, and nobody waits."""
        self.closed = True
