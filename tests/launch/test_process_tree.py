from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.launch import process_tree
from support.launch_jobs import LONG, Watched
from support.ranks import eventually

# Leads a session with two more processes, one of them in a process group of its own; prints their numbers and waits.
FAMILY = """
import os, signal, sys, time
pids = []
for grouped in (False, True):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        if grouped:
            os.setpgid(0, 0)
        os.write(writing, b".")
        signal.pause()
    os.read(reading, 1)
    pids.append(pid)
print(*pids, flush=True)
signal.pause()
"""


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        try:
            yield leader, [int(pid) for pid in leader.stdout.readline().split()]
        finally:
            process_tree.kill(leader.pid)


def test_session_lists_all_its_processes(family: tuple[subprocess.Popen[str], list[int]]) -> None:
    leader, others = family
    assert sorted(pid for pid, _ in process_tree.processes(leader.pid)) == sorted([leader.pid, *others])


def test_kill_of_a_session_ends_all_its_processes(family: tuple[subprocess.Popen[str], list[int]]) -> None:
    leader, others = family
    watched = [Watched(pid) for pid in others]
    process_tree.kill(leader.pid)
    assert leader.wait(LONG) == -signal.SIGKILL
    assert all(other.ends() for other in watched)
    assert process_tree.is_empty(leader.pid)
    process_tree.kill(leader.pid)  # an empty session is no error


def test_is_empty_ignores_zombies() -> None:
    leader = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
    assert process_tree.is_empty(leader.pid)
    leader.wait()


def test_guard_that_is_closed_kills_nothing(family: tuple[subprocess.Popen[str], list[int]]) -> None:
    leader, _ = family
    guard = process_tree.Guard()
    guard.watch(leader.pid)
    guard.close()
    assert leader.poll() is None
    assert not process_tree.is_empty(leader.pid)


def test_guard_closes_while_a_forked_process_holds_its_pipe() -> None:
    guard = process_tree.Guard()
    forked = os.fork()
    if forked == 0:
        signal.pause()
    try:
        guard.close()
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


# A minimal supervisor: it registers its session with a guard, and then waits to be killed.
SUPERVISOR = """
import os, signal, sys
from gradwire.launch.process_tree import Guard
guard = Guard()
guard.watch(int(sys.argv[1]))
if "forget" in sys.argv:
    guard.forget(int(sys.argv[1]))
if "fork" in sys.argv and (child := os.fork()) == 0:
    signal.pause()
print(guard.pid, child if "fork" in sys.argv else 0, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("how", ["plain", "fork", "signal"])
def test_guard_kills_when_its_supervisor_is_killed(how: str, family: tuple[subprocess.Popen[str], list[int]]) -> None:
    """Also when a process that the supervisor forked still holds the pipe to the guard, and after other signals."""
    leader, others = family
    watched = [Watched(pid) for pid in others]
    guard, forked = _kill_supervisor_of(leader.pid, how)
    try:
        assert leader.wait(LONG) == -signal.SIGKILL
        assert all(other.ends() for other in watched)
        assert guard.ends()
    finally:
        if forked:
            os.kill(forked, signal.SIGKILL)


def test_guard_does_not_kill_forgotten_sessions(family: tuple[subprocess.Popen[str], list[int]]) -> None:
    leader, _ = family
    guard, _ = _kill_supervisor_of(leader.pid, "forget")
    assert guard.ends()
    assert leader.poll() is None


def _ignores(pid: int, number: int) -> bool:
    ignored = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line)
    return bool(int(ignored.split()[1], 16) >> (number - 1) & 1)


def _kill_supervisor_of(session: int, how: str) -> tuple[Watched, int]:
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(session), how], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        guard, forked = map(int, supervisor.stdout.readline().split())
        watched = Watched(guard)
        try:
            if how == "signal":
                assert eventually(lambda: _ignores(guard, signal.SIGUSR2))
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
                    os.kill(guard, number)
        finally:
            supervisor.kill()
    return watched, forked
