"""Fixtures for coordinators in the test's own process, and a log that can be waited for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from gradwire.membership.coordinator.service import Coordinator
from support.captured_log import CapturedLog, capturing
from support.membership_claims import SECRET


@pytest.fixture(name="captured")
def captured_fixture() -> Iterator[CapturedLog]:
    """Captures what the coordinator and its workers log during the test, at level INFO and above."""
    with capturing("gradwire.membership", logging.INFO) as captured:
        yield captured


@pytest.fixture(name="serve")
def serve_fixture() -> Iterator[Callable[..., Coordinator]]:
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
