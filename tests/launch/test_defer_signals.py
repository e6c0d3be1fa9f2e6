"""Interrupts while a job is being started: they are handled afterwards, and no process is left behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.launch.defer_signals import deferred_signals
from gradwire.launch.supervisor import Supervisor
from gradwire.launch.worker_process import Task, Worker
from gradwire.launch.worker_setup import StaticSetup
from support.launch_jobs import WAIT, Watched, nowhere, written
from support.ranks import eventually


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, as in a program in the foreground."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that a program's own handler of SIGTERM gets."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def test_deferred_signals_run_handlers_afterwards_once_for_each_signal(handled: list[int]) -> None:
    with deferred_signals():
        signal.raise_signal(signal.SIGTERM)
        assert handled == []
    assert handled == [signal.SIGTERM]
    signal.raise_signal(signal.SIGTERM)
    assert handled == [signal.SIGTERM] * 2


def test_deferred_signals_include_sigusr2() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    try:
        with deferred_signals():
            signal.raise_signal(signal.SIGUSR2)
            assert received == []
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert received == [signal.SIGUSR2]


def test_deferred_signals_run_each_handler_even_if_one_raises(handled: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert handled == [signal.SIGTERM]


def test_deferred_signals_interrupt_is_raised_beside_an_error() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, deferred_signals():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("something else")
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_deferred_signals_leave_ignored_and_fatal_signals_alone() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with deferred_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_deferred_signals_in_another_thread_change_nothing() -> None:
    inside: list[bool] = []

    def begin() -> None:
        with deferred_signals():
            inside.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert inside == [True]


class Interrupted(StaticSetup):
    """Presses Ctrl-C when the second of three workers has been started."""

    def __init__(self) -> None:
        super().__init__(3, nowhere())
        self.watched: list[Watched] = []

    def started(self, worker: Worker) -> None:
        self.watched.append(Watched(worker.pid))
        if worker.number == 1:
            signal.raise_signal(signal.SIGINT)


def test_supervisor_interrupted_while_workers_start_ends_all_of_them(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    setup = Interrupted()
    with pytest.raises(KeyboardInterrupt), Supervisor(Task.script(written(tmp_path, WAIT)), 3, setup):
        raise AssertionError("the interrupt was lost")
    assert len(setup.watched) == 3, "all workers were started before the interrupt was handled"
    assert all(one.ends() for one in setup.watched)
    assert eventually(lambda: set(threading.enumerate()) <= threads)
