"""The starting line: a barrier in shared memory that belongs to no engine, so that nobody's barrier colours a start."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_CACHE_LINE = 64


class StartingLine:
    """A counter for each rank. It yields while it waits: there may be more ranks than cores."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size * _CACHE_LINE)
        self._counters = memoryview(memory).cast("q")
        self._own = rank * _CACHE_LINE // 8
        self._others = [other * _CACHE_LINE // 8 for other in range(size) if other != rank]
        self._round = 0

    @staticmethod
    def draw(path: Path, size: int) -> None:
        path.write_bytes(bytes(size * _CACHE_LINE))

    def wait(self) -> None:
        """Until all ranks are here. Whoever started the ranks ends them if one never comes."""
        self._round = number = self._round + 1
        counters = self._counters
        counters[self._own] = number
        for other in self._others:
            while counters[other] < number:
                os.sched_yield()
