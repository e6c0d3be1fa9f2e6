"""`DeliveryThread`: completes the messages that no thread of the program waits for."""

from __future__ import annotations

import threading
from typing import Protocol

from gradwire.generation.waiting import POLL_SECONDS


class Deliverable(Protocol):
    """A message that is not complete yet."""

    @property
    def ended(self) -> bool:
        """Whether the message is complete, or has failed."""

    @property
    def due(self) -> bool:
        """Whether the thread must act: the message has ended, or `deliver` can complete it without waiting."""

    def deliver(self) -> None:
        """Complete the message."""


class DeliveryThread:
    """One thread that completes messages when they are due. It ends when no message is left."""

    def __init__(self, changed: threading.Condition) -> None:
        """`changed` is notified whenever a message may have become due."""
        self._changed = changed
        self._waiting: list[Deliverable] = []
        self._lock = threading.Lock()

    def add(self, message: Deliverable) -> None:
        """Complete a message when it is due, even if no thread of this rank waits for it."""
        with self._lock:
            self._waiting.append(message)
            first = len(self._waiting) == 1
        if first:
            threading.Thread(target=self._run, name="gradwire-messages", daemon=True).start()
        else:  # it may be due already
            with self._changed:
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                due = [one for one in list(self._waiting) if one.due]
                if not due:
                    self._changed.wait(POLL_SECONDS)
            for one in due:
                one.deliver()
            with self._lock:
                self._waiting = [one for one in self._waiting if not one.ended]
                if not self._waiting:
                    return
