"""Work: the handle of a collective that runs beside the program."""

from __future__ import annotations

import logging
import numbers
import threading
from collections.abc import Callable
from typing import Any

from gradwire.errors import InvalidSize, Timeout
from gradwire.operations import Declined

log = logging.getLogger("gradwire")


class Work:
    """A collective that was queued. Its result is there after `wait()`; an error it met is raised by `wait()`.

    An error that nobody waits for is logged when the handle goes away.

    >>> import gradwire as gw
    >>> with gw.init() as group:
    ...     work = group.stream().all_reduce(2.5)
    ...     work.wait()
    2.5
    """

    def __init__(self, operation: str, hurry: Callable[[Work, bool], None] | None = None) -> None:
        """`hurry` is told that somebody waits for this work, and whether that thread has nothing else to do."""
        self.operation = operation
        self._hurry = hurry
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Work], object]] = []
        self._result: Any = None
        self._error: BaseException | None = None
        self._heeded = True

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the work is done and return its result; `Timeout` leaves work and group as they are.

        Without a timeout it waits for as long as the collective itself may take, which has one.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().all_reduce(np.ones(2)).wait(timeout=60)
        array([1., 1.])
        """
        seconds = bounded(timeout)
        self.hurry(here=seconds is None)
        if not self._done.wait(seconds):
            raise Timeout(
                f"{self.operation} was not done in {seconds:g} s; it goes on", operation=self.operation, seconds=seconds
            )
        if self._error is not None:
            self._heeded = True
            raise self._error
        return self._result

    def hurry(self, *, here: bool) -> None:
        """Somebody waits for it; `here`, on a thread that has nothing else to do, and until it is done."""
        if self._hurry is not None and not self._done.is_set():
            self._hurry(self, here)

    @property
    def done(self) -> bool:
        """Whether it has run, well or badly.

        >>> import gradwire as gw
        >>> with gw.init() as group:
        ...     work = group.stream().barrier()
        ...     work.wait()
        >>> work.done
        True
        """
        return self._done.is_set()

    @property
    def result(self) -> Any:
        """What the collective returned; waits for it.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.stream().all_reduce(3).result
        3
        """
        return self.wait()

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Call this with the work when it is done, on the thread that does it; at once if it is done already.

        It may call the group, and wait for other works; what is queued goes on when it has ended, or waits. What it
        raises is logged.

        >>> import gradwire as gw
        >>> with gw.init() as group:
        ...     work = group.stream().all_reduce(3)
        ...     work.wait()
        3
        >>> work.add_done_callback(print)
        <gradwire.Work all_reduce, done>
        """
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def _call(self, callback: Callable[[Work], object]) -> None:
        try:
            callback(self)
        except BaseException as error:  # SystemExit too: it would end the thread that others rely on
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise
            log.exception("a callback of %s failed", self.operation)

    def heed(self) -> BaseException | None:
        """The error, if there is one; from now on somebody knows of it."""
        self._heeded = True
        return self._error

    def run(self, body: Callable[[], Any], *, first_error: bool) -> bool:
        """Do the work; True if the group goes on. Of a chain of failures only the first is worth a line in the log."""
        goes_on = True
        try:
            self._result = body()
        except BaseException as error:
            self._error, self._heeded = error, not first_error
            goes_on = False
        if isinstance(self._result, Declined):
            self._error, self._heeded, self._result = self._result.error, False, None
        with self._lock:
            self._done.set()
        return goes_on

    def call_back(self) -> None:
        """Call the callbacks of a work that is done, each once."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def __repr__(self) -> str:
        state = "pending" if not self.done else "failed" if self._error is not None else "done"
        return f"<gradwire.Work {self.operation}, {state}>"

    def __del__(self) -> None:
        if not self._heeded and self._error is not None:
            log.error("%s failed and nobody waited for it: %s", self.operation, self._error)


def bounded(timeout: Any) -> float | None:
    """A timeout as threads accept it; `InvalidSize` for one that is none."""
    if timeout is None:
        return None
    number: Any = timeout if isinstance(timeout, numbers.Real) and not isinstance(timeout, bool) else 0
    if not number > 0:
        raise InvalidSize(f"a timeout of {timeout!r} s: it must be a number above 0")
    return float(min(number, threading.TIMEOUT_MAX))
