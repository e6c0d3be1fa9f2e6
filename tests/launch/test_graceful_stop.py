"""Workers that leave after a whole step because of a signal: what the launcher concludes, and how it treats them.

The scripts here write the notices of such workers themselves; tests/cli/test_graceful_stop.py runs real training.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR2

import pytest

from gradwire.job.stop_notices import NoticeKind, StopNotice
from gradwire.launch.graceful_stop import GracefulStop
from gradwire.launch.root_cause import Ending, describe, from_message, to_message
from gradwire.launch.worker_process import Task
from support.launch_jobs import LONG, WAIT, Job, Ready, written
from support.ranks import eventually

RECEIVED = StopNotice(NoticeKind.RECEIVED, SIGUSR2)
AGREED = StopNotice(NoticeKind.AGREED, SIGUSR2)


@pytest.fixture(name="stop")
def stop_fixture() -> GracefulStop:
    return GracefulStop("rank", timeout=120)


# -- conclusions ------------------------------------------------------------------------------------------------------


def test_stop_signal_to_the_launcher_is_announced_once(stop: GracefulStop) -> None:
    assert stop.asked(SIGUSR2, watching=True) == (
        "SIGUSR2: all ranks leave after the current step and their last checkpoint; waiting up to 120 s"
    )
    assert stop.noticed(0, RECEIVED, forwarded=True) == stop.noticed(0, AGREED, forwarded=True) == ""
    assert (stop.stopped_by, stop.origin) == (SIGUSR2, "")


def test_stop_signal_to_workers_that_do_not_watch_yet_is_announced_by_the_first_report(stop: GracefulStop) -> None:
    assert stop.asked(SIGTERM, watching=False) == ""
    assert "waiting up to 120 s" in stop.noticed(1, StopNotice(NoticeKind.RECEIVED, SIGTERM), forwarded=True)


def test_stop_signal_to_workers_names_them(stop: GracefulStop) -> None:
    assert "rank 3 received SIGUSR2: all ranks leave" in stop.noticed(3, RECEIVED, forwarded=False)
    assert stop.noticed(2, RECEIVED, forwarded=False) == ""
    assert (stop.stopped_by, stop.origin) == (None, "")  # the worker may be lost before the others learn of the signal
    assert stop.noticed(0, AGREED, forwarded=False) == ""
    assert (stop.stopped_by, stop.origin) == (SIGUSR2, " after a signal to ranks 2, 3")


def test_stop_signal_elsewhere_is_announced_when_the_workers_here_agree(stop: GracefulStop) -> None:
    assert "all ranks leave because of SIGUSR2 to one of them" in stop.noticed(0, AGREED, forwarded=False)
    assert stop.origin == " after a signal to another launcher or one of its ranks"


def test_stop_exit_signal_is_the_one_that_the_ranks_agreed_upon(stop: GracefulStop) -> None:
    """A rank received SIGTERM and the launcher SIGUSR2: all launchers of the job have the same exit code."""
    stop.asked(SIGUSR2, watching=True)
    stop.noticed(0, StopNotice(NoticeKind.AGREED, SIGTERM), forwarded=True)
    assert stop.stopped_by == SIGTERM


def test_stop_interrupt_is_not_replaced_by_what_workers_report(stop: GracefulStop) -> None:
    assert stop.asked(SIGINT, watching=True) == ""
    assert stop.noticed(0, StopNotice(NoticeKind.RECEIVED, SIGTERM), forwarded=True) == ""
    stop.noticed(0, StopNotice(NoticeKind.AGREED, SIGTERM), forwarded=True)
    assert stop.stopped_by == SIGINT


@pytest.mark.parametrize(("status", "stop_signal", "failed"), [(140, 12, False), (143, 12, True), (140, 0, True)])
def test_ending_of_a_worker_that_left_gracefully_is_no_failure(status: int, stop_signal: int, failed: bool) -> None:
    ending = Ending(0, 99, status, 10.0, stop_signal=stop_signal)
    assert ending.failed == failed
    assert from_message(to_message(ending, 10.0), "there", 10.0).failed == failed


# -- supervision ------------------------------------------------------------------------------------------------------

WORKER = """
import os, signal, sys
pipe = int(os.environ["GRADWIRE_STOP_NOTICES"].partition(":")[0])
def notice(kind, number=0):
    os.write(pipe, kind + bytes([number]))
