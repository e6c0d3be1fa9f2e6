"""Tests events: what subscribers receive, and that a failing subscriber does not break the call that it observes."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradwire as gw
from gradwire import events
from gradwire.events import Event


def test_subscribe_sees_begin_and_end_of_each_collective() -> None:
    seen: list[Event] = []
    unsubscribe = events.subscribe(seen.append)
    try:
        with gw.init() as group:
            group.all_reduce(np.ones(2))
            group.stream().barrier().wait()
    finally:
        unsubscribe()
    assert [(event.name, event.operation) for event in seen] == [
        ("begin", "all_reduce"),
        ("end", "all_reduce"),
        ("begin", "barrier"),
        ("end", "barrier"),
    ]
    assert seen[0].facts["rank"] == 0
    assert seen[1].facts["seconds"] >= 0
    assert seen[0].at <= seen[1].at


def test_subscribe_sees_collectives_and_not_messages() -> None:
    seen: list[str] = []
    one, two = gw.loopback_pair()
    unsubscribe = events.subscribe(lambda event: seen.append(event.operation))
    try:
        one.send(np.ones(2), 1)
        two.recv(np.zeros(2), 0)
        work = one.stream().all_reduce(1)
        assert two.all_reduce(2) == work.wait() == 3
    finally:
        unsubscribe()
        one.close()
        two.close()
    assert seen == ["all_reduce"] * 4


def test_subscribe_after_repeated_calls_sees_the_next_one_and_unsubscribe_none() -> None:
    """Repeated calls use the fast path, which emits no events."""
    seen: list[str] = []
    pair = gw.loopback_pair()
    with ThreadPoolExecutor(2) as threads, pair[0], pair[1]:

        def call() -> None:
            assert [x[0] for x in threads.map(lambda group: group.all_reduce(np.ones(1)), pair)] == [2.0, 2.0]

        for _ in range(3):
            call()
        unsubscribe = events.subscribe(lambda event: seen.append(event.name))
        call()
        assert sorted(seen) == ["begin", "begin", "end", "end"]
        unsubscribe()
        unsubscribe()
        call()
        assert len(seen) == 4


def test_subscribe_sees_a_failed_collective_with_its_error() -> None:
    seen: list[Event] = []
    one, two = gw.loopback_pair()
    one.abort("enough")
    unsubscribe = events.subscribe(seen.append)
    try:
        with pytest.raises(gw.Aborted) as caught:
            two.barrier()
    finally:
        unsubscribe()
        one.close()
        two.close()
    assert [event.name for event in seen] == ["begin", "fail"]
    assert seen[1].facts["error"] is caught.value


def test_subscriber_that_raises_is_logged_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def fails(event: Event) -> None:
        raise ValueError("out of ink")

    ends = [events.subscribe(fails), events.subscribe(lambda event: seen.append(event.name))]
    try:
        with gw.init() as group, caplog.at_level(logging.ERROR, "gradwire.events"):
            assert group.all_reduce(2) == 2
    finally:
        for end in ends:
            end()
    assert seen == ["begin", "end"]
    assert "out of ink" in caplog.text


def test_unsubscribe_of_a_callback_subscribed_twice_ends_one_subscription() -> None:
    seen: list[Event] = []
    ends = [events.subscribe(seen.append) for _ in range(2)]
    events.emit("begin", "barrier")
    ends[0]()
    ends[0]()
    events.emit("begin", "barrier")
    ends[1]()
    events.emit("begin", "barrier")
    assert len(seen) == 3
    assert not events.watched()
