"""A rank that is silent (frozen or cut off) is lost, like a dead rank; a busy or slow rank is not."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import parts_of
from gradwire.host import native_core
from gradwire.liveness import lifeline
from gradwire.liveness.detector import SLOW_HEARTBEAT_SECONDS
from support.processes import Here, Rank, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

LARGE = 64 << 20
needs_core = pytest.mark.skipif(not native_core.available(), reason="without it, silence counts after 10 s only")


def reduces(here: Here, transport: str, nbytes: int) -> None:
    """Reduce until that fails. With `nbytes` 0, wait for rank 0 in a barrier."""
    group = gw.init(transport=transport)
    x = np.ones(max(8, nbytes) // 4, np.float32)
    group.all_reduce(x, op="mean")
    here.send(ready=True)
    try:
        if not nbytes and group.rank == 0:
            here.receive()
        while nbytes:
            group.all_reduce(x, op="mean")
        group.barrier()
    except gw.GradwireError as error:
        here.send_error(error)
        here.receive()


def freeze(ranks: list[Rank], *victims: int) -> list[Rank]:
    """Stop some ranks when all are in their calls, and return the others."""
    for rank in ranks:
        assert rank.receive()["ready"]
    for victim in victims:
        ranks[victim].signal(signal.SIGSTOP)
    return [rank for rank in ranks if rank.number not in victims]


def check_lost(rank: Rank, victim: Rank) -> None:
    report = rank.receive()
    assert (report["error"], report["culprit"]) == ("PeerLost", victim.number), report
    who = rf"rank {victim.number} \(host \S+, pid {victim.pid}\)"
    during = r" during (all_reduce|barrier) #\d+, test_failures_silence.py:\d+"
    assert re.fullmatch(rf"{who} has been silent for \d+\.\d\d s \(frozen or cut off\)({during})?", report["text"])


@needs_core
@pytest.mark.parametrize(
    ("transport", "victim", "nbytes"),
    [
        ("shm", 0, 8),
        ("shm", 2, LARGE),
        ("shm", 0, 0),
        ("tcp", 3, 8),
        ("tcp", 0, LARGE),
        ("tcp", 1, 0),
        ("grpc", 2, 8),
        ("grpc", 1, 0),
    ],
)
def test_frozen_rank_is_the_culprit_of_peer_lost(job: StartJob, transport: str, victim: int, nbytes: int) -> None:
    with job(reduces, 3 if nbytes == LARGE else 4, transport, nbytes) as ranks:
        others = freeze(ranks, victim)
        for rank in others:
            if nbytes or rank.number != 0:
                check_lost(rank, ranks[victim])


@needs_core
@pytest.mark.parametrize(("transport", "victims"), [("shm", (3, 1)), ("tcp", (1, 2)), ("grpc", (2, 1))])
def test_peer_lost_after_ranks_freeze_at_once_names_the_lowest(
    job: StartJob, transport: str, victims: tuple[int, ...]
) -> None:
    with job(reduces, 4, transport, 8) as ranks:
        others = freeze(ranks, *victims)
        for rank in others:
            check_lost(rank, ranks[1])


# -- one that thaws ---------------------------------------------------------------------------------------------------


def keeps_its_array(here: Here) -> None:
    """Survivors use their arrays after the break. The frozen rank writes into them until it raises its error."""
    group = gw.init(transport="shm")
    shared = parts_of(group).generation.shared
    assert shared is not None
    x = group.empty(1 << 20, "uint8")
    offsets = group.all_gather_values(shared.own.offset_of(x.ctypes.data, x.nbytes))
    targets = [arena.address + offsets[peer] for peer, arena in shared.peers.items()]
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            for target in targets:
                ctypes.memset(target, 0xEE, x.nbytes)

    writer = threading.Thread(target=write)
    if group.rank == 1:
        writer.start()
    group.barrier()
    here.send(ready=True)
    try:
        while True:
            group.barrier()
    except gw.GradwireError as error:
        x[:] = 7
        here.send_error(error)
    here.receive()  # the rank that continued has raised, and keeps writing until the test ends it
    over.set()
    here.send(bytes=sorted({*x.tolist()}))


@needs_core
def test_frozen_rank_that_continues_raises_aborted_and_changes_no_peer_memory(job: StartJob) -> None:
    with job(keeps_its_array, 3) as ranks:
        frozen = ranks[1]
        others = freeze(ranks, 1)
        for rank in others:
            check_lost(rank, frozen)
        frozen.signal(signal.SIGCONT)
        report = frozen.receive()
        assert (report["error"], report["culprit"]) == ("Aborted", 1), report
        assert re.match(
            rf"rank 1 \(host \S+, pid {frozen.pid}\) was declared lost by its peers: "
            r"it has been silent for \d+\.\d\d s ",
            report["text"],
        )
        for rank in (*others, frozen):
            rank.send()
        assert [rank.receive()["bytes"] for rank in others] == [[7], [7]]
        assert [rank.ended() for rank in ranks] == [0, 0, 0]


def reduces_with_a_child(here: Here, transport: str) -> None:
    group = gw.init(transport=transport)
    if os.fork() == 0:
        signal.pause()
        os._exit(0)
    group.barrier()
    here.send(ready=True)
    try:
        while True:
            group.barrier()
    except gw.GradwireError as error:
        here.send_error(error)
        here.receive()


@needs_core
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_frozen_rank_with_a_running_child_is_lost(job: StartJob, transport: str) -> None:
    with job(reduces_with_a_child, 3, transport) as ranks:
        others = freeze(ranks, 1)
        for rank in others:
            check_lost(rank, ranks[1])


# -- no false alarms --------------------------------------------------------------------------------------------------


def holds_the_interpreter(here: Here, transport: str) -> None:
    group = gw.init(transport=transport)
    group.barrier()
    if group.rank == 1:
        ctypes.PyDLL(None).usleep(2_500_000)
    here.send(sum=group.all_reduce(1))


@needs_core
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rank_whose_interpreter_is_blocked_is_not_lost(job: StartJob, transport: str) -> None:
    with job(holds_the_interpreter, 3, transport) as ranks:
        assert [rank.receive()["sum"] for rank in ranks] == [3, 3, 3]
        assert [rank.ended() for rank in ranks] == [0, 0, 0]


def stops_together(here: Here, transport: str) -> None:
    group = gw.init(transport=transport)
    group.barrier()
    here.send(ready=True)
    here.receive()
    here.send(sum=group.all_reduce(1))


@needs_core
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_job_stopped_and_continued_as_a_whole_keeps_working(job: StartJob, transport: str) -> None:
    with job(stops_together, 3, transport) as ranks:
        for rank in ranks:
            assert rank.receive()["ready"]
        for rank in ranks:
            rank.signal(signal.SIGSTOP)
        time.sleep(1.0)  # longer than the allowed silence
        for rank in ranks:
            rank.signal(signal.SIGCONT)
        for rank in ranks:
            rank.send()
        assert [rank.receive()["sum"] for rank in ranks] == [3, 3, 3]


# -- without the core -------------------------------------------------------------------------------------------------


def runs_without_the_core(here: Here, max_silence: float) -> None:
    os.environ[native_core.PURE] = "1"
    lifeline.PURE_SECONDS = max_silence
    group = gw.init()
    group.barrier()
    here.send(ready=True)
    try:
        while True:
            group.barrier()
    except gw.GradwireError as error:
        here.send_error(error)
        here.receive()


def test_frozen_rank_without_the_core_is_lost_after_the_longer_limit(job: StartJob) -> None:
    with job(runs_without_the_core, 3, 1.5) as ranks:
        for rank in freeze(ranks, 1):
            report = rank.receive()
            assert (report["error"], report["culprit"]) == ("PeerLost", 1), report
            silent = re.search(r"has been silent for (\d+\.\d\d) s", report["text"])
            assert silent is not None, report["text"]
            assert float(silent[1]) > 1.5 - 2 * SLOW_HEARTBEAT_SECONDS


def test_silence_limit_without_the_core_is_ten_seconds() -> None:
    assert lifeline.PURE_SECONDS == 10.0
