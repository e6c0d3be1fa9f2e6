"""Elastic jobs on the command line: `gradwire run --min --max --restarts --chaos` and `gradwire join`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradwire.cli import main
from gradwire.launch.worker_setup import free_port
from gradwire.membership.coordinator.service import Coordinator
from gradwire.security.secret import job_secret
from support.launch_jobs import LONG, Watched, start_command, written
from support.leftovers import children_of
from support.ranks import eventually

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
            return start_command(stack, tmp_path, os.environ, *arguments)

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


def address_of(run: subprocess.Popen[str]) -> str:
    """The address at which the job of a launcher can be joined."""
    assert run.stderr is not None
    welcome = run.stderr.readline()
    found = re.search(r"gradwire join (\S+) train.py", welcome)
    assert found is not None, welcome
    return found[1]


def test_elastic_run_lost_worker_is_replaced_and_the_result_is_the_same(start: Start, tmp_path: Path) -> None:
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
    assert "[0] done 60.0 59\n" in out  # the replacement may have started too late
    assert not list((tmp_path / "tmp").iterdir())


STEPS = """
    for step in run.steps(5):
        with step:
            weights["w"] += run.group.all_reduce(np.ones(4), op="mean")
    print("done", weights["w"][0], run.group.generation)
"""
FOREVER = """
    for step in run.steps(10**9):
        with step:
            weights["w"] += run.group.all_reduce(np.ones(4), op="mean")
            time.sleep(0.01)
        if step.index == 5:
            print("trains", run.group.size, flush=True)
"""


def test_elastic_run_again_in_the_same_log_folder_starts_a_new_training(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under the same job name; the logs of the first run are kept in a subfolder."""
    monkeypatch.setenv("GRADWIRE_JOB", "digits")
    written(tmp_path, TRAIN + STEPS, "train.py")
    first = finish(start("run", "--min", "1", "-n", "2", "--log-dir", "logs", "train.py"))
    second = finish(start("run", "--min", "1", "--log-dir", "logs", "train.py"))
    assert (first[0], sorted(first[1].splitlines())) == (0, ["[0] done 5.0 1", "[1] done 5.0 1"]), first[2]
    assert second[:2] == (0, "[0] done 5.0 1\n"), second[2]
    now, before = tmp_path / "logs", tmp_path / "logs" / "earlier-1"
    assert sorted(path.name for path in now.glob("*.log")) == ["coordinator.log", "worker-0.log"]
    assert sorted(path.name for path in before.glob("*.log")) == ["coordinator.log", "worker-0.log", "worker-1.log"]
    assert "resumed" not in (now / "coordinator.log").read_text()
    assert (before / "coordinator.journal").stat().st_size > 0


