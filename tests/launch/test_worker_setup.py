"""The environment of a worker."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gradwire.job import config
from gradwire.launch.worker_process import Task
from gradwire.launch.worker_setup import free_port, of_worker, shared_by_workers
from support.launch_jobs import run, written


def environment(environ: dict[str, str], rank: int = 1, size: int = 2) -> dict[str, str]:
    shared = shared_by_workers(environ, size, coordinator="127.0.0.1:1234", job="a-job", token="t" * 20, port=4321)
    return of_worker(shared, rank)


def test_worker_environment_resolves_to_its_job() -> None:
    found = config.resolve(environ=environment({}))
    assert (found.rank, found.size, found.local_rank, found.job) == (1, 2, 1, "a-job")
    assert (str(found.address), found.served) == ("127.0.0.1:1234", True)


def test_worker_environment_has_the_variables_of_torchrun() -> None:
    environ = environment({})
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [environ[name] for name in names] == ["1", "2", "1", "2", "127.0.0.1", "4321"]


def test_worker_environment_drops_an_outer_job_and_keeps_settings() -> None:
    outer = environment({}, rank=0, size=8) | {
        "GRADWIRE_ADDRESS": "elsewhere:1",
        "GRADWIRE_STOP_NOTICES": "7:1234",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "outer",
        "PET_NNODES": "2",
        "GROUP_RANK": "3",
        "ROLE_RANK": "3",
        "GRADWIRE_TIMEOUT": "7",
        "GRADWIRE_TRANSPORT": "tcp",
        "HOME": "/home/me",
    }
    inner = environment(outer)
    assert inner["GRADWIRE_SIZE"] == "2"
    assert inner["GRADWIRE_TIMEOUT"] == "7"
    assert inner["GRADWIRE_TRANSPORT"] == "tcp"
    assert inner["HOME"] == "/home/me"
    assert not {"GRADWIRE_ADDRESS", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "GROUP_RANK"} & set(inner)
    assert not {"PET_NNODES", "GRADWIRE_STOP_NOTICES"} & set(inner)


def test_worker_environment_shares_out_threads_unless_set() -> None:
    cores = len(os.sched_getaffinity(0))
    assert environment({}, size=1)["OMP_NUM_THREADS"] == str(cores)
    assert environment({}, size=10 * cores)["OMP_NUM_THREADS"] == "1"
    assert environment({"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("own", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_"])
def test_worker_environment_sets_malloc_unless_set(own: str) -> None:
    names = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
    assert names <= set(environment({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=off"}))
    assert names <= set(environment({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}))
    assert {name for name in environment({own: "1"}) if name.startswith("MALLOC_")} == {own}
    assert not names & set(environment({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}))


def test_free_port_is_free() -> None:
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_worker_process_has_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_ADDRESS", "outer:1")
    monkeypatch.delenv("GRADWIRE_PURE", raising=False)
    script = written(
        tmp_path,
        """
        import os, sys
        ours = sorted(name for name in os.environ if name.startswith("GRADWIRE_"))
        print(os.environ["GRADWIRE_RANK"], os.environ["RANK"], *ours, sys.stdin.read() == "", sys.stdout.write_through)
        """,
    )
    ended = run(Task.script(script), 2)
    ours = ("COORDINATOR", "JOB", "LOCAL_RANK", "RANK", "SIZE", "STOP_NOTICES", "TOKEN")
    names = " ".join(f"GRADWIRE_{name}" for name in ours)
    assert sorted(ended.out.splitlines()) == [f"[0] 0 0 {names} True True", f"[1] 1 1 {names} True True"]
