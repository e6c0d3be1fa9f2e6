"""A script behaves in a worker as under plain Python; only its uncaught exception is reported and logged."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gradwire.launch import worker_main
from support.launch_jobs import LONG, written

Finished = subprocess.CompletedProcess[str]


def plainly(*arguments: str, cwd: Path) -> Finished:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=LONG, stdin=subprocess.DEVNULL
    )


def as_worker(*arguments: str, cwd: Path, **environ: str) -> tuple[Finished, str, dict[str, Any] | None]:
    """As `plainly`, with the worker's log of tracebacks and its report."""
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile("w+") as tracebacks:
        with theirs:
            ours.send(b".")
            descriptors = [theirs.fileno(), tracebacks.fileno()]
            finished = subprocess.run(
                [sys.executable, worker_main.__file__, *map(str, descriptors), *arguments],
                cwd=cwd,
                env=os.environ | environ,
                capture_output=True,
                text=True,
                timeout=LONG,
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        with ours.makefile("rb") as file:
            message = file.read()
        tracebacks.seek(0)
        logged = tracebacks.read()
    if not message:
        return finished, logged, None
    assert message[:1] == worker_main.REPORT
    return finished, logged, json.loads(message[worker_main.HEADER_SIZE :])


SCRIPTS = {
    "what it is": """
        import sys
        names = {"__name__", "__file__", "__doc__", "__package__", "__spec__", "__cached__"}
        print({name: value for name, value in globals().items() if name in names})
        print(sys.argv, sys.path, type(__builtins__), type(__loader__).__name__, sys.modules["__main__"].sys is sys)
    """,
    "an exception": """
        def f(x):
            return 1 / x

        f(0)
    """,
    "a chain": """
        try:
            {}["key"]
        except KeyError as error:
            raise RuntimeError("several\\nlines") from error
    """,
    "an exit code": "raise SystemExit(7)",
    "an exit text": "import sys; sys.exit('no data')",
    "an exit without a word": "import sys; sys.exit()",
    "a syntax error": "print('never')\nif:\n",
    "an interrupt": "raise KeyboardInterrupt",
    "its own hook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hook:", kind.__name__, error, trace.tb_lineno)
        raise ValueError("seen by the hook")
    """,
    "a thread that outlives the main one": """
        import atexit, threading
        atexit.register(print, "at exit")
        main = threading.main_thread()
        threading.Thread(target=lambda: (main.join(), print("still", __name__))).start()
        raise ValueError("first")
    """,
    "pickling": """
        import pickle
        class Local:
            pass
        print(type(pickle.loads(pickle.dumps(Local()))) is Local)
    """,
    "multiprocessing": """
        import multiprocessing, sys
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(double, [21]))
    """,
    "a future import does not leak": "def f(x: print('evaluated')): pass",
}


@pytest.mark.parametrize("code", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_worker_runs_a_script_as_plain_python_does(code: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    written(tmp_path / "elsewhere", code)
    name = os.path.join("elsewhere", "script.py")
    expected = plainly(name, "-x", "--help", "--", "ü", "", cwd=tmp_path)
    finished, logged, report = as_worker("script", name, "-x", "--help", "--", "ü", "", cwd=tmp_path)
    assert finished.stdout == expected.stdout
    assert finished.stderr + logged == expected.stderr
    assert finished.returncode == expected.returncode
    if report is not None and report["type"] not in ("SystemExit", "KeyboardInterrupt"):
        assert finished.stdout.startswith("hook") or report["traceback"] in expected.stderr


@pytest.mark.parametrize(
    "name",
    ["single", "package.inside", "package", "bare", "missing", "missing.inside", "package.missing", "broken", "math"],
)
def test_worker_runs_a_module_as_plain_python_does(name: str, tmp_path: Path) -> None:
    show = """
        import sys
        print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path)
    """
    for folder in ("package", "bare"):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder, "", "__init__.py")
    written(tmp_path, show, "single.py")
    written(tmp_path, "import nowhere_to_be_found", "broken.py")
    written(tmp_path / "package", show, "inside.py")
    written(tmp_path / "package", show, "__main__.py")
    expected = plainly("-m", name, "--flag", cwd=tmp_path)
    finished, logged, _ = as_worker("module", name, "--flag", cwd=tmp_path)
    assert finished.stdout == expected.stdout
    assert finished.returncode == expected.returncode
    # Only the last lines are equal: Python's own traceback also shows the frames of runpy.
    assert (finished.stderr + logged).splitlines()[-1:] == expected.stderr.splitlines()[-1:]
    assert "worker_main.py" not in finished.stderr + logged


def test_worker_loads_no_modules_before_the_script(tmp_path: Path) -> None:
    script = written(tmp_path, "import sys; print(*sys.modules)")
    finished, _, _ = as_worker("script", script, cwd=tmp_path)
    expected = set(plainly(script, cwd=tmp_path).stdout.split())
    more = set(finished.stdout.split()) - expected - {"__future__", "warnings"}
    assert {name.partition(".")[0] for name in more} <= {"importlib"}


def test_report_describes_the_exception(tmp_path: Path) -> None:
    script = written(tmp_path, "def f():\n    raise ValueError('boom')\n\n\nf()\n")
    _, _, report = as_worker("script", script, cwd=tmp_path)
    assert report is not None
    assert (report["type"], report["message"], report["place"]) == ("ValueError", "boom", "script.py:5")
    assert report["traceback"].startswith("Traceback (most recent call last):\n  File")
    assert report["traceback"].endswith("ValueError: boom\n")
    assert not report["broken"]


@pytest.mark.parametrize(
    "code",
    [
        "raise PeerLost('gone', culprit=2)",
        "class Mine(PeerLost): pass\nraise Mine('gone', culprit=2)",
        "try: raise PeerLost('gone', culprit=2)\nexcept PeerLost as error: raise RuntimeError from error",
        "try: raise PeerLost('gone', culprit=2)\nexcept PeerLost: raise RuntimeError",
        "try: raise PeerLost('gone', culprit=2)\nexcept PeerLost: raise SystemExit(1)",
        "raise ExceptionGroup('several', [ValueError(), PeerLost('gone', culprit=2)])",
    ],
)
def test_report_marks_errors_of_a_broken_group(code: str, tmp_path: Path) -> None:
    script = written(tmp_path, f"from gradwire.errors import PeerLost\n{code}\n")
    _, _, report = as_worker("script", script, cwd=tmp_path)
    assert report is not None
    assert (report["broken"], report["culprit"]) == (True, 2)


def test_report_of_an_error_that_cannot_be_shown_is_sent(tmp_path: Path) -> None:
    code = "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd"
    finished, _, report = as_worker("script", written(tmp_path, code), cwd=tmp_path)
    assert report is not None
    assert report["type"] == "Odd"
    assert finished.returncode == 1


def test_worker_error_that_was_reported_goes_to_the_log_with_all_frames(tmp_path: Path) -> None:
    script = written(tmp_path, "import gradwire as gw\ngw.launch(print, 0)\n")
    finished, logged, report = as_worker("script", script, cwd=tmp_path)
    assert (finished.stderr, finished.returncode) == ("", 1)
    assert report is not None
    assert "function.py" in logged
    assert "function.py" not in report["traceback"]
    assert logged.splitlines()[-1] == report["traceback"].splitlines()[-1]


def test_worker_report_has_all_frames_if_they_are_asked_for(tmp_path: Path) -> None:
    script = written(tmp_path, "import gradwire as gw\ngw.launch(print, 0)\n")
    _, logged, report = as_worker("script", script, cwd=tmp_path, GRADWIRE_TRACEBACK="full")
    assert report is not None
    assert report["traceback"] == logged


def test_worker_with_a_hook_of_its_own_prints_by_it(tmp_path: Path) -> None:
    code = """
        import sys
        sys.excepthook = lambda kind, error, trace: print("mine:", error, file=sys.stderr)
        import gradwire as gw
        gw.launch(print, 0)
    """
    finished, logged, report = as_worker("script", written(tmp_path, code), cwd=tmp_path)
    assert finished.stderr.startswith("mine: launch needs a number of processes")
    assert logged == ""
    assert report is not None


def test_forked_child_sends_no_report_for_the_worker(tmp_path: Path) -> None:
    code = "import os\nif os.fork() == 0: raise ValueError('in the child')\nos.wait()\n"
    finished, _, report = as_worker("script", written(tmp_path, code), cwd=tmp_path)
    assert "in the child" in finished.stderr
    assert finished.returncode == 0
    assert report is None


def test_worker_survives_a_script_that_closes_all_descriptors(tmp_path: Path) -> None:
    code = """
        import os
        os.closerange(3, 100)
        files = [open(f"file-{number}", "wb") for number in range(20)]
        raise ValueError("boom")
    """
    finished, _, report = as_worker("script", written(tmp_path, code), cwd=tmp_path)
    assert finished.stderr.endswith("ValueError: boom\n")
    assert report is None
    assert {path.read_bytes() for path in tmp_path.glob("file-*")} == {b""}


def test_worker_without_the_start_byte_runs_nothing(tmp_path: Path) -> None:
    script = written(tmp_path, "print('never')")
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        finished = subprocess.run(
            [sys.executable, worker_main.__file__, str(theirs.fileno()), "2", "script", script],
            capture_output=True,
            timeout=LONG,
            pass_fds=[theirs.fileno()],
        )
    assert (finished.returncode, finished.stdout, finished.stderr) == (1, b"", b"")
