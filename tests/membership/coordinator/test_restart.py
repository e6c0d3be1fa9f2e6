"""Tests of coordinators that end in different ways and are restarted on their journal."""

from __future__ import annotations

import os
import queue
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from gradwire.errors import ConfigError, JournalError, NoConnection
from gradwire.membership import Assembly, Member
from gradwire.membership.client.launcher_heartbeats import Heartbeats
from gradwire.membership.client.requests import end_checkpoint, heartbeat, register, serving, start_checkpoint
from gradwire.membership.coordinator.journal import set_aside
from gradwire.membership.coordinator.service import Coordinator
from gradwire.membership.sealing import WorkerSeal
from gradwire.membership.types import News
from gradwire.membership.v1.gradwire_pb2 import HelloRequest
from support.captured_log import CapturedLog
from support.coordinator_command import TOKEN, Process
from support.coordinator_command import coordinate_fixture as coordinate_fixture

SECRET = TOKEN.encode()
Serve = Callable[..., Coordinator]


def member(name: str) -> Member:
    return Member(name, None, "machine", "host", os.getpid(), "127.0.0.1:1")


def joining(address: str, name: str, generation: int = 0, run_id: bytes = b"") -> Future[Assembly]:
    result: Future[Assembly] = Future()

    def run() -> None:
        try:
            found = register(
                address,
                member(name),
                size=None,
                secret=SECRET,
                job=None,
                timeout=60.0,
                generation=generation,
                run=run_id,
            )
            result.set_result(found)
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def assembled(address: str, names: str, generation: int = 0, run_id: bytes = b"") -> list[Assembly]:
    return [future.result(60) for future in [joining(address, name, generation, run_id) for name in names]]


def test_killed_coordinator_started_again_resumes(coordinate: Callable[..., Process], tmp_path: Path) -> None:
    options = ["--size", "3", "--min", "2", "--max", "4", "--journal", str(tmp_path / "journal")]
    first = coordinate("--listen", "127.0.0.1:0", *options)
    before = assembled(first.address, "abc")
    heartbeat(first.address, [], gone=["b"], secret=SECRET)
    start_checkpoint(first.address, "a", 7, secret=SECRET)
    end_checkpoint(first.address, "a", 7, secret=SECRET)
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    beats = Heartbeats(first.address, "ac", secret=SECRET, on_news=told.put)
    beats.start()
    try:
        told.get(timeout=30)
        waiting = joining(first.address, "late")
        while not heartbeat(first.address, "ac", secret=SECRET).joiners:
            pass
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
        while not told.empty():
            told.get()
        second = coordinate("--listen", first.address, *options)
        assert (second.job, second.address) == (first.job, first.address)
        assert second.line.endswith(f", resumes run {before[0].run.hex()} at generation 1 with 2 members)")
        news = told.get(timeout=30)
        assert (news.generation, news.evicted, news.checkpoint) == (1, ("b",), 7)
        while not heartbeat(second.address, "ac", secret=SECRET).joiners:  # waiting processes must reconnect first
            pass
    finally:
        beats.close()
    assert end_checkpoint(second.address, "c", 7, secret=SECRET).complete
    after = [*assembled(second.address, "ac", 1, before[0].run), waiting.result(60)]
    assert {found.generation for found in after} == {2}
    assert [one.id for one in after[0].members if one.id != "late"] == [
        one.id for one in before[0].members if one.id != "b"
    ]
    assert after[0].members[2].id == "late"
    assert {found.run for found in after} == {before[0].run}


def test_frozen_coordinator_is_found_again(coordinate: Callable[..., Process], captured: CapturedLog) -> None:
    process = coordinate("--size", "1", "--min", "1", "--max", "2")
    assembled(process.address, "a")
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    beats = Heartbeats(process.address, "a", secret=SECRET, on_news=told.put, interval=0.1)
    beats.start()
    try:
        told.get(timeout=30)
        process.process.send_signal(signal.SIGSTOP)
        captured.wait_for("heartbeats of this host do not reach the coordinator, trying again", timeout=30)
        process.process.send_signal(signal.SIGCONT)
        captured.wait_for("answers the heartbeats of this host again", timeout=30)
        while not told.empty():
            told.get()
        assert told.get(timeout=30).evicted == ()
    finally:
        process.process.send_signal(signal.SIGCONT)
        beats.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_coordinator_command_ends_cleanly_on_signals(
    number: signal.Signals, coordinate: Callable[..., Process]
) -> None:
    process = coordinate("--size", "1", "--job", "named", "--no-journal")
    assert process.line == f"coordinator of job named at {process.address} (no journal)"
    assembled(process.address, "a")
    assert process.end(number) == 0
    said = process.said()
    assert "has registered" in said
    assert "Traceback" not in said


