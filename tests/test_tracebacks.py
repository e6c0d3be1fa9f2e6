"""Uncaught exceptions are printed without the frames inside gradwire."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gradwire as gw
from gradwire import tracebacks
from gradwire.topology import Topology
from support.launch_jobs import LONG, written

NOTE = "  [frames inside gradwire are hidden; GRADWIRE_TRACEBACK=full shows them]\n"


def formatted(error: BaseException) -> str:
    return tracebacks.format_exception(error)


def raised_by_gradwire() -> gw.GradwireError:
    with pytest.raises(gw.InvalidSize) as caught:
        Topology.single(0)
    return caught.value


def test_format_exception_of_a_gradwire_error_hides_its_frames() -> None:
    text = formatted(raised_by_gradwire())
    assert text.startswith("Traceback (most recent call last):\n  File ")
    assert text.endswith(f"    Topology.single(0)\n{NOTE}gradwire.errors.InvalidSize: a topology of 0 ranks\n")
    assert "topology.py" not in text


def test_format_exception_with_full_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_TRACEBACK", "full")
    text = formatted(raised_by_gradwire())
    assert "topology.py" in text
    assert NOTE not in text


def test_format_exception_of_an_unexpected_error_inside_gradwire_keeps_its_frames() -> None:
    with pytest.raises(TypeError) as caught:
        Topology.single("two")  # type: ignore[arg-type]
    assert "topology.py" in formatted(caught.value)


def test_format_exception_hides_frames_between_those_of_the_program() -> None:
    class Hosts(tuple[tuple[int, ...], ...]):
        def __bool__(self) -> bool:
            raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program") as caught:
        Topology(Hosts())
    text = formatted(caught.value)
    assert text.count(NOTE) == 1
    assert "topology.py" not in text
    assert text.index("Topology(Hosts())") < text.index(NOTE) < text.index("in __bool__")


def test_format_exception_hides_frames_of_causes_and_members() -> None:
    inner = raised_by_gradwire()
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("outer") from inner
    group = ExceptionGroup("several", [caught.value, ValueError("another")])
    assert formatted(caught.value).count(NOTE) == 1
    assert "topology.py" not in formatted(group)
    assert "| ValueError: another" in formatted(group)


def test_format_exception_of_the_program_is_pythons_own_text() -> None:
    import traceback

    with pytest.raises(ZeroDivisionError) as caught:
        print(1 / 0)
    assert formatted(caught.value) == "".join(traceback.format_exception(caught.value))


SCRIPT = """
    import sys
    import gradwire as gw
    {before}
    with gw.init() as group:
        group.reduce(1, root=5)
"""


def test_uncaught_exception_of_a_rank_without_a_launcher_hides_frames(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, written(tmp_path, SCRIPT.format(before=""))], capture_output=True, text=True, timeout=LONG
    )
    assert finished.returncode == 1
    assert f"    group.reduce(1, root=5)\n{NOTE}gradwire.errors.InvalidRank: " in finished.stderr


def test_uncaught_exception_with_a_hook_of_the_program_is_left_to_it(tmp_path: Path) -> None:
    hook = "sys.excepthook = lambda kind, error, trace: print('mine', kind.__name__)"
    finished = subprocess.run(
        [sys.executable, written(tmp_path, SCRIPT.format(before=hook))], capture_output=True, text=True, timeout=LONG
    )
    assert (finished.stdout, finished.stderr) == ("mine InvalidRank\n", "")
