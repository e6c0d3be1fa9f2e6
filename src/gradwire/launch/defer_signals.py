"""Defers signals while threads and processes are started, so that no start is interrupted halfway."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """What Python does on signals that end programs, it does afterwards. Otherwise an exception could come between the
    start of something and the note that it was started, and nobody would end it."""
    if threading.current_thread() is not threading.main_thread():  # where no handler runs
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    with contextlib.ExitStack() as afterwards:
        afterwards.callback(lambda: _replay(came, handlers))
        for number, handler in handlers.items():
            afterwards.callback(signal.signal, number, handler)
            signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield


def _replay(came: list[tuple[int, FrameType | None]], handlers: Mapping[Any, Callable[..., object]]) -> None:
    """Each handler runs, even if one raises."""
    if came:
        (number, frame), *more = came
        try:
            handlers[number](number, frame)
        finally:
            _replay(more, handlers)
