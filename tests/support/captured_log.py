"""Lines of gradwire's log that a test can wait for."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator

import pytest


class CapturedLog(logging.Handler):
    """What has been logged, by any thread; `wait_for` waits until a line matches."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.lines.append(record.getMessage())
            self._changed.notify_all()

    def wait_for(self, pattern: str, times: int = 1, timeout: float = 60.0) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.count(pattern) >= times, timeout):
                raise AssertionError(f"{pattern!r} was not logged {times} times: {self.lines}")

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in self.lines)


@contextlib.contextmanager
def capturing(name: str, level: int) -> Iterator[CapturedLog]:
    """What a logger and those below it log, from this level on."""
    logger, captured = logging.getLogger(name), CapturedLog()
    captured.setLevel(level)
    before = logger.level
    logger.addHandler(captured)
    if logger.getEffectiveLevel() > level:
        logger.setLevel(level)
    try:
        yield captured
    finally:
        logger.removeHandler(captured)
        logger.setLevel(before)


@pytest.fixture(name="captured")
def captured_fixture() -> Iterator[CapturedLog]:
    """What is logged during the test, from "warning" on."""
    with capturing("gradwire", logging.WARNING) as captured:
        yield captured
