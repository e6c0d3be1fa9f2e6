"""Handles signals in commands that have started processes."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def signals_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that context managers end the processes, as after Ctrl-C."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
