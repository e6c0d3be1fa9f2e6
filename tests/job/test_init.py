"""gw.init with real processes: joining a job, and a clear error for every wrong setting and every unfit process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw
from gradwire.generation import connection
from gradwire.launch.worker_setup import free_port
from gradwire.transports.tcp import dial
from gradwire.transports.tcp.transport import TcpTransport
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.ranks import eventually

TOKEN = "a token that is long enough"
Environ = Callable[[int], Mapping[str, str]]


@pytest.fixture
def static() -> Callable[..., Environ]:
    """Return a factory for the environment of a job without a launcher: torchrun's four variables and a token."""

    def make(size: int, host: str = "127.0.0.1", port: int | None = None, **other: str) -> Environ:
        shared = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port or free_port()),
            "GRADWIRE_TOKEN": TOKEN,
            **other,
        }
        return lambda rank: {**shared, "RANK": str(rank)}

    return make


def joins(here: Here, timeout: float = 30.0, other_timeout: float | None = None) -> None:
    """Join, report the result to the test, and wait. `other_timeout` is the timeout of ranks other than 0."""
    if other_timeout is not None and os.environ["RANK"] != "0":
        timeout = other_timeout
    try:
        group = gw.init(timeout=timeout)
    except gw.GradwireError as error:
        here.send_error(error)
        return
    threads = sorted(thread.name for thread in threading.enumerate())
    total = group.all_reduce(1)
    here.send(rank=group.rank, size=group.size, sum=total, threads=threads)
    here.receive()


def test_init_with_four_variables_joins(job: StartJob, static: Callable[..., Environ]) -> None:
    with job(joins, 3, environ=static(3)) as ranks:
        for rank in ranks:
            report = rank.receive()
            assert (report["rank"], report["size"], report["sum"]) == (rank.number, 3, 3)
            listener = ["gradwire-closed"] if rank.number == 0 else []
            assert report["threads"] == sorted(["MainThread", "gradwire-accept", "gradwire-service", *listener])
            rank.send()
        assert [rank.ended() for rank in ranks] == [0, 0, 0]


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_init_with_other_names_of_this_machine_joins(job: StartJob, static: Callable[..., Environ], host: str) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with job(joins, 2, environ=static(2, host=host)) as ranks:
        assert [rank.receive()["sum"] for rank in ranks] == [2, 2]


def test_init_uses_the_users_own_file_as_secret(job: StartJob, static: Callable[..., Environ], tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environ = static(2, XDG_RUNTIME_DIR=str(tmp_path))

    def without_token(number: int) -> Mapping[str, str]:
        return {name: value for name, value in environ(number).items() if name != "GRADWIRE_TOKEN"}

    with job(joins, 2, environ=without_token) as ranks:
        assert [rank.receive()["sum"] for rank in ranks] == [2, 2]
    [file] = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert file.stat().st_mode & 0o777 == 0o600


def test_init_at_a_busy_port_raises(job: StartJob, static: Callable[..., Environ]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with job(joins, 2, 1.0, environ=static(2, port=port)) as ranks:
            report = ranks[0].receive()
            assert report["error"] == "TransportError"
            assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in report["text"]
            report = ranks[1].receive()
            assert report["error"] in ("NoConnection", "Refused")
            assert f"127.0.0.1:{port}" in report["text"]


def test_init_with_a_wrong_token_is_refused(job: StartJob, static: Callable[..., Environ]) -> None:
    right = static(2)
    environs = [right(0), {**right(1), "GRADWIRE_TOKEN": "quite another token here"}]
    with job(joins, 2, 4.0, 30.0, environ=environs.__getitem__) as ranks:
        report = ranks[1].receive()
        assert (report["error"], "does not hold this job's secret" in report["text"]) == ("Refused", True)
        assert "GRADWIRE_TOKEN" in report["text"]
        report = ranks[0].receive()
        assert report["error"] == "Timeout"
        assert re.search(r"missing rank 1 of 2", report["text"])
        assert re.search(r"refused a call from 127\.0\.0\.1:\d+: .*does not hold this job's secret", ranks[0].output())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "1"}, r"rank 1 is taken by rank 1 \(host \S+, pid \d+\)"),
        ({"WORLD_SIZE": "4"}, r"expects a job of 4 ranks, and this one has 3"),
        ({"GRADWIRE_JOB": "another"}, r"another"),
    ],
    ids=["duplicate rank", "another size", "another job"],
)
def test_init_process_that_does_not_fit_is_refused_and_harms_no_other(
    job: StartJob, static: Callable[..., Environ], change: dict[str, str], message: str
) -> None:
    mine = static(3, GRADWIRE_JOB="mine")
    environs = [mine(0), mine(1), {**mine(2), **change}, mine(2)]  # the unfit process comes before the last rank
    with job(waits_and_joins, 4, environ=environs.__getitem__) as ranks:
        for number in (0, 1):
            ranks[number].send()
        assert eventually(lambda: re.search("rank 1 .* has registered", ranks[0].output()) is not None)
        ranks[2].send()
        report = ranks[2].receive()
        assert report["error"] == "Refused", report
        assert re.search(message, report["text"]), report
        assert re.search(rf"refused rank \d .* at 127\.0\.0\.1:\d+: .*{message}", ranks[0].output())
        ranks[3].send()
        assert [ranks[number].receive()["sum"] for number in (0, 1, 3)] == [3, 3, 3]


