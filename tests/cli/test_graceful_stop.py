"""Signals that stop training after a whole step, with real processes: all ranks leave, and the job continues later."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL, SIGTERM, SIGUSR2

import pytest

from gradwire.launch.worker_setup import free_port
from support.coordinator_command import TOKEN, Process
from support.coordinator_command import coordinate_fixture as coordinate_fixture
from support.launch_jobs import LONG, start_command, written
from support.leftovers import children_of

Launcher = subprocess.Popen[str]
Start = Callable[..., Launcher]

# Arguments: the total, and for a rank that signals itself its rank, the signal and the step.
TRAIN = """
    import os, sys
    import numpy as np
    import gradwire as gw

    total, rank, number, at, *_ = map(int, [*sys.argv[1:], -1, 0, 0])
    weights = {"w": np.zeros(1000)}
    run = gw.elastic(weights, checkpoint="checkpoints")
    first = []
    try:
        for step in run.steps(total):
            first = first or [step.index]
            with step:
                weights["w"] += run.group.all_reduce(np.ones(1000), op="mean")
                if step.index == at and run.group.rank == rank:
                    os.kill(os.getpid(), number)
                if step.index == 3:
                    print("trains", os.getpid(), flush=True)
        print("after the loop")
    finally:
        print("left", *first, run.committed, run.stopping)
"""
# Each rank waits in the thread that writes its checkpoint until the test opens the pipe.
SLOW = """
    import os
    from gradwire.training.checkpoints import tensor_file

    write_all = tensor_file.write_all
    def slow_write(*args):
        print("writes", os.getpid(), flush=True)
        with open("pipe"):
            return write_all(*args)
    tensor_file.write_all = slow_write
"""
STRICT = ("--grace", "0", "--kill-after", "0")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(arguments…): the `gradwire` command, killed at the end if it has not ended."""
    (tmp_path / "tmp").mkdir()
    written(tmp_path, TRAIN, "train.py")
    written(tmp_path, SLOW + TRAIN, "slow.py")
    os.mkfifo(tmp_path / "pipe")
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Launcher:
            return start_command(stack, tmp_path, os.environ, *arguments)

        yield start


def finish(process: Launcher) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LONG)
    return process.returncode, out, err


def lines(process: Launcher, word: str, count: int) -> dict[int, int]:
    """The pids of `count` ranks that have printed this word, by rank; other lines of the output are skipped."""
    assert process.stdout is not None
    found: dict[int, int] = {}
    for line in process.stdout:
        match = re.match(rf"\[(\d+)\] {word} (\d+)", line)
        if match:
            found[int(match[1])] = int(match[2])
        if len(found) == count:
            return found
    raise AssertionError(f"the launcher ended: {process.communicate()}")


def left(out: str) -> set[tuple[int, int]]:
    """The first and the last step of each rank that left because of a signal, and how many ranks left so."""
    return {(int(first), int(last)) for first, last in re.findall(r"left (\d+) (\d+) True", out)}


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.parent.name[:17] for path in folder.glob("checkpoints/step-*/manifest.json"))


def test_stop_signal_to_one_of_four_ranks_makes_all_leave_and_three_continue(start: Start, tmp_path: Path) -> None:
    code, out, err = finish(start("run", "-n", "4", *STRICT, "train.py", "1000000", "2", str(int(SIGUSR2)), "5"))
    assert code == 140, out + err
    ((first, last),) = left(out)
    assert (first, out.count("left 0")) == (0, 4)
    assert 5 <= last <= 7
    assert "after the loop" not in out
    assert checkpoints(tmp_path) == [f"step-{last:012}"]
    announced, end = err.splitlines()
    assert announced.startswith("gradwire: rank 2 received SIGUSR2: all ranks leave after the current step")
    assert end.startswith("gradwire: stopped by SIGUSR2 after a signal to rank 2; logs in ")

    code, out, err = finish(start("run", "-n", "3", "train.py", str(last + 3)))
    assert code == 0, out + err
    assert out.count(f"left {last + 1} {last + 2} False") == 3


@pytest.mark.parametrize("number", [SIGTERM, SIGUSR2])
def test_stop_signal_to_the_launcher_makes_all_leave(number: signal.Signals, start: Start, tmp_path: Path) -> None:
    run = start("run", "-n", "2", *STRICT, "train.py", "1000000")
    lines(run, "trains", 2)
    run.send_signal(number)
    code, out, err = finish(run)
    assert code == 128 + number, out + err
    ((_, last),) = left(out)
    assert checkpoints(tmp_path) == [f"step-{last:012}"]
    assert f"gradwire: {number.name}: all ranks leave after the current step and their last checkpoint" in err
    assert err.splitlines()[-1].startswith(f"gradwire: stopped by {number.name}; logs in ")