def test_elastic_run_after_a_killed_launcher_starts_at_the_same_port(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same port and in the same folder, while the guard may still be ending processes of the first launcher."""
    monkeypatch.setenv("GRADWIRE_JOB", "digits")
    listen = f"127.0.0.1:{free_port()}"
    options = ("run", "--min", "1", "-n", "2", "--listen", listen, "--log-dir", "logs")
    written(tmp_path, TRAIN + FOREVER, "forever.py")
    written(tmp_path, TRAIN + STEPS, "train.py")
    killed = start(*options, "forever.py")
    assert killed.stdout is not None
    assert sorted(killed.stdout.readline() for _ in range(2)) == ["[0] trains 2\n", "[1] trains 2\n"]
    killed.kill()
    code, out, err = finish(start(*options, "train.py"))
    assert (code, sorted(out.splitlines())) == (0, ["[0] done 5.0 1", "[1] done 5.0 1"]), err
    assert "trains 2" in (tmp_path / "logs" / "earlier-1" / "worker-0.log").read_text()


@pytest.mark.slow
def test_elastic_run_restarted_coordinator_resumes_the_journal_of_this_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_JOB", "digits")
    train = """
    logs = os.environ["LOGS"]
    for step in run.steps(10**9):
        with step:
            time.sleep(0.01)
            resumed = "resumed from" in open(logs).read()
            if run.group.all_reduce(float(resumed)):
                break
    print("done", run.group.generation)
    """
    monkeypatch.setenv("LOGS", str(tmp_path / "logs" / "coordinator.log"))
    written(tmp_path, TRAIN + STEPS, "before.py")
    assert finish(start("run", "--min", "1", "--log-dir", "logs", "before.py"))[0] == 0
    written(tmp_path, TRAIN + train, "train.py")
    chaos = ("--chaos", "restart coordinator @2s")
    code, out, err = finish(start("run", "--min", "1", "--log-dir", "logs", *chaos, "train.py"))
    assert (code, out) == (0, "[0] done 1\n"), err


def test_elastic_run_and_join_in_one_log_folder_write_separate_logs(start: Start, tmp_path: Path) -> None:
    written(tmp_path, TRAIN + FOREVER, "train.py")
    run = start("run", "--min", "1", "--max", "2", "--log-dir", "logs", "train.py")
    joined = start("join", address_of(run), "--log-dir", "logs", "train.py")
    assert joined.stderr is not None
    assert f"the logs of this one are in logs/launcher-{joined.pid}\n" in joined.stderr.readline()
    assert joined.stdout is not None
    assert eventually((tmp_path / "logs" / f"launcher-{joined.pid}" / "worker-0.log").exists)
    for process in (joined, run):
        process.send_signal(signal.SIGINT)
        assert finish(process)[0] == 130
    assert (tmp_path / "logs" / "worker-0.log").exists()


def test_elastic_run_user_secret_is_in_no_process_environment(start: Start, tmp_path: Path) -> None:
    written(tmp_path, TRAIN + FOREVER, "train.py")
    run = start("run", "--min", "1", "train.py")
    assert run.stdout is not None
    assert run.stdout.readline() == "[0] trains 1\n"  # the workers read the secret from this user's file
    secret = (tmp_path / "gradwire" / "secret").read_bytes().strip()
    environments = [Path(f"/proc/{child.pid}/environ").read_bytes() for child in children(run.pid)]
    assert len(environments) == 3
    for environment in environments:
        assert secret not in environment
        assert b"GRADWIRE_TOKEN" not in environment


def test_elastic_run_given_token_is_passed_to_the_workers(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_TOKEN", "a token that was given")
    written(tmp_path, TRAIN + "    print(os.environ['GRADWIRE_TOKEN'])\n", "train.py")
    assert finish(start("run", "--min", "1", "train.py"))[:2] == (0, "[0] a token that was given\n")


@pytest.mark.slow
def test_join_with_a_token_keeps_the_leases_of_the_workers(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than a lease lasts; then a third worker joins the same training."""
    monkeypatch.setenv("GRADWIRE_JOB", "digits")
    train = """
    for step in run.steps(10**9):
        with step:
            weights["together"] += run.group.size == 2
            time.sleep(0.01)
            done = run.group.all_reduce(1.0) == 3
        if weights["together"][0] == 1300 and run.group.size == 2:
            print("a lease has passed", flush=True)
        if done:
            break
    print("done", run.group.size, weights["together"][0] >= 1300)
    """
    written(tmp_path, TRAIN + train, "train.py")
    run = start("run", "--min", "1", "--max", "3", "--log-dir", "logs", "train.py")
    address = address_of(run)
    code, token, err = finish(start("invite", "--job", "digits", "--uses", "2"))
    assert code == 0, err
    (tmp_path / "token").write_text(token)
    second = start("join", "--token-file", "token", address, "train.py")
    assert run.stdout is not None
    assert run.stdout.readline() == "[0] a lease has passed\n"
    third = start("join", "--token-file", "token", address, "train.py")
    for process in (run, second, third):
        code, out, err = finish(process)
        assert code == 0, out + err
        assert "[0] done 3 True\n" in out
    assert "refused" not in (tmp_path / "logs" / "coordinator.log").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["-n", "2", "ADDRESS", "script.py", "-n", "7", "--help"],
        ["ADDRESS", "-n", "2", "script.py", "-n", "7", "--help"],
        ["-n", "2", "ADDRESS", "--grace", "1", "--", "script.py", "-n", "7", "--help"],
        ["ADDRESS", "-mn", "2", "script", "-n", "7", "--help"],
    ],
)
def test_join_accepts_options_before_and_after_the_address(arguments: list[str], start: Start, tmp_path: Path) -> None:
    written(tmp_path, "import sys\nprint(sys.argv[1:])\n", "script.py")
    secret = job_secret({"XDG_RUNTIME_DIR": str(tmp_path)}, loopback=True)
    with Coordinator("127.0.0.1", 0, size=2, secret=secret) as coordinator:  # the script does not call gw.init()
        code, out, err = finish(start("join", *(coordinator.address if one == "ADDRESS" else one for one in arguments)))
    assert (code, sorted(out.splitlines())) == (0, [f"[{n}] ['-n', '7', '--help']" for n in range(2)]), err


@pytest.mark.slow
def test_join_adds_workers_of_another_launcher(start: Start, tmp_path: Path) -> None:
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
    joined = start("join", address_of(run), "train.py")
    for process in (run, joined):
        code, out, err = finish(process)
        assert (code, out) == (0, "[0] done 2 3.0\n"), err


@pytest.mark.slow
def test_elastic_run_killed_coordinator_is_restarted_and_the_job_ends(start: Start, tmp_path: Path) -> None:
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
    assert re.search(r"gradwire: the coordinator \(pid (\d+)\) was killed by chaos; it is restarted\n", err), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_elastic_run_interrupted_or_killed_leaves_no_process(
    number: signal.Signals, start: Start, tmp_path: Path
) -> None:
    """Neither a worker nor the coordinator is left, after Ctrl-C and after the launcher was killed."""
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
def test_elastic_run_and_join_invalid_arguments_exit_with_2_and_a_reason(
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
        (["run", "--min", "1", "--listen", "10.0.0.1", "here.py"], "links are not encrypted"),
        (["join", "10.0.0.1:29500", "here.py"], "links are not encrypted"),
    ],
)
def test_elastic_run_and_join_invalid_addresses_exit_with_1_and_a_reason(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "", "here.py")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert said in result.output


def test_join_without_a_coordinator_gives_up_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADWIRE_TIMEOUT", "1.2")
    written(tmp_path, "open('started', 'w')", "here.py")
    address = f"127.0.0.1:{free_port()}"
    result = CliRunner().invoke(main, ["join", address, "here.py"])
    assert result.exit_code == 1
    assert f"gradwire: no coordinator answers at {address}; trying for 0 s more" in result.output
    assert f"no coordinator answered at {address} within 1.2 s" in result.output
    assert not (tmp_path / "started").exists()


def test_elastic_run_job_has_the_given_name(start: Start, tmp_path: Path) -> None:
    written(tmp_path, "import os\nprint(os.environ['GRADWIRE_JOB'])\n", "train.py")
    code, out, err = finish(start("run", "--min", "1", "--job", "digits", "train.py"))
    assert (code, out) == (0, "[0] digits\n")
    assert err.splitlines()[0].endswith("(job digits)")


def test_elastic_run_and_join_help_shows_examples() -> None:
    shown = CliRunner().invoke(main, ["run", "--help"]).output
    assert "gradwire run --min 2 --max 8 -n 4 --restarts 3 train.py" in shown
    assert "gradwire join 127.0.0.1:23456 train.py" in CliRunner().invoke(main, ["join", "--help"]).output
