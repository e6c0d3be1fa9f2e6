"""Jobs whose links use gRPC: results, and the same errors as over TCP when a rank dies, freezes or aborts."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import parts_of
from gradwire.host import native_core
from gradwire.launch.worker_setup import free_port
from support import tls_files
from support.processes import Here, Rank, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.ranks import eventually

TOKEN = "a token that is long enough"
needs_core = pytest.mark.skipif(not native_core.available(), reason="without it, silence counts after 10 s only")


def on_hosts(size: int, *, tls: bool = False, one: bool = False) -> Any:
    """Return environments of ranks with a host each, so that the heartbeats use gRPC too, or on `one` host."""
    port = free_port()

    def of(rank: int) -> Mapping[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GRADWIRE_TOKEN": TOKEN,
            "GRADWIRE_HOST": "one" if one else f"host-{rank}",
            "GRADWIRE_TRANSPORT": "grpc",
            **(tls_files.variables(f"m{rank}") if tls else {}),
        }

    return of


def reduces(here: Here, nbytes: int) -> None:
    """Reduce until that fails, and report the error."""
    try:
        group = gw.init(timeout=30.0)
        able = group.capabilities
        facts = [able.transport, able.native, parts_of(group).generation.transport.encrypted]
        here.send(sum=group.all_reduce(group.rank + 1), able=facts)
        x = np.ones(nbytes // 4, np.float32)
        while True:
            group.all_reduce(x, op="mean")
            assert (x == 1).all()
    except gw.GradwireError as error:
        here.send_error(error)
        here.receive()


def check_lost(rank: Rank, victim: Rank, how: str) -> None:
    report = rank.receive()
    assert (report["error"], report["culprit"]) == ("PeerLost", victim.number), report
    who = rf"rank {victim.number} \(host \S+, pid {victim.pid}\)"
    assert re.match(rf"{who} {how}( during all_reduce #\d+, test_grpc_job.py:\d+)?$", report["text"]), report


def begun(ranks: list[Rank], *, encrypted: bool = False) -> None:
    size = len(ranks)
    for rank in ranks:
        assert rank.receive() == {"sum": size * (size + 1) // 2, "able": ["grpc", False, encrypted]}


@pytest.mark.parametrize("tls", [False, True], ids=["token", "tls"])
def test_grpc_job_between_hosts_reduces_and_reports_a_killed_rank(job: StartJob, tls: bool) -> None:
    with job(reduces, 3, 4 << 20, environ=on_hosts(3, tls=tls)) as ranks:
        begun(ranks, encrypted=tls)
        ranks[1].signal(signal.SIGKILL)
        for rank in (ranks[0], ranks[2]):
            check_lost(rank, ranks[1], "closed its link")


def test_grpc_job_on_one_host_reports_a_killed_rank(job: StartJob) -> None:
    with job(reduces, 3, 1 << 16, environ=on_hosts(3, one=True)) as ranks:
        begun(ranks)
        ranks[0].signal(signal.SIGKILL)
        for rank in ranks[1:]:
            check_lost(rank, ranks[0], "(closed its link|died)")


@needs_core
@pytest.mark.parametrize("nbytes", [8, 16 << 20])
def test_grpc_job_on_one_host_reports_a_frozen_rank(job: StartJob, nbytes: int) -> None:
    with job(reduces, 3, nbytes, environ=on_hosts(3, one=True)) as ranks:
        begun(ranks)
        ranks[2].signal(signal.SIGSTOP)
        for rank in ranks[:2]:
            check_lost(rank, ranks[2], r"has been silent for \d\.\d\d s \(frozen or cut off\)")


@pytest.mark.slow
def test_grpc_job_between_hosts_reports_a_frozen_rank(job: StartJob) -> None:
    with job(reduces, 3, 1 << 20, environ=on_hosts(3, tls=True)) as ranks:
        begun(ranks, encrypted=True)
        ranks[0].signal(signal.SIGSTOP)
        for rank in ranks[1:]:
            check_lost(rank, ranks[0], r"has been silent for 1\d\.\d\d s \(frozen or cut off\)")


def aborts(here: Here) -> None:
    group = gw.init()
    try:
        group.barrier()
        if group.rank == 1:
            group.abort("no more data")
        group.barrier()
    except gw.GradwireError as error:
        here.send_error(error)


def test_grpc_job_abort_raises_the_same_error_on_all_ranks(job: StartJob) -> None:
    with job(aborts, 3, environ=on_hosts(3, one=True)) as ranks:
        for rank in ranks:
            report = rank.receive()
            assert (report["error"], report["culprit"]) == ("Aborted", 1), report
            assert "no more data" in report["text"]


def forks(here: Here) -> None:
    """Fork a child in the middle of the job. It exits, and the rank continues."""
    group = gw.init()
    group.barrier()
    child = os.fork()
    if child == 0:
        try:
            group.barrier()
        except gw.Closed:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    here.send(child=os.waitstatus_to_exitcode(status), sum=group.all_reduce(np.ones(1 << 18)).sum())
    if group.rank == 0 and os.fork() == 0:
        signal.pause()  # outlives the rank, like a data loader
    here.send(ready=True)
    try:
        while True:
            group.barrier()
    except gw.GradwireError as error:
        here.send_error(error)


def test_grpc_job_forked_children_neither_break_links_nor_keep_a_dead_rank_alive(job: StartJob) -> None:
    with job(forks, 2, environ=on_hosts(2)) as ranks:
        for rank in ranks:
            assert rank.receive() == {"child": 7, "sum": 2 * (1 << 18)}
            assert rank.receive()["ready"]
        ranks[0].signal(signal.SIGKILL)
        report = ranks[1].receive()
        assert (report["error"], report["culprit"]) == ("PeerLost", 0), report
        assert "closed its link" in report["text"]


def joins(here: Here) -> None:
    try:
        gw.init(timeout=20.0).close()
        here.send(error=None)
    except gw.GradwireError as error:
        here.send_error(error)


def test_grpc_rank_in_a_job_of_another_transport_is_refused_with_both_names(job: StartJob) -> None:
    environ = on_hosts(2)

    def of(rank: int) -> Mapping[str, str]:
        return {**environ(rank), "GRADWIRE_TRANSPORT": ("auto", "grpc")[rank]}

    with job(joins, 2, environ=of) as ranks:
        texts: dict[int, str] = {}  # a rank that has sent its error ends, and nothing more can be received from it

        def refused() -> bool:
            for rank in ranks:
                if rank.number not in texts and not rank.silent():
                    texts[rank.number] = str(rank.receive()["text"])
            return any(
                re.search(r"uses transport '(auto|grpc)', and .* uses '(auto|grpc)': either all", t)
                for t in texts.values()
            )

        assert eventually(refused), texts  # the rank that registered last
