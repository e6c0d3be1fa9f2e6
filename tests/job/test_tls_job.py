"""A job whose links use TLS. Each rank has its own "host", so that the ranks share no memory."""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import parts_of
from gradwire.host import native_core
from gradwire.launch.worker_setup import free_port
from gradwire.liveness import heartbeat_messages
from support import tls_files
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

TOKEN = "a token that is long enough"


def environ(size: int, member: Any = lambda rank: f"m{rank}") -> Any:
    port = free_port()

    def of(rank: int) -> Mapping[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GRADWIRE_TOKEN": TOKEN,
            "GRADWIRE_HOST": f"host-{rank}",
            **tls_files.variables(member(rank)),
        }

    return of


def adds(here: Here) -> None:
    try:
        group = gw.init(timeout=30.0)
        able = [parts_of(group).generation.transport.encrypted, group.capabilities.native]
        here.send(sum=group.all_reduce(np.full(100_000, group.rank + 1.0)).sum(), able=able)
        here.receive()
        while True:
            group.all_reduce(np.ones(1000))
    except gw.GradwireError as error:
        here.send_error(error)


def test_tls_job_reduces_and_reports_a_frozen_rank_as_lost(job: StartJob) -> None:
    with job(adds, 3, environ=environ(3)) as ranks:
        for rank in ranks:
            assert rank.receive() == {"sum": 600_000.0, "able": [True, False]}
        for rank in ranks:
            rank.send()
        ranks[1].signal(signal.SIGSTOP)
        for rank in (ranks[0], ranks[2]):
            report = rank.receive()
            assert (report["error"], report["culprit"]) == ("PeerLost", 1)
            assert "silent" in report["text"]
        ranks[1].signal(signal.SIGCONT)
        assert ranks[1].receive()["error"] == "Aborted"


def holds_the_interpreter(here: Here, seconds: float) -> None:
    """Hold the GIL for some seconds. The stock of heartbeat tokens lasts 3 s, or 9 s at the slow heartbeat rate."""
    heartbeat_messages.BLOCK_TOKENS, heartbeat_messages.STOCK_BLOCKS, heartbeat_messages.MARK_BLOCKS = 16, 4, 2
    try:
        group = gw.init(timeout=30.0)
        group.barrier()
        if group.rank == 1:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        here.send(sum=group.all_reduce(1))
    except gw.GradwireError as error:
        here.send_error(error)


@pytest.mark.skipif(not native_core.available(), reason="without the core, silence counts after 10 s")
def test_tls_job_rank_whose_interpreter_is_blocked_beyond_its_tokens_is_not_lost(job: StartJob) -> None:
    secure = environ(2)
    with job(
        holds_the_interpreter, 2, 4.5, environ=lambda rank: {**secure(rank), "GRADWIRE_PEER_TIMEOUT": "1"}
    ) as ranks:
        assert [rank.receive() for rank in ranks] == [{"sum": 2}] * 2


def is_idle(here: Here, seconds: float) -> None:
    try:
        group = gw.init(timeout=30.0)
        group.barrier()
        time.sleep(seconds)  # meanwhile only heartbeats show that the ranks are alive
        here.send(sum=group.all_reduce(1))
    except gw.GradwireError as error:
        here.send_error(error)


def test_tls_job_ranks_with_and_without_the_core_accept_each_others_heartbeats(job: StartJob) -> None:
    secure = environ(3)

    def of(rank: int) -> Mapping[str, str]:
        return {**secure(rank), "GRADWIRE_PEER_TIMEOUT": "0.5", native_core.PURE: "1" if rank == 1 else "0"}

    with job(is_idle, 3, 1.5, environ=of) as ranks:
        assert [rank.receive() for rank in ranks] == [{"sum": 3}] * 3


def test_tls_job_rank_without_a_certificate_is_refused_with_the_reason(job: StartJob) -> None:
    secure = environ(2)

    def of(rank: int) -> Mapping[str, str]:
        found = dict(secure(rank))
        return {name: text for name, text in found.items() if "TLS" not in name} if rank else found

    with job(adds, 2, environ=of) as ranks:
        report = ranks[1].receive()
        assert report["error"] in ("Refused", "NoConnection"), report
        assert "TLS" in report["text"], report
