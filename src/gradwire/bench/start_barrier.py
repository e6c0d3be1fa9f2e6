"""Provide the barrier before every iteration: counters in shared memory, the same for all engines.

An engine's own barrier would release the ranks in an engine-specific order, which would influence when its calls begin.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_CACHE_LINE = 64


class StartBarrier:
    """A barrier with one counter per rank. A waiting rank yields its core, because ranks may outnumber the cores."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size * _CACHE_LINE)
        self._counters = memoryview(memory).cast("q")
        self._own = rank * _CACHE_LINE // 8
        self._others = [other * _CACHE_LINE // 8 for other in range(size) if other != rank]
        self._round = 0

    @staticmethod
    def create(path: Path, size: int) -> None:
        """Create the file that the ranks map."""
        path.write_bytes(bytes(size * _CACHE_LINE))

    def wait(self) -> None:
        """Wait until all ranks have called this. There is no timeout: the benchmark ends the ranks if one fails."""
        self._round = number = self._round + 1
        counters = self._counters
        counters[self._own] = number
        for other in self._others:
            while counters[other] < number:
                os.sched_yield()
