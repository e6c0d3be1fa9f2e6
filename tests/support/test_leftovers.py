"""Tests of the test helpers: leftovers, ranks as threads, ranks as processes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading

import pytest

from gradwire.errors import Aborted, Closed
from support import leftovers
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.ranks import run_ranks

needs_proc = pytest.mark.skipif(not leftovers.PROC.exists(), reason="needs /proc")


@needs_proc
def test_leftovers_child_process_is_listed_until_it_is_waited_for() -> None:
    code = "print('up', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"  # before that, it may have no command line yet
        assert "input()" in leftovers.children()[child.pid]
        child.communicate(b"\n")
    assert child.pid not in leftovers.children()


@needs_proc
def test_leftovers_end_children_that_were_left() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    leftovers.end([child.pid])
    assert child.pid not in leftovers.children()
    child.returncode = -9  # Popen does not know that `end` has reaped the process


@needs_proc
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_leftovers_only_listening_sockets_are_listed(family: socket.AddressFamily) -> None:
    before = leftovers.listeners()
    with socket.socket(family) as quiet:
        quiet.bind(("127.0.0.1", 0) if family == socket.AF_INET else "")
        assert leftovers.listeners() == before
        quiet.listen()
        assert len(leftovers.listeners()) == len(before) + 1
    assert leftovers.listeners() == before


def test_leftovers_thread_is_listed_unless_it_is_a_daemon() -> None:
    stop = threading.Event()
    kept, daemon = threading.Thread(target=stop.wait), threading.Thread(target=stop.wait, daemon=True)
    kept.start()
    daemon.start()
    try:
        assert kept in leftovers.threads()
        assert daemon not in leftovers.threads()
    finally:
        stop.set()
        kept.join()
        daemon.join()


class Fake:
    """A group that can only be aborted."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.aborted = threading.Event()

    def abort(self, reason: str) -> None:
        self.aborted.set()
        raise Closed("an abort that fails does not hide the failure")


def test_run_ranks_returns_results_by_rank() -> None:
    assert run_ranks([Fake(rank) for rank in range(5)], lambda group: group.rank * 10) == [0, 10, 20, 30, 40]


def test_run_ranks_raises_the_first_failure_and_aborts() -> None:
    groups = [Fake(rank) for rank in range(3)]

    def fn(group: Fake) -> None:
        if group.rank == 1:
            raise ZeroDivisionError("mine")
        assert groups[1].aborted.wait(60)
        raise Aborted(f"on rank {group.rank}")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        run_ranks(groups, fn)
    notes = caught.value.__notes__
    assert notes[0] == "raised on rank 1"
    assert sorted(notes[1:]) == ["then on rank 0: Aborted: on rank 0", "then on rank 2: Aborted: on rank 2"]


def waits_for_nothing(here: Here) -> None:
    here.send(waiting=True)
    threading.Event().wait()


@pytest.mark.parametrize("stopped", [False, True], ids=["waits", "stopped"])
def test_start_job_failed_test_shows_the_stacks_of_ranks_that_still_run(job: StartJob, stopped: bool) -> None:
    with pytest.raises(ZeroDivisionError) as caught, job(waits_for_nothing, 2, environ={}) as ranks:
        for rank in ranks:
            assert rank.receive() == {"waiting": True}
        if stopped:
            ranks[0].signal(signal.SIGSTOP)
        1 / 0
    assert [" in waits_for_nothing\n" in note for note in caught.value.__notes__] == [True, True]


def test_run_ranks_rank_that_does_not_end_is_shown_with_its_stack() -> None:
    stop = threading.Event()
    with pytest.raises(AssertionError, match=r"(?s)not done after 1 s.*rank 0 at.*stop.wait"):
        run_ranks([Fake(0)], lambda _group: stop.wait(), timeout=1.0)
    stop.set()
