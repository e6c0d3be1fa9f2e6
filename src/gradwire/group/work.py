"""`Work`: the handle of an operation that runs while the program continues."""

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
    """The handle of an operation that runs while the program continues: queued on a `Stream`, an `isend` or an `irecv`.

    `wait` returns the result of the operation, or raises its error. If a work fails and the program never waits for
    it, the error is logged when the handle is garbage-collected.

    Attributes:
        operation: The name of the operation, for example "all_reduce".

    >>> import gradwire as gw
    >>> with gw.init() as group:
    ...     work = group.stream().all_reduce(2.5)
    ...     work.wait()
    2.5
    """

    def __init__(self, operation: str, expedite: Callable[[Work, bool], None] | None = None) -> None:
        """Streams make works. `expedite(work, on_this_thread)` is called when a thread waits for this work."""
        self.operation = operation
        self._expedite = expedite
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Work], object]] = []
        self._result: Any = None
        self._error: BaseException | None = None
        self._error_seen = True

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the work is done, and return the result of the operation.

        Args:
            timeout: Seconds to wait. For an operation of a stream, None means no limit, but the operation still ends at
                its own timeout. For `isend` and `irecv`, None means the group's timeout.

        Raises:
            Timeout: The work was not done in time. It keeps running, and the group stays usable.
            GradwireError: The error of the operation, if it failed.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().all_reduce(np.ones(2)).wait(timeout=60)
        array([1., 1.])
        """
        seconds = bounded(timeout)
        self.expedite(on_this_thread=seconds is None)
        if not self._done.wait(seconds):
            raise Timeout(
                f"{self.operation} was not done in {seconds:g} s; it keeps running",
                operation=self.operation,
                seconds=seconds,
            )
        if self._error is not None:
            self._error_seen = True
            raise self._error
        return self._result

    def await_end(self, seconds: float) -> bool:
        """Wait until the work is done, whatever its outcome; False if it is not. For gradwire's own packages."""
        self.expedite(on_this_thread=False)
        return self._done.wait(seconds)

    def expedite(self, *, on_this_thread: bool) -> None:
        """Run the work soon, because the calling thread waits for it. For gradwire's own packages.

        With `on_this_thread` the calling thread waits until the work is done, so it may run the work itself.
        """
        if self._expedite is not None and not self._done.is_set():
            self._expedite(self, on_this_thread)

    @property
    def done(self) -> bool:
        """Whether the work has ended, with a result or with an error.

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
        """The result of the operation. Reading it waits for the work, like `wait()`, and raises the same errors.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.stream().all_reduce(3).result
        3
        """
        return self.wait()

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Call a function when the work is done. If it is done already, the function is called at once.

        The function runs on the thread that ran the work. It may call the group and wait for other works. Queued works
        continue when it returns, or when it waits itself. If it raises an exception, the exception is logged.

        Args:
            callback: A function that takes the work as its only argument.

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
        except BaseException as error:  # SystemExit too: it would end the progress thread, which other works need
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise
            log.exception("a done-callback of %s raised an exception", self.operation)

    def acknowledge_error(self) -> BaseException | None:
        """Return the error, or None, and do not log it later as unseen. For gradwire's own packages."""
        self._error_seen = True
        return self._error

    def run(self, body: Callable[[], Any], *, first_error: bool) -> bool:
        """Run the work; False if the group cannot be used any more.

        `first_error`: no earlier work of the group failed. Only the first failure is logged if no thread waits for it.
        """
        usable = True
        try:
            self._result = body()
        except BaseException as error:
            self._error, self._error_seen = error, not first_error
            usable = False
        if isinstance(self._result, Declined):
            self._error, self._error_seen, self._result = self._result.error, False, None
        with self._lock:
            self._done.set()
        return usable

    def call_back(self) -> None:
        """Call each callback of a work that is done, once."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def __repr__(self) -> str:
        state = "pending" if not self.done else "failed" if self._error is not None else "done"
        return f"<gradwire.Work {self.operation}, {state}>"

    def __del__(self) -> None:
        if not self._error_seen and self._error is not None:
            log.error("%s failed, and the program never waited for its result: %s", self.operation, self._error)


def bounded(timeout: Any) -> float | None:
    """Return a timeout in the range that threads accept; raise `InvalidSize` if it is not a number above 0."""
    if timeout is None:
        return None
    number: Any = timeout if isinstance(timeout, numbers.Real) and not isinstance(timeout, bool) else 0
    if not number > 0:
        raise InvalidSize(f"timeout is {timeout!r}: it must be a number of seconds above 0")
    return float(min(number, threading.TIMEOUT_MAX))