def waits_and_joins(here: Here) -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    here.receive()
    joins(here)


def test_init_duplicate_rank_of_a_complete_job_is_refused(job: StartJob, static: Callable[..., Environ]) -> None:
    """The coordinator of a complete job has stopped, but a late process is refused at once and does not wait."""
    environ = static(2)
    with job(joins, 2, environ=environ) as ranks:
        assert [rank.receive()["sum"] for rank in ranks] == [2, 2]
        with job(joins, 1, environ=lambda _: environ(1)) as (late,):
            report = late.receive()
            assert report["error"] == "Refused"
            assert re.search(r"rendezvous at 127\.0\.0\.1:\d+ is over: all 2 ranks .* have joined", report["text"])
        assert re.search(r"refused 127\.0\.0\.1:\d+: all 2 ranks of the job there have joined", ranks[0].output())
        with job(joins, 1, environ=lambda _: environ(0)) as (second,):
            report = second.receive()
            assert report["error"] == "TransportError", "a second rank 0, or another job with this port"
            assert "Address already in use" in report["text"]
        for rank in ranks:
            rank.send()
        assert [rank.ended() for rank in ranks] == [0, 0]
        with job(joins, 2, environ=environ) as again:  # the port is free when the job is over
            assert [rank.receive()["sum"] for rank in again] == [2, 2]


def test_init_two_jobs_at_once_stay_separate(job: StartJob, static: Callable[..., Environ]) -> None:
    """The jobs have the same user, token and name. Only their addresses differ."""
    first, second = static(2, GRADWIRE_JOB="same"), static(3, GRADWIRE_JOB="same")
    with job(joins, 5, environ=lambda n: first(n) if n < 2 else second(n - 2)) as ranks:
        assert [rank.receive()["sum"] for rank in ranks] == [2, 2, 3, 3, 3]


def dies_after_registering(here: Here, victim: int) -> None:
    if os.environ["RANK"] == str(victim):
        TcpTransport.assemble = lambda *_, **__: os._exit(7)  # type: ignore[method-assign]
    dial.REFUSING_SECONDS = connection.EXPECTED_SECONDS = 1.0
    joins(here)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_init_does_not_wait_for_a_rank_that_registered_and_died(
    job: StartJob, static: Callable[..., Environ], victim: int
) -> None:
    with job(dies_after_registering, 3, victim, environ=static(3)) as ranks:
        assert ranks[victim].ended() == 7
        for rank in ranks:
            if rank.number != victim:
                report = rank.receive()
                assert report["error"] in ("NoConnection", "Aborted", "PeerLost"), report
                assert f"rank {victim} " in report["text"], report


