"""`gw.launch`: a function in fresh processes."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from gradwire.errors import Aborted, ConfigError, InvalidSize, PeerLost, WorkerFailed
from gradwire.launch import launch, rendezvous, supervisor
from gradwire.launch.function import is_importable
from support.launch_jobs import LONG, nowhere, written


@pytest.fixture(autouse=True)
def lightly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start no coordinator: the functions here form no group. Send this file by value, so that no worker imports it."""
    monkeypatch.setattr(rendezvous, "on_this_machine", lambda size: nowhere())
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Defined(Exception):
    """An exception of a module that is pickled by value."""


class Strange(Exception):
    """Cannot be unpickled: pickle calls the class with its `args` only."""

    def __init__(self, text: str, *, number: int) -> None:
        super().__init__(text)


def rank() -> int:
    return int(os.environ["GRADWIRE_RANK"])


def product(x: int, y: int) -> int:
    return x * y + rank()


def on_rank(which: int, act: Callable[[], Any]) -> Any:
    """Call `act` on one rank, and wait for a signal on all others."""
    if rank() == which:
        return act()
    signal.pause()
    return None


def failing(kind: type[Exception], *args: Any, **facts: Any) -> Any:
    raise kind(*args, **facts)


def failure(act: Callable[[], Any], size: int = 2, which: int = 1) -> WorkerFailed:
    with pytest.raises(WorkerFailed) as caught:
        launch(lambda: on_rank(which, act), size)
    assert caught.value.culprit == which
    return caught.value


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "Supervisor", functools.partial(supervisor.Supervisor, grace=0.0))


def test_launch_returns_results_by_rank() -> None:
    assert launch(product, 3, (6, 7)) == [42, 43, 44]


def test_launch_accepts_lambdas_closures_and_partials() -> None:
    base = {"value": 10}
    assert launch(lambda: base["value"] + rank(), 2) == [10, 11]
    assert launch(functools.partial(product, 2), 1, [3]) == [6]


def test_is_importable_module_with_another_or_no_file_is_false() -> None:
    assert is_importable(sys.modules["json.decoder"])
    assert is_importable(sys.modules["gradwire.launch.function"])
    assert is_importable(sys.modules["sys"])
    odd = type(sys)("json.decoder")
    odd.__file__ = "/elsewhere/decoder.py"
    assert not is_importable(odd)
    odd.__name__ = "nowhere.to.be.found"
    assert not is_importable(odd)


@pytest.mark.parametrize("wrapped", [False, True])
def test_launch_accepts_functions_of_a_module_that_only_this_process_has(
    wrapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("only_here", written(tmp_path, "def double(x): return 2 * x\n"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "only_here", module)
    if wrapped:
        assert launch(functools.partial(module.double, 21), 1) == [42]
    else:
        assert launch(module.double, 1, (21,)) == [42]


def test_launch_returns_results_of_any_size() -> None:
    sizes = [len(result) for result in launch(lambda: bytes(20_000_000 * (1 + rank())), 2)]
    assert sizes == [20_000_000, 40_000_000]


def test_launch_sends_arguments_of_any_size() -> None:
    assert launch(len, 2, (bytes(20_000_000),)) == [20_000_000] * 2


def test_launch_shows_printed_output(capsys: pytest.CaptureFixture[str]) -> None:
    launch(lambda: print("hello"), 2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] hello", "[1] hello"]


@pytest.mark.usefixtures("no_grace")
def test_launch_raises_the_exception_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Defined, match=r"^on purpose$") as caught:
        launch(lambda: on_rank(1, lambda: failing(Defined, "on purpose")), 3)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerFailed)
    assert (cause.culprit, cause.exit_code) == (1, 1)
    assert "raised" in str(cause)
    assert "in failing" in str(cause)
    assert "worker_main.py" not in str(cause)
    assert str(cause).endswith("raise kind(*args, **facts)"), "the message follows in the exception itself"
    assert capsys.readouterr().err == ""  # not shown twice


def test_launch_raises_the_cause_with_its_consequences_as_notes() -> None:
    def job() -> None:
        if rank() == 1:
            raise PeerLost("rank 0 is gone", culprit=0)
        raise Defined("the reason")

    with pytest.raises(Defined, match="the reason") as caught:
        launch(job, 2)
    assert caught.value.__notes__ == ["rank 1 raised PeerLost: rank 0 is gone"]


