"""Writes rate-limited log lines about refused callers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

PER_MINUTE = 60


class RefusalLog:
    """Writes at most `PER_MINUTE` warnings per minute to a logger. A last line says that further ones are dropped."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._lock = threading.Lock()
        self._minute_start, self._count = 0.0, 0

    def log(self, message: str, *args: object) -> None:
        now = self._clock()
        with self._lock:
            if now - self._minute_start > 60:
                self._minute_start, self._count = now, 0
            self._count += 1
            count = self._count
        if count <= PER_MINUTE:
            self._logger.warning(message, *args)
        elif count == PER_MINUTE + 1:
            self._logger.warning("further refusals within this minute are not logged")