def test_stop_of_an_elastic_job_replaces_no_worker(start: Start, tmp_path: Path) -> None:
    elastic = ("run", "-n", "2", "--min", "1", "--restarts", "5", *STRICT)
    code, out, err = finish(start(*elastic, "train.py", "1000000", "1", str(int(SIGTERM)), "5"))
    assert code == 143, out + err
    assert len(left(out)) == 1
    assert out.count("left 0") == 2
    assert "takes its place" not in err
    assert re.search(r"gradwire: stopped by SIGTERM after a signal to worker [01]; logs in ", err)


@pytest.mark.slow
def test_stop_signal_to_all_processes_of_an_elastic_job_makes_all_leave(start: Start, tmp_path: Path) -> None:
    """A scheduler may signal the launcher, its guard, the coordinator and the workers."""
    run = start("run", "-n", "2", "--min", "1", *STRICT, "train.py", "1000000")
    lines(run, "trains", 2)
    for pid in (*children_of(run.pid), run.pid):
        os.kill(pid, SIGUSR2)
    code, out, err = finish(run)
    assert code == 140, out + err
    assert len(left(out)) == len(checkpoints(tmp_path)) == 1
    assert "is restarted" not in err


@pytest.mark.parametrize("to_launcher", [True, False])
def test_stop_waits_for_a_slow_checkpoint(to_launcher: bool, start: Start, tmp_path: Path) -> None:
    run = start("run", "-n", "3", *STRICT, "slow.py", "1000000")
    pids = lines(run, "trains", 3)
    run.send_signal(SIGUSR2) if to_launcher else os.kill(pids[1], SIGUSR2)
    lines(run, "writes", 1)
    with open(tmp_path / "pipe", "w"):
        code, out, err = finish(run)
    assert code == 140, out + err
    ((_, last),) = left(out)
    assert checkpoints(tmp_path) == [f"step-{last:012}"]


@pytest.mark.slow
def test_stop_kills_after_the_stop_timeout(start: Start, tmp_path: Path) -> None:
    run = start("run", "-n", "2", "--stop-timeout", "0.5", "slow.py", "1000000")
    os.kill(lines(run, "trains", 2)[1], SIGTERM)
    code, out, err = finish(run)
    assert code == 143, out + err
    assert "gradwire: the ranks did not leave within 0.5 s (--stop-timeout): they are killed\n" in err
    assert checkpoints(tmp_path) == []