def test_coordinator_command_with_invalid_options_names_the_reason(
    coordinate: Callable[..., Process], tmp_path: Path
) -> None:
    beyond = coordinate("--size", "1", "--listen", "0.0.0.0:0")
    assert beyond.process.wait(30) == 1
    assert beyond.said().startswith("Error: other machines could reach a coordinator at 0.0.0.0:0")
    half = coordinate("--size", "1", "--tls-ca", str(tmp_path / "ca.pem"))
    assert half.process.wait(30) == 1
    assert "GRADWIRE_TLS_CERT and GRADWIRE_TLS_KEY must be set too" in half.said()
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"not a journal")
    refused = coordinate("--size", "1", "--journal", str(damaged))
    assert refused.process.wait(30) == 1
    assert "is not a coordinator's journal" in refused.said()
    assert damaged.read_bytes() == b"not a journal"


def test_journal_of_another_job_is_refused(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "journal"
    first = serve(2, minimum=1, journal=file, job="mine")
    with pytest.raises(JournalError, match="another coordinator uses it"):
        serve(2, minimum=1, journal=file)
    first.stop()
    with pytest.raises(
        ConfigError, match=r"belongs to a job whose initial size is 2, not 3: use the same sizes as before"
    ):
        serve(3, minimum=1, journal=file)
    with pytest.raises(ConfigError, match="belongs to job mine, and this is job other"):
        serve(2, minimum=1, journal=file, job="other")
    assert serve(2, minimum=1, journal=file).job == "mine"


def test_register_again_sends_hello_only_to_a_restarted_coordinator(serve: Serve, tmp_path: Path) -> None:
    class Counting(WorkerSeal):
        hellos = 0

        def hello(self) -> HelloRequest:
            self.hellos += 1
            return super().hello()

    file, seal = tmp_path / "journal", Counting(SECRET)
    member = Member("a", None, "host", "host", 1, "127.0.0.1:1")

    def next_after(address: str, generation: int) -> int:
        assembly = register(
            address,
            member,
            size=None,
            secret=SECRET,
            job=None,
            timeout=30.0,
            generation=generation,
            run=coordinator.run if generation else b"",
            seal=seal,
        )
        return assembly.generation

    coordinator = serve(1, minimum=1, journal=file)
    assert [next_after(coordinator.address, before) for before in range(3)] == [1, 2, 3]
    assert seal.hellos == 1
    port = int(coordinator.address.rpartition(":")[2])
    coordinator.stop()
    again = serve(1, minimum=1, journal=file, port=port)
    assert [next_after(again.address, before) for before in (3, 4)] == [4, 5]
    assert seal.hellos == 2


def test_coordinator_with_a_full_journal_stops_answering_and_loses_nothing(
    serve: Serve, tmp_path: Path, captured: CapturedLog, databases: list[sqlite3.Connection]
) -> None:
    file = tmp_path / "journal"
    failed: queue.SimpleQueue[JournalError] = queue.SimpleQueue()
    coordinator = serve(2, minimum=1, maximum=2, journal=file, failed=failed.put)
    assembled(coordinator.address, "ab")
    (pages,) = databases[-1].execute("PRAGMA page_count").fetchone()
    databases[-1].execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(NoConnection, match="its disk is full: free space"):
        for number in range(1000):
            start_checkpoint(coordinator.address, "a", number, secret=SECRET, timeout=5.0)
            end_checkpoint(coordinator.address, "a", number, secret=SECRET, timeout=5.0)
            last = end_checkpoint(coordinator.address, "b", number, secret=SECRET, timeout=5.0)
    assert "its disk is full" in str(failed.get(timeout=60))
    captured.wait_for("the coordinator answers no more calls")
    assert not serving(coordinator.address, secret=SECRET)
    port = int(coordinator.address.rpartition(":")[2])
    coordinator.stop()
    again = serve(2, minimum=1, maximum=2, journal=file, port=port)
    assert heartbeat(again.address, "ab", secret=SECRET).generation == 1
    assert end_checkpoint(again.address, "a", last.epoch, secret=SECRET).complete, "what was answered is journaled"


def test_run_id_after_set_aside_is_greater_although_the_clock_was_set_back(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, earlier = tmp_path / "journal", tmp_path / "earlier"
    earlier.mkdir()
    first = serve(1, minimum=1, journal=path)
    first.stop()
    set_aside(path, earlier)
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    second = serve(1, minimum=1, journal=path)
    assert second.run > first.run
    second.stop()
    assert serve(1, minimum=1, journal=path).run == second.run, "the same run must continue"