signals = {signal.SIGTERM, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
rank = int(os.environ["RANK"])
notice(b"W")
"""
LEAVES = """
say(b"steps\\n")
if rank == 1:
    notice(b"R", signal.sigwait(signals))
    os.write(int(sys.argv[2]), b".")
os.read(int(sys.argv[1]), 1)  # "the vote" after the step
os.write(int(sys.argv[2]), b".")
notice(b"A", 12)
ready.recv(1)  # "the checkpoint"
sys.exit(140)
"""
FINISHES = """
say(b"last step\\n")
notice(b"R", signal.sigwait(signals))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
notice(b"N")
"""


@pytest.fixture
def ready() -> Iterator[Ready]:
    found = Ready()
    yield found
    found.close()


StartJob = Callable[..., Job]


@pytest.fixture(name="start")
def start_fixture(tmp_path: Path, ready: Ready) -> Iterator[StartJob]:
    def start(code: str, *, kill_after: float = 0.0, stop_timeout: float = LONG) -> Job:
        script = written(tmp_path, WORKER + ready.code + code)
        task = Task(Task.script(script, *map(str, vote)).arguments, inherited=vote)
        return Job(task, 2, grace=0.0, kill_after=kill_after, stop_timeout=stop_timeout)

    vote = os.pipe()
    yield start
    for end in vote:
        os.close(end)


def test_supervisor_signal_to_one_rank_waits_for_all_and_is_no_failure(start: StartJob, ready: Ready) -> None:
    job = start(LEAVES)
    with job.supervisor:
        with ready.told(2):
            os.kill(job.supervisor.workers[1].pid, SIGUSR2)
            assert eventually(lambda: [worker.stop_signal for worker in job.supervisor.workers] == [12, 12])
            assert not job.supervisor.wait(0.1)
        ended = job.ended()
    outcome = ended.outcome
    assert (outcome.exit_code, outcome.root, outcome.stopped_by) == (140, None, SIGUSR2)
    assert [ending.status for ending in outcome.endings] == [140, 140]
    assert outcome.stop_origin == " after a signal to rank 1"
    assert ended.err.count("gradwire: ") == 1


def test_supervisor_asked_to_stop_does_not_kill_workers_that_watch(start: StartJob, ready: Ready) -> None:
    job = start(LEAVES)
    with job.supervisor:
        with ready.told(2):
            job.supervisor.stop(SIGUSR2)
            assert eventually(lambda: [worker.stop_signal for worker in job.supervisor.workers] == [12, 12])
            assert not job.supervisor.wait(0.1)
        ended = job.ended()
    assert [ending.status for ending in ended.outcome.endings] == [140, 140]
    assert (ended.outcome.exit_code, ended.outcome.stop_origin) == (140, "")


@pytest.mark.parametrize("to_launcher", [True, False])
def test_supervisor_kills_workers_that_do_not_leave_within_the_stop_timeout(
    to_launcher: bool, start: StartJob, ready: Ready
) -> None:
    job = start(LEAVES, kill_after=LONG, stop_timeout=0.2)
    with job.supervisor, ready.told(2):
        if to_launcher:
            job.supervisor.stop(SIGUSR2)
        else:
            os.kill(job.supervisor.workers[1].pid, SIGUSR2)
        ended = job.ended()
    assert [ending.status for ending in ended.outcome.endings] == [-SIGKILL, -SIGKILL]
    assert (ended.outcome.exit_code, ended.outcome.root) == (140, None)
    assert "gradwire: the ranks did not leave within 0.2 s (--stop-timeout): they are killed\n" in ended.err


def test_supervisor_does_not_signal_workers_again_that_leave_already(start: StartJob, ready: Ready) -> None:
    """A second SIGTERM would end them at once."""
    job = start(LEAVES.replace("140", "140 if not signal.sigpending() & signals else 3"))
    with job.supervisor:
        with ready.told(2):
            os.kill(job.supervisor.workers[1].pid, SIGUSR2)
            assert eventually(lambda: [worker.stop_signal for worker in job.supervisor.workers] == [12, 12])
            job.supervisor.stop(SIGTERM)
            assert not job.supervisor.wait(0.1)
        ended = job.ended()
    assert [ending.status for ending in ended.outcome.endings] == [140, 140]
    assert (ended.outcome.exit_code, ended.outcome.stop_origin) == (140, "")


def test_supervisor_second_request_kills_workers_that_leave(start: StartJob, ready: Ready) -> None:
    job = start(LEAVES)
    with job.supervisor, ready.told(2):
        job.supervisor.stop(SIGUSR2)
        assert eventually(lambda: all(worker.stop_signal for worker in job.supervisor.workers))
        job.supervisor.stop(SIGKILL)
        ended = job.ended()
    assert (ended.outcome.exit_code, ended.outcome.root) == (140, None)
    assert "did not leave" not in ended.err


@pytest.mark.parametrize("to_launcher", [True, False])
def test_supervisor_rank_killed_while_it_leaves_is_the_root_cause(
    to_launcher: bool, start: StartJob, ready: Ready
) -> None:
    job = start(LEAVES)
    with job.supervisor:
        with ready.told(2):
            workers = job.supervisor.workers
            job.supervisor.stop(SIGTERM) if to_launcher else os.kill(workers[1].pid, SIGTERM)
            assert eventually(lambda: [worker.stop_signal for worker in workers] == [12, 12])
            os.kill(workers[0].pid, SIGKILL)
            assert eventually(lambda: workers[0].gone)
        ended = job.ended()
    root = ended.outcome.root
    assert root is not None
    assert (root.number, ended.outcome.exit_code) == (0, 137)
    assert "was killed by SIGKILL" in describe(root)


def test_supervisor_exception_of_a_rank_that_leaves_is_the_root_cause(start: StartJob, ready: Ready) -> None:
    job = start(LEAVES.replace("sys.exit(140)", "sys.exit(140) if rank else print(1 / 0)"))
    with job.supervisor:
        with ready.told(2):
            job.supervisor.stop(SIGUSR2)
            assert eventually(lambda: [worker.stop_signal for worker in job.supervisor.workers] == [12, 12])
        ended = job.ended()
    assert ended.outcome.root is not None
    assert ended.outcome.root.report is not None
    assert (ended.outcome.root.report.type, ended.outcome.exit_code) == ("ZeroDivisionError", 1)


def test_supervisor_ends_a_script_that_does_not_watch_any_more(start: StartJob, ready: Ready) -> None:
    """The signal came after the last step: the script must not run on, as if nobody had asked it to stop."""
    job = start(f"{FINISHES}{WAIT}")
    with job.supervisor:
        with ready.told(2):
            job.supervisor.stop(SIGTERM)
        ended = job.ended()
    assert [ending.status for ending in ended.outcome.endings] == [-signal.SIGTERM, -signal.SIGTERM]
    assert (ended.outcome.exit_code, ended.outcome.root) == (143, None)


def test_supervisor_worker_that_leaves_may_take_its_time_to_exit(start: StartJob, ready: Ready) -> None:
    """A thread that still uploads a file does not count as a script that has failed and hangs."""
    slow_exit = LEAVES.replace(
        "ready.recv(1)", "import threading; threading.Thread(target=lambda: ready.recv(1)).start()"
    )
    job = start(slow_exit)
    with job.supervisor:
        with ready.told(2):
            os.kill(job.supervisor.workers[1].pid, SIGUSR2)
            assert eventually(lambda: all(worker.report for worker in job.supervisor.workers))
            assert not job.supervisor.wait(2.5)  # longer than a failed script may take
        ended = job.ended()
    assert [ending.status for ending in ended.outcome.endings] == [140, 140]
