"""Launched ranks that form a group."""

from __future__ import annotations

import functools
import os
import signal

import pytest

import gradwire as gw
from gradwire.launch import rendezvous, supervisor


def test_launch_ranks_form_a_group_and_reduce() -> None:
    def job(factor: int) -> tuple[int, int, int]:
        with gw.init() as group:
            return group.rank, group.size, group.all_reduce(factor * (group.rank + 1))

    assert gw.launch(job, 3, (10,)) == [(0, 3, 60), (1, 3, 60), (2, 3, 60)]


def test_launch_raises_the_exception_that_broke_the_group() -> None:
    """Also without `with group`: the exit of the process informs the other ranks."""

    def job() -> None:
        group = gw.init()
        if group.rank == 1:
            raise KeyError("lost key")
        group.barrier()

    with pytest.raises(KeyError, match="lost key") as caught:
        gw.launch(job, 3)
    assert isinstance(caught.value.__cause__, gw.WorkerFailed)
    assert caught.value.__cause__.culprit == 1
    assert all("raised Aborted: rank 1" in note for note in caught.value.__notes__)


def test_launch_killed_rank_is_the_cause() -> None:
    def job() -> None:
        group = gw.init()
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier()

    with pytest.raises(gw.WorkerFailed, match=r"^rank 2 .* was killed by SIGKILL") as caught:
        gw.launch(job, 3)
    assert (caught.value.culprit, caught.value.exit_code) == (2, 137)
    assert all("raised PeerLost: rank 2" in note for note in caught.value.__notes__)


def test_launch_rank_that_returns_too_early_is_the_cause_of_the_peer_lost() -> None:
    def job() -> None:
        group = gw.init()
        group.barrier()
        if group.rank != 1:
            group.barrier()

    with pytest.raises(gw.PeerLost, match=r"^rank 1 ") as caught:
        gw.launch(job, 3)
    cause = caught.value.__cause__
    assert isinstance(cause, gw.WorkerFailed)
    assert cause.culprit == 1
    assert str(cause).endswith("exited with code 0 while other ranks still needed it")


def test_launch_rank_that_never_joins_does_not_block_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def job() -> None:
        if os.environ["GRADWIRE_RANK"] == "0":
            raise ImportError("no such library")
        gw.init()

    monkeypatch.setattr(supervisor, "Supervisor", functools.partial(supervisor.Supervisor, grace=0.5))
    with pytest.raises(ImportError, match="no such library"):
        gw.launch(job, 2)


def test_rendezvous_coordinator_starts_and_stops() -> None:
    meeting = rendezvous.on_this_machine(1)
    meeting.coordinator.start()
    host, _, port = meeting.coordinator.address.rpartition(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    meeting.coordinator.stop()