def test_launch_gradwire_errors_keep_their_attributes() -> None:
    with pytest.raises(Aborted) as caught:
        launch(lambda: failing(Aborted, "it gave up", culprit=0, generation=3), 1)
    assert (caught.value.culprit, caught.value.generation) == (0, 3)


@pytest.mark.usefixtures("no_grace")
def test_launch_exception_that_cannot_be_copied_is_described() -> None:
    error = failure(lambda: failing(Strange, "odd", number=1))
    assert "Strange: odd" in str(error)
    assert "Traceback" in str(error)
    assert error.exit_code == 1


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize(
    ("act", "said", "exit_code"),
    [
        (lambda: sys.exit(3), "left by sys.exit(3)", 3),
        (lambda: sys.exit("no data"), "gave up", 1),
        (sys.exit, "left by sys.exit()", 0),
        (lambda: os._exit(0), "exited with code 0 before its function returned", 0),
        (lambda: os._exit(9), "exited with code 9", 9),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL", 137),
        (threading.Lock, "the result cannot be sent back: TypeError: cannot pickle", 1),
        (lambda: failing(KeyboardInterrupt), "KeyboardInterrupt", 130),  # type: ignore[arg-type]
    ],
)
def test_launch_rank_that_does_not_return_is_named(act: Callable[[], Any], said: str, exit_code: int) -> None:
    error = failure(act)
    assert said in str(error)
    assert error.exit_code == exit_code


def test_launch_forked_child_that_returns_from_the_function_sends_no_result() -> None:
    def job() -> str:
        if os.fork() == 0:
            return "child"
        os.wait()
        return "parent"

    assert launch(job, 2) == ["parent"] * 2


def test_launch_unpicklable_arguments_are_refused_before_anything_starts() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot send the arguments to other processes: cannot pickle"):
        launch(print, 2, (lock,))
    with pytest.raises(ConfigError, match="cannot send the function to other processes: cannot pickle"):
        launch(lambda: lock, 2)


@pytest.mark.parametrize("size", [0, -1])
def test_launch_with_an_impossible_size_raises(size: int) -> None:
    with pytest.raises(InvalidSize, match=f"at least 1, not {size}"):
        launch(print, size)


def test_launch_within_a_launch_is_a_separate_job() -> None:
    def inner() -> tuple[str, ...]:
        return tuple(os.environ[name] for name in ("GRADWIRE_RANK", "GRADWIRE_SIZE", "WORLD_SIZE"))

    def outer() -> Any:
        from gradwire.launch import launch, rendezvous

        rendezvous.on_this_machine = lambda size, job=None, environ=None: nowhere()
        return os.environ["GRADWIRE_SIZE"], launch(inner, 2)

    assert launch(outer, 1) == [("1", [("0", "2", "2"), ("1", "2", "2")])]


SCRIPT = """
    import sys
    import gradwire as gw
    from dataclasses import dataclass

    @dataclass
    class Point:
        x: int

    class Oops(Exception):
        pass

    offset = 1

    def move(point):
        if point.x < 0:
            raise Oops("negative")
        return Point(point.x + offset), sys.argv[1:]

    results = gw.launch(move, 2, (Point(1),))
    assert results == [(Point(2), ["--flag"])] * 2, results
    assert type(results[0][0]) is Point
    try:
        gw.launch(move, 2, (Point(-1),))
    except Oops as error:
        print("caught", error)
"""


def test_launch_in_a_script_needs_no_main_guard_and_keeps_its_classes(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, written(tmp_path, SCRIPT), "--flag"], capture_output=True, text=True, timeout=LONG
    )
    assert (finished.stdout, finished.stderr) == ("caught negative\n", "")


def test_launch_interrupted_stops_the_workers(tmp_path: Path) -> None:
    code = """
        import os, signal, time
        import gradwire as gw

        def job():
            os.kill(os.getppid(), signal.SIGINT)
            signal.pause()

        try:
            gw.launch(job, 1)
        except KeyboardInterrupt:
            print("interrupted")
        try:
            os.wait()
        except ChildProcessError:
            print("no child is left")
    """
    finished = subprocess.run([sys.executable, written(tmp_path, code)], capture_output=True, text=True, timeout=LONG)
    assert (finished.stdout, finished.stderr) == ("interrupted\nno child is left\n", "")


def test_launch_of_a_value_that_is_not_callable_raises() -> None:
    with pytest.raises(InvalidSize, match="not '2'"):
        launch(print, "2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a function"):
        launch(7, 2)  # type: ignore[arg-type]
