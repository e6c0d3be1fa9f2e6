"""Tests of the rendezvous over real sockets, with workers as threads and as processes, and of its errors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from gradwire.errors import ConfigError, InvalidSize, NoConnection, Refused, Timeout, TransportError
from gradwire.membership import Assembly, Member
from gradwire.membership.client import requests, session
from gradwire.membership.client.requests import register, unregister
from gradwire.membership.coordinator import servicer
from gradwire.membership.coordinator.service import Coordinator
from gradwire.membership.v1 import gradwire_pb2 as pb
from support.captured_log import CapturedLog
from support.membership_claims import SECRET

Serve = Callable[..., Coordinator]
Spawn = Callable[[Coordinator, int, int], subprocess.Popen[bytes]]

WORKER = """
import os, sys
from gradwire.membership import Member
from gradwire.membership.client.requests import register
address, rank, size, secret = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode()
me = Member(f"process-{os.getpid()}", rank, "machine", "host", os.getpid(), f"127.0.0.1:{rank + 1}")
found = register(address, me, size=size, secret=secret, job=None, timeout=300)
assert found.rank == rank and len(found.members) == size and found.members[rank] == me
"""


def member(rank: int | None, name: str | None = None) -> Member:
    return Member(name or f"worker-{rank}", rank, "machine", "host", os.getpid(), f"127.0.0.1:{1 + (rank or 0)}")


def join(coordinator: Coordinator | str, who: Member, size: int, **options: Any) -> Assembly:
    address = coordinator if isinstance(coordinator, str) else coordinator.address
    return register(address, who, size=size, **{"secret": SECRET, "job": None, "timeout": 20.0, **options})


def joining(coordinator: Coordinator | str, who: Member, size: int, **options: Any) -> Future[Assembly]:
    """Call `join` in a new thread and return its result as a future."""
    result: Future[Assembly] = Future()

    def run() -> None:
        try:
            result.set_result(join(coordinator, who, size, **options))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts workers as processes, and kills those that still run after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(coordinator: Coordinator, rank: int, size: int) -> subprocess.Popen[bytes]:
        arguments = [coordinator.address, str(rank), str(size), SECRET.decode()]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        started.append(subprocess.Popen([sys.executable, "-c", WORKER, *arguments], env=environ))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_register_returns_all_members_to_each(serve: Serve) -> None:
    coordinator = serve(3, job="named")
    others = [joining(coordinator, member(rank), 3) for rank in (2, 0)]
    found = join(coordinator, member(1), 3, job="named")
    assert found.members == tuple(member(rank) for rank in range(3))
    assert (found.job, found.generation, found.rank, len(found.run)) == ("named", 1, 1, 16)
    assert [other.result(60).rank for other in others] == [2, 0]
    assert {other.result().run for other in others} == {found.run}


def test_register_in_a_job_of_one_returns_at_once(serve: Serve) -> None:
    coordinator = serve(1)
    found = join(coordinator, member(None, "alone"), 1)
    assert found.members == (member(0, "alone"),)
    assert found.job == coordinator.job


def test_two_jobs_stay_separate(serve: Serve) -> None:
    one, other = (join(serve(1), member(0), 1) for _ in range(2))
    assert one.run != other.run
    assert one.job != other.job


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_coordinator_address_is_usable_by_workers(host: str, serve: Serve) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    coordinator = serve(1, host=host)
    assert coordinator.address.startswith("[::1]:" if host == "::1" else f"{host}:")
    assert join(coordinator, member(0), 1).rank == 0


def test_register_many_at_once(serve: Serve) -> None:
    size = 40
    coordinator = serve(size)
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda rank: join(coordinator, member(rank), size), range(size)))
    assert [assembly.rank for assembly in found] == list(range(size))


def test_register_more_workers_than_delayed_calls(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MOST_DELAYED", 2)
    coordinator = serve(12)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda rank: join(coordinator, member(rank), 12), range(12)))
    assert [assembly.rank for assembly in found] == list(range(12))


@pytest.mark.parametrize("size", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_register_by_processes(size: int, serve: Serve, spawn: Spawn) -> None:
    coordinator = serve(size)
    processes = [spawn(coordinator, rank, size) for rank in range(size)]
    assert [process.wait(timeout=300) for process in processes] == [0] * size


def test_coordinator_stopped_at_once_has_answered_all_members(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may stop its coordinator as soon as its own registration has returned."""
    monkeypatch.setattr(servicer, "MOST_DELAYED", 3)
    coordinator = serve(8)
    others = [joining(coordinator, member(rank), 8) for rank in range(1, 8)]
    join(coordinator, member(0), 8)
    coordinator.stop()
    assert [other.result(60).rank for other in others] == list(range(1, 8))


