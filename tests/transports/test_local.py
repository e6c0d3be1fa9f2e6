"""In-process ranks: the difference between a dead rank and a silent one."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from gradwire.transports import local
from gradwire.transports.base import Link
from gradwire.transports.local import Hub


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(local, "time", clock)
    return clock


def touch_by_a_thread_that_ends(hub: Hub, rank: int) -> None:
    thread = threading.Thread(target=hub.transports[rank].touch)
    thread.start()
    thread.join()


def test_gone_rank_that_never_called_is_false(clock: Clock) -> None:
    hub = Hub(2)
    clock.now += 1000
    assert not hub.transports[0].gone(1)


def test_gone_rank_without_living_threads_is_true_after_half_a_second(clock: Clock) -> None:
    hub = Hub(2)
    touch_by_a_thread_that_ends(hub, 1)
    assert not hub.transports[0].gone(1), "another thread may take over soon"
    clock.now += local.DEAD_AFTER * 0.9
    assert not hub.transports[0].gone(1)
    clock.now += local.DEAD_AFTER * 0.2
    assert hub.transports[0].gone(1)
    assert not hub.transports[1].gone(0)


def test_gone_rank_with_a_living_thread_is_false(clock: Clock) -> None:
    hub = Hub(2)
    hub.transports[1].touch()  # this thread
    touch_by_a_thread_that_ends(hub, 1)
    for _ in range(3):
        clock.now += 10
        assert not hub.transports[0].gone(1)


def test_gone_rank_taken_over_by_another_thread_in_time_is_false(clock: Clock) -> None:
    hub = Hub(2)
    touch_by_a_thread_that_ends(hub, 1)
    assert not hub.transports[0].gone(1)
    clock.now += local.DEAD_AFTER * 0.9
    hub.transports[1].touch()
    clock.now += 10
    assert not hub.transports[0].gone(1)


def test_closed_local_links_are_released() -> None:
    hub = Hub(2)
    links: list[weakref.ref[Link]] = []
    for channel in range(5, 100):
        link = hub.transports[1].dial(0, channel, 0.0)
        other = hub.transports[0].accept(1, channel, 0.0)
        link.close()
        other.close()
        links += [weakref.ref(link), weakref.ref(other)]
    del link, other
    gc.collect()
    assert [link for link in links if link() is not None] == []
