"""A log that tests can wait for."""

from __future__ import annotations

import logging
import re
import threading

SECRET = b"a secret of this test"


class Journal(logging.Handler):
    """What the coordinator and its workers have logged; `wait_for` waits until a line matches."""

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
