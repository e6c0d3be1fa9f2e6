"""The order of a group's calls: each call takes a ticket when it is made, and tickets are served one at a time."""

from __future__ import annotations

import threading

from gradwire.host import native_core


class Turns:
    """Counts the tickets. The Python version of the native class of the same name. Callers hold the order's lock."""

    def __init__(self) -> None:
        self.issued = self.serving = 0

    def take(self) -> int:
        self.issued += 1
        return self.issued - 1

    def pass_on(self) -> int:
        self.serving += 1
        return self.serving


class CallOrder:
    """The tickets of one group. `changed` is the lock of all state here; it is notified when the next one is served."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.turns = native_core.native.Turns() if native_core.available() else Turns()
        self.closed = False
        self._skipped: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether all calls that took a ticket have ended."""
        return self.turns.issued == self.turns.serving

    def skip(self, ticket: int) -> None:
        """Pass over a ticket whose call was cancelled, when its turn comes. The caller holds the lock."""
        self._skipped.add(ticket)
        self._pass_skipped()

    def pass_on(self) -> None:
        """End the call that was served, and serve the next ticket."""
        with self.changed:
            self.turns.pass_on()
            self._pass_skipped()

    def after_native_call(self) -> None:
        """Wake the waiting threads after the native core has ended a call and served the next ticket."""
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
        """Close the order and wake the threads that wait for queued calls; False if it was closed before."""
        with self.changed:
            if self.closed:
                return False
            self.closed = True
            self.changed.notify_all()
            return True

    def abandon(self) -> None:
        """Close the order in a forked child, without the lock: the thread that held it may not exist there."""
        self.closed = True
