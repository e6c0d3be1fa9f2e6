"""Tests of later generations over real sockets: losses, joins, leases, news and checkpoints."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from gradwire.errors import Refused
from gradwire.membership import Assembly, Member
from gradwire.membership.client.launcher_heartbeats import Heartbeats
from gradwire.membership.client.requests import end_checkpoint, heartbeat, register, start_checkpoint, unregister
from gradwire.membership.client.worker_lease import Lease
from gradwire.membership.coordinator.service import Coordinator
from gradwire.membership.types import News
from support.captured_log import CapturedLog
from support.membership_claims import SECRET

Serve = Callable[..., Coordinator]


def member(name: str) -> Member:
    return Member(name, None, "machine", "host", os.getpid(), "127.0.0.1:1")


def joining(coordinator: Coordinator, name: str, **options: Any) -> Future[Assembly]:
    """Register in a new thread and return the result as a future."""
    result: Future[Assembly] = Future()
    settings = {"size": None, "secret": SECRET, "job": None, "timeout": 30.0, **options}
    settings["run"] = coordinator.run if "generation" in options else b""

    def run() -> None:
        try:
            result.set_result(register(coordinator.address, member(name), **settings))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def assembled(coordinator: Coordinator, names: str, **options: Any) -> list[Assembly]:
    """Register all of these members, and check that each receives the same list."""
    found = [future.result(30) for future in [joining(coordinator, name, **options) for name in names]]
    assert len({assembly.members for assembly in found}) == 1
    assert [assembly.members[assembly.rank].id for assembly in found] == list(names)
    return found


def ids(assembly: Assembly) -> list[str]:
    return [one.id for one in assembly.members]


@pytest.fixture
def elastic(serve: Serve) -> Coordinator:
    """A job of two to four members that starts with three."""
    return serve(3, minimum=2, maximum=4)


def test_survivors_continue_without_the_lost_member(elastic: Coordinator) -> None:
    first = assembled(elastic, "abc")[0]
    lost = ids(first)[1]
    survivors = [name for name in ids(first) if name != lost]
    second = [future.result(30) for future in [joining(elastic, n, generation=1, lost=[lost]) for n in survivors]]
    assert [(found.generation, ids(found)) for found in second] == [(2, survivors)] * 2
    assert [found.rank for found in second] == [0, 1]
    assert {found.run for found in second} == {first.run}


def test_a_newcomer_is_announced_and_joins_with_the_next_generation(elastic: Coordinator) -> None:
    order = ids(assembled(elastic, "abc")[0])
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    newcomer = joining(elastic, "late", waiting=said.put)
    assert said.get(timeout=30).startswith("generation 1 is at work with 3 members; ")
    assert heartbeat(elastic.address, order, secret=SECRET) == News(1, 1, (), None)
    again = [joining(elastic, name, generation=1) for name in order]
    assert ids(newcomer.result(30)) == [*order, "late"]
    assert [future.result(30).rank for future in again] == [0, 1, 2]
    assert heartbeat(elastic.address, order, secret=SECRET) == News(2, 0, (), None)


def test_wait_below_the_minimum_reports_the_reason(elastic: Coordinator) -> None:
    order = ids(assembled(elastic, "abc")[0])
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    last = joining(elastic, order[0], generation=1, lost=order[1:], waiting=said.put)
    while said.get(timeout=30) != "1 of at least 2 members have registered":
        pass
    joined = joining(elastic, "new")
    assert ids(last.result(30)) == ids(joined.result(30)) == [order[0], "new"]


def test_worker_that_unregisters_is_not_waited_for(elastic: Coordinator) -> None:
    found = assembled(elastic, "abc")[0]
    order = ids(found)
    assert unregister(elastic.address, found.members[2], secret=SECRET)
    again = [joining(elastic, name, generation=1) for name in order[:2]]
    assert [ids(future.result(30)) for future in again] == [order[:2]] * 2


def test_generation_that_never_existed_is_refused(elastic: Coordinator) -> None:
    assembled(elastic, "abc")
    with pytest.raises(Refused, match=r"generation 7, and this coordinator .*knows generation 1"):
        joining(elastic, "d", generation=7).result(30)


def test_static_job_has_one_generation(serve: Serve) -> None:
    coordinator = serve(1)
    assembled(coordinator, "a")
    with pytest.raises(Refused, match="this job is static"):
        joining(coordinator, "a", generation=1).result(30)


# Leases.


def test_silent_member_is_evicted_and_the_news_names_it(serve: Serve, captured: CapturedLog) -> None:
    coordinator = serve(2, minimum=1, maximum=2, lease=0.5)
    order = ids(assembled(coordinator, "ab")[0])
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    coordinator_process = Lease(coordinator.address, order[0], secret=SECRET, on_news=told.put, interval=0.1)
    coordinator_process.start()
    try:
        while told.get(timeout=30).evicted != (order[1],):
            pass
    finally:
        coordinator_process.close()
    captured.wait_for(r"rank 1 .* sent no heartbeat during its lease")
    assert coordinator_process.news is not None
    assert coordinator_process.news.evicted == (order[1],)


@pytest.fixture
def launcher(elastic: Coordinator) -> Iterator[tuple[Heartbeats, queue.SimpleQueue[News]]]:
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    beats = Heartbeats(elastic.address, "abc", secret=SECRET, on_news=told.put)
    beats.start()
    yield beats, told
    beats.close()


Launcher = tuple[Heartbeats, "queue.SimpleQueue[News]"]


def test_launcher_reports_a_death_at_once(elastic: Coordinator, launcher: Launcher) -> None:
    assembled(elastic, "abc")
    beats, told = launcher
    while told.get(timeout=30) != News(1, 0, (), None):
        pass
    beats.gone(["b"])
    while (news := told.get(timeout=30)).evicted != ("b",):
        pass
    assert news.generation == 1
    again = [joining(elastic, name, generation=1) for name in "ac"]
    assert sorted(ids(again[0].result(30))) == ["a", "c"]


def test_launcher_sends_no_heartbeats_for_stopped_workers(serve: Serve) -> None:
    coordinator = serve(2, minimum=1, maximum=2, lease=0.5)
    assembled(coordinator, "ab")
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    beats = Heartbeats(coordinator.address, "ab", secret=SECRET, on_news=told.put, interval=0.05)
    beats.start()
    try:
        beats.frozen(["b"])
        while told.get(timeout=30).evicted != ("b",):
            pass
        beats.frozen([])
        while told.get(timeout=30).evicted != ():
            pass
    finally:
        beats.close()


def test_launcher_finds_its_coordinator_again(
    serve: Serve, elastic: Coordinator, launcher: Launcher, captured: CapturedLog
) -> None:
    _, told = launcher
    told.get(timeout=30)
    port = int(elastic.address.rpartition(":")[2])
    elastic.cut_off()
    captured.wait_for("heartbeats of this host do not reach the coordinator, trying again", timeout=30)
    while not told.empty():
        told.get()
    serve(3, port=port, minimum=2, maximum=4)
    assert told.get(timeout=30) == News(0, 0, (), None)
    captured.wait_for("answers the heartbeats of this host again", timeout=30)


def test_launcher_close_reports_dead_workers(elastic: Coordinator, launcher: Launcher) -> None:
    assembled(elastic, "abc")
    beats, told = launcher
    told.get(timeout=30)
    beats.gone(["a", "b"])
    beats.close()
    beats.close()
    assert sorted(heartbeat(elastic.address, ["c"], secret=SECRET).evicted) == ["a", "b"]


def test_launcher_close_does_not_wait_for_an_absent_coordinator() -> None:
    beats = Heartbeats("127.0.0.1:9", ["a"], secret=SECRET)
    beats.start()
    beats.gone(["a"])
    beats.close()


def test_launcher_without_a_stream_uses_single_calls(
    elastic: Coordinator, monkeypatch: pytest.MonkeyPatch, captured: CapturedLog
) -> None:
    monkeypatch.setattr("gradwire.membership.coordinator.servicer.MOST_STREAMS", 0)
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    assembled(elastic, "abc")
    beats = Heartbeats(elastic.address, "ab", secret=SECRET, on_news=told.put, interval=0.05)
    beats.start()
    try:
        assert [told.get(timeout=30) for _ in range(3)] == [News(1, 0, (), None)] * 3
        beats.gone(["b"])
        while told.get(timeout=30).evicted != ("b",):
            pass
    finally:
        beats.close()
    assert captured.count("1024|0 hosts already have streams") == 1


# Checkpoints.


def test_checkpoint_is_complete_when_all_live_members_have_reported(elastic: Coordinator) -> None:
    order = ids(assembled(elastic, "abc")[0])
    address = elastic.address
    begun = start_checkpoint(address, order[0], 5, secret=SECRET)
    assert (begun.epoch, sorted(begun.waiting_for), begun.complete) == (5, ["a", "b", "c"], False)
    assert heartbeat(address, order[1:], secret=SECRET).checkpoint == 5
    assert not end_checkpoint(address, order[0], 5, secret=SECRET).complete
    heartbeat(address, [], gone=[order[2]], secret=SECRET)
    assert end_checkpoint(address, order[1], 5, secret=SECRET).complete
    assert end_checkpoint(address, order[0], 5, secret=SECRET).complete
    assert heartbeat(address, order[:2], secret=SECRET).checkpoint is None


def test_invalid_checkpoint_is_refused(elastic: Coordinator) -> None:
    assembled(elastic, "abc")
    with pytest.raises(Refused, match=r"'unknown' is not a live member of generation 1"):
        start_checkpoint(elastic.address, "unknown", 1, secret=SECRET)
    with pytest.raises(Refused, match="no checkpoint of epoch 3"):
        end_checkpoint(elastic.address, "a", 3, secret=SECRET)
