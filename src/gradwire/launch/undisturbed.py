"""Starting threads and processes without being interrupted in the middle."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """What Python does on signals that end programs, it does afterwards. Otherwise an exception could come between the
    start of something and the note that it was started, and nobody would end it."""
    if threading.current_thread() is not threading.main_thread():  # where no handler runs
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for one, frame in came:
            handlers[signal.Signals(one)](one, frame)
