"""Groups whose ranks are all in this process, over each transport; closed after the test. And a clock
to stop."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

import gradwire as gw
from support.crews import TRANSPORTS
from support.ranks import closing, eventually

SOON = 60.0  # seconds: what takes milliseconds hangs if it takes longer, however busy the machine is


@pytest.fixture(params=["tcp", "local"], name="pair")
def pair_fixture(request: pytest.FixtureRequest) -> Iterator[list[gw.Group]]:
    """Two ranks."""
    with closing(list(gw.loopback_pair()) if request.param == "tcp" else gw.local_group(2)) as groups:
        yield groups


@pytest.fixture(params=["tcp", "local", "tls"], name="pair")
def any_pair_fixture(request: pytest.FixtureRequest) -> Iterator[list[gw.Group]]:
    """Two ranks, also with TLS between them: for tests of what links have to bear."""
    with closing(TRANSPORTS[request.param](gw.Topology.single(2))) as groups:
        yield groups


@pytest.fixture(params=list(TRANSPORTS), name="pair")
def every_pair_fixture(request: pytest.FixtureRequest) -> Iterator[list[gw.Group]]:
    """Two ranks, over every transport."""
    with closing(TRANSPORTS[request.param](gw.Topology.single(2))) as groups:
        yield groups


@pytest.fixture(params=["tcp", "local"], name="groups")
def groups_fixture(request: pytest.FixtureRequest) -> Iterator[list[gw.Group]]:
    """Two ranks over TCP, or three in memory: enough for a majority."""
    with closing(list(gw.loopback_pair()) if request.param == "tcp" else gw.local_group(3)) as groups:
        yield groups


def end_progress(group: gw.Group) -> None:
    """Close a group and wait for its progress thread, which may be the last to hold a work."""
    before = _progress_threads()
    group.close()
    assert eventually(lambda: _progress_threads() < before)
    gc.collect()


def _progress_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "gradwire-progress"}


class Clock:
    """Stands for the module `time` where deadlines are kept: the real time, or a time that tests set.

    While it is stopped, no deadline passes because the machine is busy.
    """

    def __init__(self) -> None:
        self._stopped_at: float | None = None

    def monotonic(self) -> float:
        return time.monotonic() if self._stopped_at is None else self._stopped_at

    def stop(self) -> None:
        self._stopped_at = time.monotonic()

    def advance(self, seconds: float) -> None:
        """While it is stopped."""
        assert self._stopped_at is not None
        self._stopped_at += seconds

    def go_on(self) -> None:
        """With the real time."""
        self._stopped_at = None


@pytest.fixture(name="message_clock")
def message_clock_fixture(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the deadlines of point-to-point messages."""
    clock = Clock()
    monkeypatch.setattr("gradwire.group.point_to_point.time", clock)
    return clock
