"""Elastic runs whose ranks are threads: who leaves them, and who joins them half-way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import gradwire as gw
from gradwire.job.init import thread_job
from support.ranks import eventually, run_ranks

Old = TypeVar("Old")
New = TypeVar("New")


class Left(Exception):
    """This member is gone, as if its process had died."""


class Joiner(Generic[New]):
    """One more member, which joins some others when one of them calls for it, and then lives as it is told."""

    def __init__(self, live: Callable[[gw.Group], New], others: int = 2) -> None:
        self._live = live
        self._others = others
        self._threads = thread_job(30.0)
        self._called = threading.Event()
        self._results: list[New] = []

    def call(self) -> None:
        self._called.set()

    def let_in(self) -> None:
        """Returns when it asks to join: the next vote takes it in."""
        self.call()
        assert eventually(lambda: self._threads.news().joiners == 1)

    def run(self, old: Callable[[gw.Group], Old]) -> tuple[list[Old], New]:
        """What the others return, and what the newcomer does."""
        thread = threading.Thread(target=self._join, name="joiner", daemon=True)
        thread.start()
        results = run_ranks(self._threads.begin(self._others), old)
        thread.join(30)
        (joined,) = self._results
        return results, joined

    def _join(self) -> None:
        if self._called.wait(30):
            self._results.append(self._live(self._threads.join()))
