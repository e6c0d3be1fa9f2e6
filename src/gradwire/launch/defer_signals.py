"""Defers signals while threads and processes are started, so that no start is interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Run the handlers of signals that end programs after the block.

    A handler that raises in the block could separate the start of a process from the record of it, and the process
    would never be ended.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread only
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    with contextlib.ExitStack() as afterwards:
        afterwards.callback(lambda: _replay(received, handlers))
        for number, handler in handlers.items():
            afterwards.callback(signal.signal, number, handler)
            signal.signal(number, lambda number, frame: received.append((number, frame)))
        yield


def _replay(received: list[tuple[int, FrameType | None]], handlers: Mapping[Any, Callable[..., object]]) -> None:
    """Run the handlers of the received signals; all of them, even if one raises."""
    if received:
        (number, frame), *more = received
        try:
            handlers[number](number, frame)
        finally:
            _replay(more, handlers)
