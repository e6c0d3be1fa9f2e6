"""Captures gradwire's log, so that tests can wait for a line."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator

import pytest


class CapturedLog(logging.Handler):
    """Collects the lines logged by all threads. `wait_for` waits until a line matches a pattern."""

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
    """Capture the lines that a logger and its children log at this level or above."""
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
    """Capture the warnings and errors that are logged during the test."""
    with capturing("gradwire", logging.WARNING) as captured:
        yield captured
