"""The queued operations of a group. They run on its progress thread, or on a thread that waits for them.

If ranks share memory and have no spare core, a queued operation would compete with the program for its core, and each
would evict the other's data from the caches. In that case operations are held back: until a thread waits for one (and
runs it), until a thread calls the group, or for a short time at most, since other ranks may need the operation.
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
    due: float  # when the progress thread runs it, if no thread has waited for it before


class ProgressQueue:
    """The queued operations of one group, in the group's order."""

    def __init__(self, order: CallOrder, failure: FailurePath) -> None:
        self._order = order
        self._changed = order.changed  # the lock of all state here
        self._failure = failure
        self._queue: deque[_Queued] = deque()
        self._wanted = 0  # a thread waits for the tickets below this one
        self._held_back = 0.0
        self._thread: threading.Thread | None = None
        self._owner: object = None
        self._failed = False

    def hold_back(self, seconds: float) -> None:
        """Hold back operations that are queued from now on, each for this many seconds at most."""
        self._held_back = seconds

    def add(self, operation: str, body: Callable[..., Any], owner: object) -> Work:
        """Queue an operation as the group's next call.

        `body` gets `on_progress_thread=True` if the progress thread runs it. `owner` is the object whose `close` ends
        the progress thread. The thread keeps it alive, even if the program has dropped the group.
        """
        work = Work(operation, self._expedite)
        with self._changed:
            self.replace_thread()
            self._owner = owner
            due = time.monotonic() + self._held_back
            self._queue.append(_Queued(self._order.turns.take(), work, body, due))
            self._ensure_thread()
            if not self._held_back or len(self._queue) == 1:  # otherwise the thread wakes when the first one is due
                self._changed.notify_all()
        return work

    def replace_thread(self) -> None:
        """Start another progress thread if this is the progress thread. The caller holds the lock.

        A callback on the progress thread may call the group or wait for a work. Queued operations continue meanwhile.
        """
        if self._thread is not None and self._thread is threading.current_thread():
            self._thread = None
            if self._queue:
                self._ensure_thread()

    def release_all(self) -> None:
        """Stop holding back the operations that are queued now. The caller holds the lock."""
        if self._queue and self._wanted < self._order.turns.issued:
            self._wanted = self._order.turns.issued
            self._changed.notify_all()

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_thread, name="gradwire-progress", daemon=True)
            self._thread.start()

    def _run_thread(self) -> None:
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
            self._run(queued.work, partial(queued.body, on_progress_thread=True))
            del queued  # it may be the last reference to the work, which logs an unseen error when it is deleted

    def _pause(self) -> float | None:
        """Return the seconds until the progress thread has something to do; None means until it is notified."""
        if not self._is_next_queued():
            return None
        first = self._queue[0]
        held_back = self._held_back and not self._order.closed and first.ticket >= self._wanted
        return max(0.0, first.due - time.monotonic()) if held_back else 0.0

    def _is_next_queued(self) -> bool:
        return bool(self._queue) and self._order.turns.serving == self._queue[0].ticket

    def _expedite(self, work: Work, on_this_thread: bool) -> None:
        """Run this work soon, because the calling thread waits for it.

        With `on_this_thread` the calling thread runs the operations up to this work that have not begun: waking
        another thread takes longer than most calls. Otherwise the work is no longer held back.
        """
        if self._failure.inherited:  # in a forked child the thread that held the lock may not exist
            self._failure.check(work.operation)
        with self._changed:
            self.replace_thread()
        while on_this_thread and not work.done and (queued := self._next_queued()) is not None:
            self._run(queued.work, queued.body)
            error = queued.work._error
            if error is not None and not isinstance(error, Exception):  # Ctrl-C, which belongs to this thread
                queued.work.acknowledge_error()
                raise error
        if not work.done:
            with self._changed:
                self.release_all()

    def _next_queued(self) -> _Queued | None:
        with self._changed:
            return self._queue.popleft() if self._is_next_queued() else None

    def _run(self, work: Work, body: Callable[[], Any]) -> None:
        usable = work.run(body, first_error=not self._failed)
        self._failed = self._failed or not usable
        self._order.pass_on()
        work.call_back()