# -- errors before anything is started, and single ranks --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"rank": 0, "size": 0}, gw.InvalidSize, "size"),
        ({"rank": 2, "size": 2}, gw.InvalidRank, "rank"),
        ({"rank": -1, "size": 2}, gw.InvalidRank, "rank"),
        ({"rank": 0, "size": 2, "address": "192.0.2.1:29500"}, gw.ConfigError, "insecure=True"),
        ({"rank": 0, "size": 2, "address": "no-such-host.invalid:29500"}, gw.ConfigError, "no-such-host.invalid"),
        ({"rank": 0, "size": 2, "address": "127.0.0.1"}, gw.ConfigError, "port"),
        ({"rank": 0, "size": 2, "address": "127.0.0.1:1", "transport": "mpi"}, gw.UnsupportedOp, "'mpi'.*'tcp'"),
        ({"transport": "mpi"}, gw.UnsupportedOp, "'mpi'.*'tcp'"),
        ({"rank": 0, "size": 2, "address": "127.0.0.1:1", "transport": "pigeons"}, gw.ConfigError, "pigeons"),
        ({"rank": 0, "size": 2}, gw.ConfigError, "address"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_init_impossible_arguments_raise_before_anything_starts(
    arguments: dict[str, Any], kind: type[gw.GradwireError], message: str
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(kind, match=f"(?s){message}"):
        gw.init(**arguments)
    assert set(threading.enumerate()) == before


def test_init_without_a_coordinator_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_TOKEN", TOKEN)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(gw.NoConnection, match=rf"no coordinator answered at {address}") as caught:
        gw.init(1, 2, address, timeout=0.3)
    assert caught.value.seconds is not None
    assert 0 < caught.value.seconds <= 0.3


def test_init_single_rank_needs_no_coordinator() -> None:
    before = set(threading.enumerate())
    with gw.init() as group:
        assert (group.rank, group.size, group.generation) == (0, 1, 1)
        assert group.all_reduce(3) == 3
        group.barrier()
        assert group.capabilities.transport == "local"
    assert {thread for thread in threading.enumerate() if thread.is_alive()} == before


def test_init_single_rank_with_an_address_uses_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_TOKEN", TOKEN)
    with gw.init(0, 1, f"127.0.0.1:{free_port()}") as group:
        assert group.capabilities.transport == "tcp"
        assert group.all_reduce(3) == 3


# -- twice ------------------------------------------------------------------------------------------------------------


def line_of_caller() -> int:
    return sys._getframe(1).f_lineno


def test_init_while_a_group_is_open_raises_with_the_line_of_the_first_call() -> None:
    first_call = line_of_caller() + 1
    with gw.init() as group:
        already = (
            rf"this process is already initialised: gw\.init\(\) was called at test_init\.py:{first_call}, and "
            r"<gradwire\.Group rank 0 of 1, generation 1, open> is not closed\. Use that group, or close it"
        )
        with pytest.raises(gw.ConfigError, match=already):
            gw.init()
        assert group.all_reduce(3) == 3
    with gw.init() as another:
        assert another.all_reduce(4) == 4


def inits_twice(here: Here) -> None:
    first_call = line_of_caller() + 1
    group = gw.init()
    try:
        gw.init()
    except gw.ConfigError as error:
        here.send(error=str(error), first_call=f"{Path(__file__).name}:{first_call}", sum=group.all_reduce(1))


def test_init_twice_in_a_job_of_several_ranks_raises_and_the_group_stays_usable(job: StartJob) -> None:
    with job(inits_twice, 2) as ranks:
        for rank in ranks:
            told = rank.receive()
            assert f"this process is already initialised: gw.init() was called at {told['first_call']}" in told["error"]
            assert f"rank {rank.number} of 2" in told["error"]
            assert told["sum"] == 2


# -- many -------------------------------------------------------------------------------------------------------------


def joins_among_many(here: Here) -> None:
    group = gw.init()
    here.send(sum=group.all_reduce(1))
    here.receive()


@pytest.mark.slow
def test_init_thirty_two_processes_join(job: StartJob) -> None:
    with job(joins_among_many, 32) as ranks:
        report = [rank.receive() for rank in ranks]
        assert {one["sum"] for one in report} == {32}
        for rank in ranks:
            rank.send()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "script.py"
    file.write_text("import gradwire as gw\nwith gw.init() as group:\n    assert group.all_reduce(1) == group.size\n")
    return file


@pytest.mark.slow
def test_init_thirty_two_fresh_interpreters_join(script: Path) -> None:
    command = [sys.executable, "-m", "gradwire", "run", "-n", "32", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=script.parent)
    assert done.returncode == 0, done.stderr