@pytest.mark.slow
def test_stop_second_signal_to_the_launcher_kills(start: Start, tmp_path: Path) -> None:
    """Only one of the same kind: schedulers send SIGUSR2 first, and SIGTERM later."""
    run = start("run", "-n", "2", "slow.py", "1000000")
    lines(run, "trains", 2)
    run.send_signal(SIGUSR2)
    lines(run, "writes", 1)
    run.send_signal(SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(0.3)
    run.send_signal(SIGTERM)
    code, out, err = finish(run)
    assert code == 140, out + err
    assert checkpoints(tmp_path) == []


@pytest.mark.slow
def test_stop_rank_killed_during_the_last_checkpoint_is_the_root_cause(start: Start) -> None:
    run = start("run", "-n", "3", "slow.py", "1000000")
    pids = lines(run, "trains", 3)
    os.kill(pids[0], SIGTERM)
    lines(run, "writes", 1)
    os.kill(pids[2], SIGKILL)
    code, out, err = finish(run)
    assert code == 137, out + err
    assert f"gradwire: the root cause:\nrank 2 (pid {pids[2]}) was killed by SIGKILL" in err


@pytest.mark.slow
def test_stop_elastic_worker_killed_during_the_last_checkpoint_is_not_replaced(start: Start, tmp_path: Path) -> None:
    run = start("run", "-n", "3", "--min", "1", "--restarts", "3", "slow.py", "1000000")
    pids = lines(run, "trains", 3)
    os.kill(pids[0], SIGTERM)
    lines(run, "writes", 1)
    os.kill(pids[2], SIGKILL)
    with open(tmp_path / "pipe", "w"):
        code, out, err = finish(run)
    assert code == 143, out + err
    assert re.search(rf"worker 2 \(pid {pids[2]}\) was killed by SIGKILL .*; 2 workers continue\n", err)
    assert len(checkpoints(tmp_path)) == 1


def test_stop_requested_by_the_program_ends_well(start: Start, tmp_path: Path) -> None:
    train = TRAIN.replace("os.kill(os.getpid(), number)", "run.request_stop()")
    written(tmp_path, train, "requests.py")
    code, out, err = finish(start("run", "-n", "3", "requests.py", "1000000", "1", "0", "5"))
    assert (code, err) == (0, "")
    assert out.count("after the loop") == 3
    assert len(left(out)) == 1
    assert len(checkpoints(tmp_path)) == 1


def test_stop_signal_to_a_script_without_steps_ends_it(start: Start, tmp_path: Path) -> None:
    written(tmp_path, "import os, signal\nprint('trains', os.getpid(), flush=True)\nsignal.pause()\n", "plain.py")
    run = start("run", "-n", "2", "plain.py")
    lines(run, "trains", 2)
    run.send_signal(SIGUSR2)
    code, _, err = finish(run)
    assert code == 140
    assert err.startswith("gradwire: stopped by SIGUSR2; logs in ")


def test_stop_signal_without_a_launcher_has_the_same_exit_code(start: Start, tmp_path: Path) -> None:
    command = [sys.executable, "train.py", "1000000", "0", str(int(SIGTERM)), "5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG, check=False)
    assert (done.returncode, done.stderr) == (143, "")
    assert len(left(done.stdout)) == len(checkpoints(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("receiver", ["run", "join", "worker of run", "worker of join"])
def test_stop_reaches_workers_of_other_launchers(receiver: str, start: Start, tmp_path: Path) -> None:
    run = start("run", "-n", "1", "--min", "1", "--max", "2", "--restarts", "3", "train.py", "1000000000")
    assert run.stderr is not None
    address = re.search(r"gradwire join (\S+) ", run.stderr.readline())
    assert address is not None
    here = lines(run, "trains", 1)
    code = TRAIN.replace("step.index == 3", "step.index == first[0] + 1")
    written(tmp_path, code, "joined.py")
    joined = start("join", "--restarts", "3", address[1], "joined.py", "1000000000")
    there = lines(joined, "trains", 1)
    match receiver:
        case "run" | "join":
            (run if receiver == "run" else joined).send_signal(SIGUSR2)
        case _:
            os.kill((here if receiver == "worker of run" else there)[0], SIGUSR2)
    steps = set()
    for process in (run, joined):
        status, out, err = finish(process)
        assert status == 140, out + err
        assert "gradwire: stopped by SIGUSR2" in err.splitlines()[-1]
        assert "takes its place" not in err
        steps |= {last for _, last in left(out)}
    assert len(steps) == 1


@pytest.mark.slow
@pytest.mark.parametrize("to_launcher", [True, False])
def test_stop_reaches_ranks_on_other_nodes(to_launcher: bool, start: Start, tmp_path: Path) -> None:
    common = ("run", "--nnodes", "2", "-n", "1", "--address", f"127.0.0.1:{free_port()}", *STRICT)
    nodes = [start(*common, "--node-rank", str(node), "train.py", "1000000") for node in range(2)]
    pids = [lines(node, "trains", 1) for node in nodes]
    nodes[1].send_signal(SIGUSR2) if to_launcher else os.kill(pids[1][1], SIGUSR2)
    steps = set()
    for node in nodes:
        code, out, err = finish(node)
        assert code == 140, out + err
        assert "root cause" not in err
        steps |= left(out)
    assert len(steps) == len(checkpoints(tmp_path)) == 1


@pytest.mark.slow
def test_stop_of_a_job_with_its_own_coordinator_allows_to_start_it_again(
    start: Start, coordinate: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = coordinate("--job", "again", "--size", "2", "--min", "2", "--max", "2", "--no-journal")
    monkeypatch.setenv("GRADWIRE_TOKEN", TOKEN)
    first = start("join", "-n", "2", coordinator.address, "train.py", "1000000")
    lines(first, "trains", 2)
    first.send_signal(SIGTERM)
    code, out, err = finish(first)
    assert code == 143, out + err
    ((_, last),) = left(out)
    code, out, err = finish(start("join", "-n", "2", coordinator.address, "train.py", str(last + 4)))
    assert code == 0, out + err
    assert out.count(f"left {last + 1} {last + 3} False") == 2
