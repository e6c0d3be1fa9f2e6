"""The `gradwire run` command in its own process: output, exit code and signals."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.launch_jobs import LONG, Watched, written

Start = Callable[..., subprocess.Popen[str]]

READY = """
    import os, signal, sys
    def ready():
        child = os.fork()
        if child == 0:
            signal.pause()
        print("ready", os.getpid(), child)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(arguments…, options of Popen): `gradwire run`, killed at the end if it has not ended."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
            process: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]
                [sys.executable, "-m", "gradwire", "run", *arguments],
                cwd=tmp_path,
                env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
                **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        (tmp_path / "tmp").mkdir()
        yield start


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LONG)
    return process.returncode, out, err


def processes_of(run: subprocess.Popen[str], count: int) -> list[Watched]:
    """The processes whose pids `ready()` has printed on `count` ranks."""
    assert run.stdout is not None
    lines = [run.stdout.readline().split() for _ in range(count)]
    assert all(line[1] == "ready" for line in lines), lines
    return [Watched(int(pid)) for line in lines for pid in line[2:]]


def test_run_script_gets_its_arguments_verbatim_on_all_ranks(start: Start, tmp_path: Path) -> None:
    written(tmp_path, "import os, sys; print(os.environ['GRADWIRE_RANK'], sys.argv[1:], sys.stdin.read())", "train.py")
    arguments = ["-n", "5", "--help", "--log-dir", "x", "-m", "--", "*", "", "a b"]
    code, out, err = finish(start("-n", "2", "train.py", *arguments, stdin=subprocess.PIPE))
    assert sorted(out.splitlines()) == [f"[0] 0 {arguments!r} ", f"[1] 1 {arguments!r} "]
    assert (code, err) == (0, "")


