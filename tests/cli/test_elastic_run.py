"""Elastic jobs as their users have them: `gradwire run --min --max --restarts --chaos`, `gradwire join`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradwire.cli import main
from launch.jobs import LONG, Watched, written
from leftovers import children_of
from ranks import eventually

Start = Callable[..., subprocess.Popen[str]]

TRAIN = """
    import os, signal, time
    import numpy as np
    import gradwire as gw
    number = int(os.environ["GRADWIRE_MEMBER"].rpartition("/")[2])
    weights = {"w": np.zeros(4), "together": np.zeros(1)}
    run = gw.elastic(weights)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(arguments…): the `gradwire` command, killed at the end if it has not ended."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "gradwire", *arguments],
                cwd=tmp_path,
                env=os.environ | {"TMPDIR": str(tmp_path / "tmp"), "XDG_RUNTIME_DIR": str(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        (tmp_path / "tmp").mkdir()
        yield start


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LONG)
    return process.returncode, out, err


def children(pid: int) -> list[Watched]:
    """The processes that a process has started: the workers, the coordinator, the guard."""
    found = []
    for child in children_of(pid):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found.append(Watched(child))
    return found


def test_a_lost_worker_is_replaced_and_the_training_ends_as_if_nothing_had_been(start: Start, tmp_path: Path) -> None:
    train = """
    for step in run.steps(60):
        with step:
            weights["w"] += run.group.all_reduce(np.ones(4), op="mean")
            time.sleep(0.02)
        if number == 1 and step.index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    print("done", weights["w"][0], run.committed)
    """
    written(tmp_path, TRAIN + train, "train.py")
    code, out, err = finish(start("run", "--min", "1", "--max", "3", "-n", "2", "--restarts", "2", "train.py"))
    assert code == 0, out + err
    assert re.search(r"worker 1 \(pid \d+\) was killed by SIGKILL .*; worker 2 \(pid \d+\) takes its place", err), err
    assert "(restart 1 of 2)" in err
    assert "gradwire: the job ended well, with " in err
    assert "[0] done 60.0 59\n" in out  # the other one may have come too late
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.slow
def test_another_launcher_joins(start: Start, tmp_path: Path) -> None:
    train = """
    for step in run.steps(10**6):
        with step:
            weights["w"] += run.group.all_reduce(np.ones(4), op="mean")
            weights["together"] += run.group.size == 2
            time.sleep(0.01)
        if weights["together"][0] >= 3:
            break
    print("done", run.group.size, *weights["together"])
    """
    written(tmp_path, TRAIN + train, "train.py")
    run = start("run", "--min", "1", "--max", "2", "train.py")
    assert run.stderr is not None
    welcome = run.stderr.readline()
    found = re.search(r"gradwire join (\S+) train.py", welcome)
    assert found is not None, welcome
    joined = start("join", found[1], "train.py")
    for process in (run, joined):
        code, out, err = finish(process)
        assert (code, out) == (0, "[0] done 2 3.0\n"), err


@pytest.mark.slow
def test_the_coordinator_may_die(start: Start, tmp_path: Path) -> None:
    train = """
    for step in run.steps(100):
        with step:
            weights["w"] += run.group.all_reduce(np.ones(4), op="mean")
            time.sleep(0.02)
    print("done", weights["w"][0])
    """
    written(tmp_path, TRAIN + train, "train.py")
    chaos = ("--chaos", "restart coordinator @2s")
    code, out, err = finish(start("run", "--min", "2", "--log-dir", "logs", *chaos, "train.py"))
    assert (code, sorted(out.splitlines())) == (0, ["[0] done 100.0", "[1] done 100.0"]), err
    assert {"coordinator.log", "worker-0.log", "worker-1.log"} <= {path.name for path in (tmp_path / "logs").iterdir()}
    assert re.search(r"chaos: killed the coordinator \(pid (\d+)\) at 2\.\d s\n", err), err
    assert re.search(r"gradwire: the coordinator \(pid (\d+)\) was killed by chaos; it is started anew\n", err), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(number: signal.Signals, start: Start, tmp_path: Path) -> None:
    """By Ctrl-C, or if the launcher is killed: neither a worker nor the coordinator."""
    written(tmp_path, "import signal\nprint('ready')\nsignal.pause()\n", "train.py")
    run = start("run", "--min", "2", "train.py")
    assert run.stdout is not None
    assert sorted(run.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    assert eventually(lambda: len(children(run.pid)) == 4)
    watched = children(run.pid)
    run.send_signal(number)
    code, _, err = finish(run)
    assert all(one.ends() for one in watched)
    assert code == (130 if number == signal.SIGINT else -9)
    assert ("gradwire: stopped by SIGINT" in err) == (number == signal.SIGINT)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--max", "8", "here.py"], "Missing option '-n'"),
        (["run", "--min", "3", "-n", "2", "here.py"], "-n 2 is not between --min 3 and --max 2"),
        (["run", "--max", "3", "-n", "4", "here.py"], "-n 4 is not between --min 1 and --max 3"),
        (["run", "-n", "2", "--restarts", "-1", "here.py"], "-1 is not in the range"),
        (["run", "-n", "2", "--listen", "127.0.0.1", "here.py"], "--listen is for elastic jobs"),
        (["run", "-n", "2", "--chaos", "kil 2 @5s", "here.py"], "there is no 'kil'"),
        (["run", "-n", "2", "--chaos", "cut 0-1 @5s", "here.py"], "'cut' needs an elastic job"),
        (["join", "127.0.0.1:1"], "Missing argument 'SCRIPT'"),
        (["join", "127.0.0.1:1", "missing.py"], "there is no script 'missing.py'"),
        (["join", "--token-file", "none", "127.0.0.1:1", "here.py"], "does not exist"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "", "here.py")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["join", "nowhere", "here.py"], "the port is missing"),
        (["run", "--min", "1", "--listen", "0.0.0.0", "here.py"], "name an address of this machine"),
        (["run", "--min", "1", "--listen", "10.0.0.1", "here.py"], "set GRADWIRE_TOKEN"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "", "here.py")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert said in result.output


def test_help_shows_examples() -> None:
    shown = CliRunner().invoke(main, ["run", "--help"]).output
    assert "gradwire run --min 2 --max 8 -n 4 --restarts 3 train.py" in shown
    assert "gradwire join 127.0.0.1:23456 train.py" in CliRunner().invoke(main, ["join", "--help"]).output
