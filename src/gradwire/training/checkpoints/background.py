"""Runs file operations of a checkpoint in a thread, one at a time, and keeps the reason if one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gradwire.errors import GradwireError

IsCancelled = Callable[[], bool]  # returns whether the operation should end early


class BackgroundJob:
    """One operation at a time, in a thread that ends with it."""

    def __init__(self) -> None:
        self.failure = ""  # why the last operation failed
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, operation: Callable[[IsCancelled], object], done: Callable[[], None] = lambda: None) -> None:
        """Run `operation` in a thread, and `done` after it if it succeeds. None may be running."""
        assert not self.running
        self.failure = ""
        self._cancelled = cancelled = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(operation, done, cancelled), name="gradwire-checkpoint", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # the limit of threads, which must not end the training
            self._thread, self.failure = None, f"no thread for it: {error}"

    def cancel(self) -> None:
        """Ask the running operation to end early. A failure of it is not recorded any more."""
        self._cancelled.set()
        self.failure = ""

    def wait(self, seconds: float) -> None:
        """Wait until no operation runs, but at most for some seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(
        self, operation: Callable[[IsCancelled], object], done: Callable[[], None], cancelled: threading.Event
    ) -> None:
        try:
            operation(cancelled.is_set)
            if not cancelled.is_set():
                done()
        except Exception as error:
            text = str(error) if isinstance(error, GradwireError) else f"{type(error).__name__}: {error}"
            if not cancelled.is_set():
                self.failure = text