def test_run_module_runs_on_all_ranks(start: Start, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    written(tmp_path / "package", "import sys; print(__name__, sys.argv[1:])", "train.py")
    code, out, err = finish(start("-n", "2", "-m", "package.train", "-n", "--lr=1"))
    assert sorted(out.splitlines()) == ["[0] __main__ ['-n', '--lr=1']", "[1] __main__ ['-n', '--lr=1']"]
    assert (code, err) == (0, "")


def test_run_failure_prints_the_root_cause_last_and_returns_its_exit_code(start: Start, tmp_path: Path) -> None:
    script = """
        import os, signal, time
        from gradwire.errors import PeerLost

        def step():
            raise ValueError("no more data")

        rank = int(os.environ["RANK"])
        open(f"{rank} is here", "w").close()
        while not all(os.path.exists(f"{other} is here") for other in range(3)):
            time.sleep(0.01)
        if rank == 2:
            step()
        if rank == 1:
            raise PeerLost("rank 2 is gone", culprit=2)
        signal.pause()
    """
    path = written(tmp_path, script, "train.py")
    code, out, err = finish(start("-n", "3", "--grace", "0.5", "train.py"))
    assert (code, out) == (1, "")
    assert "gradwire: rank 1 raised PeerLost: rank 2 is gone\n" in err
    assert err.count("Traceback") == 1
    *_, others = err.rpartition("\n\n")
    traceback = f'  File "{path}", line 6, in step\n    raise ValueError("no more data")\nValueError: no more data\n'
    assert others.endswith(traceback)
    assert "gradwire: rank 0 was stopped\n" in others
    (logs,) = (tmp_path / "tmp").iterdir()
    assert f"\ngradwire: logs in {logs}\n" in others
    assert (logs / "rank-2.log").read_text().endswith(traceback)
    assert "raised ValueError: no more data\nTraceback" in others


MISMATCH = """
    import numpy as np
    import gradwire as gw

    with gw.init() as group:
        gradient = np.ones(8 if group.rank == 2 else 4, np.float32)
        group.all_reduce(gradient)
"""


@pytest.mark.parametrize(("size", "most_lines"), [(4, 25), pytest.param(16, 35, marks=pytest.mark.slow)])
def test_run_mismatch_prints_one_table_with_the_culprit_marked(
    size: int, most_lines: int, start: Start, tmp_path: Path
) -> None:
    written(tmp_path, MISMATCH, "train.py")
    code, out, err = finish(start("-n", str(size), "--log-dir", "logs", "train.py"))
    assert (code, out) == (1, "")
    assert len(err.splitlines()) <= most_lines, err
    assert err.count("Traceback") == 1
    assert err.count("all_reduce(float32[8], op='sum') at train.py:7  <-- differs\n") == 1
    others = "0, 1, 3" if size == 4 else "0, 1, 3-15"
    assert f"gradwire: ranks {others}: same error as rank 2\n" in err
    table = err[err.rindex("ranks disagree on call #1") :]
    assert sum("all_reduce(float32[4], op='sum') at train.py:7" in line for line in table.splitlines()) in (1, size - 1)
    assert "frames inside gradwire are hidden" in err
    for rank in range(size):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert "collective_calls.py" in log
        assert "ranks disagree on call #1" in log


def test_run_exception_on_one_rank_prints_its_traceback_once_and_last(start: Start, tmp_path: Path) -> None:
    script = """
        import gradwire as gw

        def train(group):
            if group.rank == 2:
                raise ValueError("the batch is empty")
            group.barrier()

        with gw.init() as group:
            train(group)
    """
    path = written(tmp_path, script, "train.py")
    code, out, err = finish(start("-n", "4", "train.py"))
    assert (code, out) == (1, "")
    assert err.count("Traceback") == 1
    assert err.endswith(
        f'  File "{path}", line 10, in <module>\n    train(group)\n'
        f'  File "{path}", line 6, in train\n    raise ValueError("the batch is empty")\n'
        "ValueError: the batch is empty\n"
    )
    assert len([line for line in err.splitlines() if line.startswith("gradwire: ranks 0, 1, 3 ")]) == 1, err


@pytest.mark.parametrize(
    "leave",
    [
        "sys.exit(0)",
        pytest.param("sys.exit()", marks=pytest.mark.slow),
        pytest.param("group.close(); gone = True", marks=pytest.mark.slow),
    ],
)
def test_run_rank_that_exits_with_0_too_early_is_the_root_cause(leave: str, start: Start, tmp_path: Path) -> None:
    script = f"""
        import sys
        import gradwire as gw

        group, gone = gw.init(), False
        group.barrier()
        if group.rank == 1:
            {leave}
        if not gone:
            group.barrier()
    """
    written(tmp_path, script, "train.py")
    code, _, err = finish(start("-n", "3", "train.py"))
    assert code == 1
    *_, last = err.splitlines()
    assert re.fullmatch(r"rank 1 \(pid \d+\) (exited|left) .* while other ranks still needed it", last), err
    assert re.search(r"gradwire: ranks 0, 2 (failed in consequence; rank 0 )?raised PeerLost: rank 1 ", err), err


def test_run_ctrl_c_in_a_collective_prints_no_traceback(start: Start, tmp_path: Path) -> None:
    script = """
        import gradwire as gw

        group = gw.init()
        print("ready")
        while True:
            group.barrier()
    """
    written(tmp_path, script, "train.py")
    run = start("-n", "4", "train.py")
    assert run.stdout is not None
    for _ in range(4):
        run.stdout.readline()
    run.send_signal(signal.SIGINT)
    code, out, err = finish(run)
    assert (code, out) == (130, "")
    assert re.fullmatch(r"gradwire: stopped by SIGINT; logs in \S+\n", err), err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "0", "here.py"], "0 is not in the range"),
        (["-n", "two", "here.py"], "not a valid integer"),
        (["here.py"], "Missing option '-n'"),
        (["-n", "2"], "Missing argument 'SCRIPT'"),
        (["-n", "2", "missing.py"], "there is no script 'missing.py'"),
        (["-n", "2", "package.train"], "(for a module: -m package.train)"),
        (["-n", "2", "."], "'.' is a directory, not a script"),
        (["-n", "2", "--unknown", "here.py"], "No such option"),
        (["-n", "2", "--log-dir", "here.py", "here.py"], "is a file"),
    ],
)
def test_run_invalid_arguments_exit_with_2_and_a_reason(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from gradwire.cli import main

    monkeypatch.chdir(tmp_path)
    written(tmp_path, "", "here.py")
    result = CliRunner().invoke(main, ["run", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_run_missing_module_is_reported_by_the_workers(start: Start) -> None:
    code, _, err = finish(start("-n", "2", "-m", "nowhere_to_be_found"))
    assert code == 1
    assert err.endswith("No module named nowhere_to_be_found\n")


def test_run_help_shows_examples() -> None:
    from click.testing import CliRunner

    from gradwire.cli import main

    assert "gradwire run -n 4 train.py --epochs 10" in CliRunner().invoke(main, ["run", "--help"]).output
    assert "run" in CliRunner().invoke(main, ["--help"]).output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_run_signal_stops_all_processes_and_sets_the_exit_code(
    number: signal.Signals, code: int, start: Start, tmp_path: Path
) -> None:
    """Processes that the workers have started may end on their own: here they notice the end of their parent."""
    follow = """
        import os, signal, sys
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.read(reading, 1)
            os._exit(0)
        print("ready", os.getpid(), child)
        signal.pause()
    """
    written(tmp_path, follow, "train.py")
    run = start("-n", "2", "train.py")
    watched = processes_of(run, 2)
    run.send_signal(number)
    returned, _, err = finish(run)
    assert returned == code
    assert all(one.ends(0) for one in watched)
    assert f"gradwire: stopped by {number.name}" in err.splitlines()[-1]


def test_run_second_ctrl_c_kills_all_processes(start: Start, tmp_path: Path) -> None:
    deaf = (
        READY
        + """
    # os.write, because print would fail if the signal arrived while ready() prints.
    signal.signal(signal.SIGINT, lambda *_: os.write(1, b"not now\\n"))
    ready()
    while True: signal.pause()
    """
    )
    written(tmp_path, deaf, "train.py")
    run = start("-n", "1", "train.py")
    watched = processes_of(run, 1)
    run.send_signal(signal.SIGINT)
    assert run.stdout is not None
    assert run.stdout.readline() == "[0] not now\n"
    run.send_signal(signal.SIGINT)
    assert finish(run)[0] == 130
    assert all(one.ends(0) for one in watched)


def test_run_killed_supervisor_leaves_no_orphan(start: Start, tmp_path: Path) -> None:
    deaf = (
        READY
        + """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ready()
    while True: signal.pause()
    """
    )
    written(tmp_path, deaf, "train.py")
    run = start("-n", "2", "train.py")
    watched = processes_of(run, 2)
    run.kill()
    assert all(one.ends() for one in watched)


def test_run_inherited_ignored_signals_stay_ignored_and_the_exit_code_is_returned(start: Start, tmp_path: Path) -> None:
    """As under nohup, and under parents that leave SIGCHLD ignored."""
    go_on = (
        READY
        + """
    ready()
    with open("go") as file:
        file.read()
    sys.exit(5)
    """
    )
    written(tmp_path, go_on, "train.py")
    os.mkfifo(tmp_path / "go")

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    run = start("-n", "1", "train.py", preexec_fn=ignore)
    processes_of(run, 1)
    run.send_signal(signal.SIGHUP)
    (tmp_path / "go").write_text("")
    assert finish(run)[0] == 5


def test_run_closed_standard_output_does_not_stop_the_job(start: Start, tmp_path: Path) -> None:
    written(tmp_path, "for i in range(100_000): print('line', i)\nopen('done', 'w').close()\n", "train.py")
    run = start("-n", "1", "--log-dir", "logs", "train.py", stderr=subprocess.DEVNULL)
    assert run.stdout is not None
    assert run.stdout.readline() == "[0] line 0\n"
    run.stdout.close()
    assert run.wait(LONG) == 0
    assert (tmp_path / "done").exists()
    assert (tmp_path / "logs" / "rank-0.log").read_text().endswith("line 99999\n")


READ = "import os, sys\nprint(os.environ['RANK'], repr(sys.stdin.read()), sys.stdin.isatty())\n"


def test_run_standard_input_goes_to_rank_0_and_is_empty_for_the_others(start: Start, tmp_path: Path) -> None:
    written(tmp_path, READ, "train.py")
    run = start("-n", "2", "train.py", stdin=subprocess.PIPE)
    out, err = run.communicate("first\nlast\n", timeout=LONG)
    assert run.returncode == 0, err
    assert sorted(out.splitlines()) == ["[0] 0 'first\\nlast\\n' False", "[1] 1 '' False"]


def test_run_closed_standard_input_is_empty(start: Start, tmp_path: Path) -> None:
    written(tmp_path, READ, "train.py")
    code, out, err = finish(start("-n", "1", "train.py", preexec_fn=lambda: os.close(0)))
    assert code == 0, err
    assert out == "[0] 0 '' False\n"


class Terminal:
    """A terminal with a command in its foreground or background, as a shell with job control starts it."""

    # The first process leads the session and is the shell; its child is the command, in a process group of its own.
    SHELL = """
import os, signal, sys, termios
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
foreground, command = sys.argv[1] == "foreground", sys.argv[2:]
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    if foreground:
        os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(command[0], command)
_, status = os.waitpid(child, os.WUNTRACED)
os.tcsetpgrp(0, os.getpgrp())
print("stopped" if os.WIFSTOPPED(status) else f"code {os.waitstatus_to_exitcode(status)}", flush=True)
if os.WIFSTOPPED(status):
    os.kill(child, signal.SIGKILL)
"""

    def __init__(self, where: str, folder: Path, *arguments: str) -> None:
        command = [sys.executable, "-c", self.SHELL, where, sys.executable, "-m", "gradwire", "run", *arguments]
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execv(command[0], command)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def read_until(self, text: str) -> None:
        while text not in self.shown:
            self.shown += os.read(self._terminal, 4096).decode()

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._terminal)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Terminal:
            found = Terminal(arguments[0], tmp_path, *arguments[1:])
            stack.callback(found.close)
            return found

        yield start


def test_run_rank_0_reads_the_terminal_and_ctrl_c_stops_all(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    asks = """
        import os, signal
        if os.environ["RANK"] == "0":
            print("asks", flush=True)
            print("got", input(), flush=True)
            input()
        signal.pause()
    """
    written(tmp_path, asks, "train.py")
    shell = terminal("foreground", "-n", "2", "train.py")
    shell.read_until("asks")
    shell.type("an answer\n")
    shell.read_until("got an answer")
    shell.type("\x03")
    shell.read_until("code 130")
    assert "stopped by SIGINT" in shell.shown


def test_run_in_the_background_of_a_terminal_is_not_stopped_and_reads_nothing(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    written(tmp_path, READ, "train.py")
    shell = terminal("background", "-n", "1", "train.py")
    shell.read_until("code 0")
    assert "0 '' False" in shell.shown


def test_run_on_a_terminal_has_colours_and_progress_bars_in_place(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = "for percent in range(0, 101, 10): print(f'\\r{percent} %', end='')\nprint()\n"
    written(tmp_path, bar, "train.py")
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    run = start("-n", "1", "train.py", stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # on Linux the end of a terminal is an error
        while chunk := os.read(ours, 4096):
            shown += chunk
    os.close(ours)
    assert run.wait(LONG) == 0
    assert shown.count(b"\n") == 1
    assert shown.endswith(b"\x1b[36m[0] \x1b[0m100 %\r\n")
