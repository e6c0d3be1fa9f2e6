"""Elastic runs whose ranks are threads, with members that leave and members that join."""

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
    """A member leaves, as if its process had died."""


class Joiner(Generic[New]):
    """One more member. It joins when another member calls `call` or `let_in`, and then runs `live`."""

    def __init__(self, live: Callable[[gw.Group], New], others: int = 2) -> None:
        self._live = live
        self._others = others
        self._threads = thread_job(30.0)
        self._called = threading.Event()
        self._results: list[New] = []

    def call(self) -> None:
        self._called.set()

    def let_in(self) -> None:
        """Return when the new member has asked to join, so that the next vote admits it."""
        self.call()
        assert eventually(lambda: self._threads.news().joiners == 1)

    def run(self, old: Callable[[gw.Group], Old]) -> tuple[list[Old], New]:
        """Run `old` on the first members. Return their results and the result of the new member."""
        thread = threading.Thread(target=self._join, name="joiner", daemon=True)
        thread.start()
        results = run_ranks(self._threads.begin(self._others), old)
        thread.join(30)
        (joined,) = self._results
        return results, joined

    def _join(self) -> None:
        if self._called.wait(30):
            self._results.append(self._live(self._threads.join()))
