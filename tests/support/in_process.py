"""Fixtures: groups whose ranks are all in this process, closed after the test, and a clock that tests can stop."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

import gradwire as gw
from support.crews import TRANSPORTS
from support.ranks import closing, eventually

SOON = 60.0  # seconds: a bound for something that takes milliseconds, on a busy machine


@pytest.fixture(params=["tcp", "local"], name="pair")
def pair_fixture(request: pytest.FixtureRequest) -> Iterator[list[gw.Group]]:
    """Return two ranks."""
    with closing(list(gw.loopback_pair()) if request.param == "tcp" else gw.local_group(2)) as groups:
        yield groups


@pytest.fixture(params=["tcp", "local", "tls"], name="pair")
def any_pair_fixture(request: pytest.FixtureRequest) -> Iterator[list[gw.Group]]:
    """Return two ranks, over TCP, in memory, or over TLS: for tests that stress links."""
    with closing(TRANSPORTS[request.param](gw.Topology.single(2))) as groups:
        yield groups


@pytest.fixture(params=list(TRANSPORTS), name="pair")
def every_pair_fixture(request: pytest.FixtureRequest) -> Iterator[list[gw.Group]]:
    """Return two ranks, over every transport."""
    with closing(TRANSPORTS[request.param](gw.Topology.single(2))) as groups:
        yield groups


@pytest.fixture(params=["tcp", "local"], name="groups")
def groups_fixture(request: pytest.FixtureRequest) -> Iterator[list[gw.Group]]:
    """Return two ranks over TCP, or three in memory, which is enough for a majority."""
    with closing(list(gw.loopback_pair()) if request.param == "tcp" else gw.local_group(3)) as groups:
        yield groups


def end_progress(group: gw.Group) -> None:
    """Close a group and wait for its progress thread, which may have the last reference to a work."""
    before = _progress_threads()
    group.close()
    assert eventually(lambda: _progress_threads() < before)
    gc.collect()


def _progress_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "gradwire-progress"}


class Clock:
    """Replaces the module `time` where deadlines are computed. It shows the real time, or a time that tests set.

    While it is stopped, a busy machine cannot make a deadline pass.
    """

    def __init__(self) -> None:
        self._stopped_at: float | None = None

    def monotonic(self) -> float:
        return time.monotonic() if self._stopped_at is None else self._stopped_at

    def stop(self) -> None:
        self._stopped_at = time.monotonic()

    def advance(self, seconds: float) -> None:
        """Advance the time. The clock must be stopped."""
        assert self._stopped_at is not None
        self._stopped_at += seconds

    def resume(self) -> None:
        """Show the real time again."""
        self._stopped_at = None


@pytest.fixture(name="message_clock")
def message_clock_fixture(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock for the deadlines of point-to-point messages."""
    clock = Clock()
    for module in ("message_endpoint", "sending", "receiving", "point_to_point", "message_works"):
        monkeypatch.setattr(f"gradwire.group.{module}.time", clock)
    return clock