def test_coordinator_stop_leaves_no_thread(serve: Serve) -> None:
    before = set(threading.enumerate())
    coordinator = serve(2)
    other = joining(coordinator, member(1), 2)
    join(coordinator, member(0), 2)
    other.result(60)
    coordinator.stop()
    deadline = time.monotonic() + 60

    def left() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one not in before and not one.name.endswith("(run)")]

    while left() and time.monotonic() < deadline:  # gRPC's threads end some time after the server
        left()[0].join(0.1)
    assert left() == []


def test_register_before_the_coordinator_starts_waits_for_it(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Semaphore(0)

    def pauses() -> Iterator[float]:  # called after each try
        while True:
            tried.release()
            yield 0.01

    monkeypatch.setattr(session, "pauses_between_tries", pauses)
    port = _free_port()
    early = joining(f"127.0.0.1:{port}", member(0), 1)
    for _ in range(3):
        assert tried.acquire(timeout=60)
    serve(1, port=port)
    assert early.result(60).rank == 0


def test_register_finds_a_coordinator_that_was_restarted(serve: Serve, captured: CapturedLog) -> None:
    first = serve(2)
    patient = joining(first, member(1), 2)
    captured.wait_for("rank 1 .* has registered")
    port = int(first.address.rpartition(":")[2])
    first.cut_off()
    second = serve(2, port=port)
    captured.wait_for("rank 1 .* has registered", times=2)
    assert join(second, member(0), 2).rank == 0
    assert patient.result(60).rank == 1


# Refusals, and the messages on both sides.


@pytest.mark.parametrize(
    ("who", "size", "options", "said"),
    [
        (member(2), 2, {}, "rank 2 is out of range: a job of size 2 has ranks 0 to 1"),
        (member(-1), 2, {}, "rank -1 is out of range"),
        (member(1), 3, {}, "expects a job of 3 ranks, and this one has 2"),
        (member(1), 2, {"job": "other"}, "belongs to job 'other', and this is job 'mine'"),
        (member(1, ""), 2, {}, None),
        (member(0, "double"), 2, {}, r"rank 0 is taken by rank 0 \(host host, pid"),
        (member(1, "worker-0"), 2, {}, "the id 'worker-0' is taken by rank 0"),
        (member(1), 2, {"secret": b"another secret!!"}, "does not hold this job's secret"),
    ],
)
def test_refusal_reaches_both_sides_and_harms_no_other_member(
    who: Member, size: int, options: dict[str, Any], said: str | None, serve: Serve, captured: CapturedLog
) -> None:
    if said is None:
        who, said = Member("", 1, "machine", "host", 1, "127.0.0.1:1"), "id must not be empty"
    coordinator = serve(2, job="mine")
    first = joining(coordinator, member(0), 2)
    captured.wait_for("rank 0 .* has registered")
    with pytest.raises(Refused, match=said):
        join(coordinator, who, size, **options)
    captured.wait_for(f"refused .*127\\.0\\.0\\.1:[0-9]+: .*{said}")
    join(coordinator, member(1), 2)
    assert first.result(60).members == (member(0), member(1))


def test_register_for_a_rank_of_a_running_job_is_refused(serve: Serve) -> None:
    coordinator = serve(1)
    join(coordinator, member(0), 1)
    with pytest.raises(Refused, match="rank 0 is taken by rank 0"):
        join(coordinator, member(0, "late"), 1)


def test_register_with_size_zero_raises(serve: Serve) -> None:
    with pytest.raises(InvalidSize, match="not 0"):
        serve(0)
    with pytest.raises(InvalidSize, match="not 0"):
        join("127.0.0.1:1", member(0), 0)


def test_register_timeout_names_the_missing_ranks_and_frees_the_place(serve: Serve) -> None:
    coordinator = serve(4)
    start = time.monotonic()
    with pytest.raises(Timeout, match=r"within 1 s: missing ranks 0, 2, 3 of 4") as caught:
        join(coordinator, member(1), 4, timeout=1.0)
    assert time.monotonic() - start >= 1.0
    assert (caught.value.seconds, caught.value.operation) == (1.0, "rendezvous")
    with pytest.raises(Timeout, match="ranks 0, 2, 3"):
        join(coordinator, member(1, "restarted"), 4, timeout=1.0)


def test_killed_worker_frees_its_place_at_once(serve: Serve, spawn: Spawn, captured: CapturedLog) -> None:
    coordinator = serve(2)
    victim = spawn(coordinator, 1, 2)
    captured.wait_for("rank 1 .* has registered", timeout=60)
    victim.kill()
    assert victim.wait(60) == -signal.SIGKILL
    captured.wait_for("rank 1 .* disconnected while it waited")
    again = joining(coordinator, member(1, "restarted"), 2)
    assert join(coordinator, member(0), 2).members[1].id == "restarted"
    assert again.result(60).rank == 1


def test_coordinator_that_stops_refuses_waiting_members(serve: Serve, captured: CapturedLog) -> None:
    coordinator = serve(2)
    waiting = joining(coordinator, member(1), 2)
    captured.wait_for("rank 1 .* has registered")
    coordinator.stop()
    with pytest.raises(Refused, match="the coordinator was stopped before all ranks had registered"):
        waiting.result(60)
    coordinator.stop()


def test_register_that_waits_long_is_logged(
    serve: Serve, captured: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "HOLD_SECONDS", 0.05)
    coordinator = serve(3)
    waiting = joining(coordinator, member(1), 3, log_after=0.0)
    captured.wait_for("s at the rendezvous 127.0.0.1:.*: missing ranks 0, 2 of 3")
    coordinator.stop()
    with pytest.raises(Refused):
        waiting.result(60)


@pytest.mark.parametrize(
    ("rank", "missing", "count", "lowest"),
    [
        (0, [1, 2], 2, True),
        (1, [0, 2], 2, True),
        (2, [0], 1, False),  # rank 1 waits too
        (None, [1, 2], 2, True),
        (2, [], 0, True),  # the reply does not list ranks
        (40, [*range(16)], 30, True),  # the list is cut off: ranks from 16 to 39 may be missing as well
        (40, [*range(1, 17)], 30, False),  # rank 0 waits too
    ],
)
def test_register_that_waits_long_is_logged_by_the_lowest_rank(
    rank: int | None, missing: list[int], count: int, lowest: bool
) -> None:
    waiting = pb.Waiting(missing=missing, missing_count=count)
    assert requests.is_lowest_present(rank, waiting) is lowest


def test_unregister_returns_whether_the_member_was_known(serve: Serve) -> None:
    coordinator = serve(1)
    join(coordinator, member(0), 1)
    assert unregister(coordinator.address, member(0), secret=SECRET)
    assert not unregister(coordinator.address, member(0, "unknown"), secret=SECRET)
    with pytest.raises(Refused, match="does not hold this job's secret"):
        unregister(coordinator.address, member(0), secret=b"another secret!!")


# Addresses at which a coordinator cannot listen or does not answer.


def test_coordinator_at_a_busy_port_raises_and_names_it(serve: Serve) -> None:
    busy = serve(1)
    port = int(busy.address.rpartition(":")[2])
    with pytest.raises(
        TransportError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use; another process"
    ):
        serve(1, port=port)
    assert join(busy, member(0), 1).rank == 0


def test_coordinator_at_a_foreign_address_raises(serve: Serve) -> None:
    with pytest.raises(TransportError, match="this machine does not have that address"):
        serve(1, host="192.0.2.1", insecure=True)


def test_coordinator_beyond_this_machine_needs_insecure(serve: Serve) -> None:
    with pytest.raises(ConfigError, match=r"other machines could reach a coordinator at 0\.0\.0\.0:0.*insecure=True"):
        serve(1, host="0.0.0.0")
    coordinator = serve(1, host="0.0.0.0", insecure=True)
    assert join(coordinator, member(0), 1).rank == 0


def test_unresolvable_host_raises_config_error(serve: Serve) -> None:
    with pytest.raises(ConfigError, match=r"'no-such-host\.invalid' cannot be resolved"):
        serve(1, host="no-such-host.invalid")
    with pytest.raises(ConfigError, match=r"'no-such-host\.invalid' cannot be resolved"):
        join("no-such-host.invalid:1", member(0), 1, timeout=0.1)
    with pytest.raises(ConfigError, match="needs a port"):
        join("127.0.0.1:0", member(0), 1)


def test_register_without_a_coordinator_raises_no_connection() -> None:
    address = f"127.0.0.1:{_free_port()}"
    start = time.monotonic()
    with pytest.raises(
        NoConnection, match=rf"{address}: check that rank 0 .*waited 0\.3 s; .*Connection refused"
    ) as caught:
        join(address, member(0), 1, timeout=0.3)
    assert type(caught.value) is NoConnection
    assert time.monotonic() - start >= 0.3


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
