"""Fixtures for a rendezvous over real sockets: coordinators, their databases, and a log that can be waited for."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradwire.membership.coordinator.service import Coordinator
from support.captured_log import CapturedLog, capturing
from support.membership_claims import SECRET


@pytest.fixture
def captured() -> Iterator[CapturedLog]:
    """Captures what the coordinator and its workers log during the test, at level INFO and above."""
    with capturing("gradwire.membership", logging.INFO) as captured:
        yield captured


@pytest.fixture
def databases(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Collects the SQLite connections opened during the test, so that it can limit them. A journal's is the last."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def observed(*arguments: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", observed)
    return opened


@pytest.fixture
def serve() -> Iterator[Callable[..., Coordinator]]:
    """Starts coordinators on free loopback ports, and stops them after the test."""
    started: list[Coordinator] = []

    def start(size: int, host: str = "127.0.0.1", port: int = 0, **options: object) -> Coordinator:
        coordinator = Coordinator(host, port, size=size, **{"secret": SECRET, **options})  # type: ignore[arg-type]
        coordinator.start()
        started.append(coordinator)
        return coordinator

    yield start
    for coordinator in started:
        coordinator.stop(grace=0.0)
