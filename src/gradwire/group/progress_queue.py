"""Queued operations: done on the group's progress thread, or by the thread that waits for them.

Where ranks that share memory have no core to spare, a queued operation beside the program only takes turns with it, and
both find their caches full of the other's data. It is held back then, until a thread waits for it, which also does it,
or calls the group; and for a moment only, since others may need it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradwire.generation.failure_path import FailurePath
from gradwire.group.call_order import CallOrder
from gradwire.group.work import Work


@dataclass(frozen=True)
class _Queued:
    ticket: int
    work: Work
    body: Callable[..., Any]
    due: float  # when it runs beside the program, if nobody has waited for it before


class ProgressQueue:
    """The queued operations of one group, in its order."""

    def __init__(self, order: CallOrder, failure: FailurePath) -> None:
        self._order = order
        self._changed = order.changed  # the lock of everything here
        self._failure = failure
        self._queue: deque[_Queued] = deque()
        self._wanted = 0  # tickets below this one are waited for
        self._held_back = 0.0
        self._thread: threading.Thread | None = None
        self._owner: object = None
        self._failed = False

    def hold_back(self, seconds: float) -> None:
        """From now on, wait so long before an operation runs beside the program."""
        self._held_back = seconds

    def add(self, operation: str, body: Callable[..., Any], owner: object) -> Work:
        """Queue an operation as the group's next call; `beside` tells its body that the program runs beside it.

        `owner` ends the progress thread, also if the program has dropped the group: so the thread keeps it alive.
        """
        work = Work(operation, self._hurry)
        with self._changed:
            self.step_aside()
            self._owner = owner
            due = time.monotonic() + self._held_back
            self._queue.append(_Queued(self._order.turns.take(), work, body, due))
            self._have_thread()
            if not self._held_back or len(self._queue) == 1:  # else it will look when the first of them is due
                self._changed.notify_all()
        return work

    def step_aside(self) -> None:
        """With the lock held. On the progress thread, a callback makes a call, or waits for one: another takes over."""
        if self._thread is not None and self._thread is threading.current_thread():
            self._thread = None
            if self._queue:
                self._have_thread()

    def begin_all(self) -> None:
        """With the lock held: hold back nothing of what is queued by now."""
        if self._queue and self._wanted < self._order.turns.issued:
            self._wanted = self._order.turns.issued
            self._changed.notify_all()

    def _have_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gradwire-progress", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        own = threading.current_thread()
        while True:
            with self._changed:
                while self._thread is own and (pause := self._pause()) != 0:
                    if self._order.closed and not self._queue:
                        return
                    self._changed.wait(pause)
                if self._thread is not own:
                    return
                queued = self._queue.popleft()
            self._do(queued.work, partial(queued.body, beside=True))
            del queued  # the last reference may be ours: an error that nobody waits for is logged now

    def _pause(self) -> float | None:
        """Seconds until the progress thread has something to do; None: until it is told."""
        if not self._is_next_queued():
            return None
        first = self._queue[0]
        held_back = self._held_back and not self._order.closed and first.ticket >= self._wanted
        return max(0.0, first.due - time.monotonic()) if held_back else 0.0

    def _is_next_queued(self) -> bool:
        return bool(self._queue) and self._order.turns.serving == self._queue[0].ticket

    def _hurry(self, work: Work, here: bool) -> None:
        """A thread waits for this work. What is queued up to it is done here, where nobody has begun it: to wake
        another thread takes longer than most calls. Otherwise it is no longer held back."""
        if self._failure.inherited:  # nobody may be there to release the lock
            self._failure.check(work.operation)
        with self._changed:
            self.step_aside()
        while here and not work.done and (queued := self._next_queued()) is not None:
            self._do(queued.work, queued.body)
            error = queued.work._error
            if error is not None and not isinstance(error, Exception):  # Ctrl-C, meant for this thread
                queued.work.heed()
                raise error
        if not work.done:
            with self._changed:
                self.begin_all()

    def _next_queued(self) -> _Queued | None:
        with self._changed:
            return self._queue.popleft() if self._is_next_queued() else None

    def _do(self, work: Work, body: Callable[[], Any]) -> None:
        went_well = work.run(body, first_error=not self._failed)
        self._failed = self._failed or not went_well
        self._order.pass_on()
        work.call_back()
