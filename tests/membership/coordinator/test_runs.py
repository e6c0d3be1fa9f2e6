"""Tests of a coordinator restarted without its journal, with launchers and workers of the previous run."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import gradwire as gw
from gradwire.errors import Refused
from gradwire.identity import new_run, replaces
from gradwire.membership import Member
from gradwire.membership.client.launcher_heartbeats import Heartbeats, not_a_member
from gradwire.membership.client.requests import heartbeat, register
from gradwire.membership.client.worker_lease import Lease
from gradwire.membership.coordinator.service import Coordinator
from gradwire.membership.types import News
from support.captured_log import CapturedLog
from support.membership_claims import SECRET

Serve = Callable[..., Coordinator]


def restarted_without_journal(serve: Serve, first: Coordinator) -> Coordinator:
    host, _, port = first.address.rpartition(":")
    first.stop(grace=0.0)
    return serve(1, host, int(port), minimum=1, maximum=4)


def join(coordinator: Coordinator, name: str) -> bytes:
    member = Member(name, None, "machine", "host", 1, "127.0.0.1:1")
    return register(coordinator.address, member, size=None, secret=SECRET, job=None, timeout=30).run


def test_launcher_of_an_old_run_keeps_and_ends_no_lease_in_the_new_run(serve: Serve, captured: CapturedLog) -> None:
    first = serve(1, minimum=1, maximum=4)
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    beats = Heartbeats(first.address, ["a"], secret=SECRET, on_news=told.put, interval=0.05)
    beats.start()
    try:
        join(first, "a")
        while told.get(timeout=30).unknown:
            pass  # its id is not registered yet
        second = restarted_without_journal(serve, first)
        captured.wait_for("serves run [0-9a-f]{32}, and a is a member of run", timeout=30)
        assert join(second, "a") == second.run
        beats.gone(["a"])  # the process of the old run
        while not told.empty():
            told.get()
        told.get(timeout=30)
        assert told.get(timeout=30).evicted == ()
        assert heartbeat(second.address, ["a"], secret=SECRET, run=second.run).unknown == ()
    finally:
        beats.close()


def test_launcher_sends_heartbeats_for_a_newcomer_that_begins_the_next_run(serve: Serve) -> None:
    """The only member dies while a newcomer waits. The newcomer begins another run, and needs its lease there."""
    coordinator = serve(1, minimum=1, maximum=4, lease=0.5)
    before = join(coordinator, "a")
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    beats = Heartbeats(coordinator.address, ["x"], secret=SECRET, on_news=told.put, interval=0.05)
    beats.start()
    try:
        with ThreadPoolExecutor(1) as thread:
            run = thread.submit(join, coordinator, "x")
            while not told.get(timeout=30).joiners:
                heartbeat(coordinator.address, ["a"], secret=SECRET)
            heartbeat(coordinator.address, [], secret=SECRET, gone=["a"])
            assert replaces(run.result(timeout=30), before)
        for _ in range(20):  # longer than a lease
            assert told.get(timeout=30).evicted in ((), ("a",))
    finally:
        beats.close()


def test_lease_is_renewed_in_the_run_that_the_member_has_entered(serve: Serve) -> None:
    coordinator = serve(1, minimum=1, maximum=4)
    join(coordinator, "a")
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    lease = Lease(coordinator.address, "a", run=new_run(), secret=SECRET, on_news=told.put, interval=0.05)
    lease.start()
    try:
        assert told.get(timeout=30).unknown == ("a",)
        lease.enter(coordinator.run)
        while told.get(timeout=30).unknown:
            pass  # the reply to a heartbeat that was in progress
    finally:
        lease.close()


def test_worker_node_of_an_old_run_logs_the_reason_and_cannot_rejoin(
    serve: Serve, captured: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_TOKEN", SECRET.decode())
    first = serve(1, minimum=1, maximum=4)
    with gw.WorkerNode(first.address, "a", timeout=30) as node:
        second = restarted_without_journal(serve, first)
        captured.wait_for("serves run [0-9a-f]{32}, and a is a member of run", timeout=30)
        with pytest.raises(Refused, match=r"is a member of run .* and this coordinator serves run"):
            node.rejoin()
    assert heartbeat(second.address, [], secret=SECRET).generation == 0


def test_not_a_member_gives_the_reason_or_an_empty_text() -> None:
    news = News(1, 0, (), None, run=b"n" * 16)
    assert not_a_member(news, "a", b"n" * 16) == ""
    assert not_a_member(news, "a", b"") == ""
    assert "restarted without its journal" in not_a_member(news, "a", b"o" * 16)
    assert "does not know a" in not_a_member(replace(news, unknown=("a",)), "a", b"n" * 16)
