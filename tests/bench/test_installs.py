"""Other installs of gradwire are found by their interpreters. The tests use real virtual environments without pip."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gradwire as gw
from gradwire.bench import installs, rivals
from support.versions import fake_package, interpreter

# This gradwire is on PYTHONPATH and must not hide the other install.
ENVIRON = os.environ | {"PYTHONPATH": str(Path(gw.__file__).parents[1])}


def of_version(folder: Path, version: str) -> Path:
    return interpreter(folder / ".venv", fake_package(folder / "src", f"__version__ = {version!r}"))


def test_find_with_interpreter_or_folder_returns_the_version_of_that_install(tmp_path: Path) -> None:
    python = of_version(tmp_path / "old", "9.8.7")
    for path in (python, python.parents[1]):
        install = installs.find([str(path)], ENVIRON)[str(path)]
        assert (install.name, install.python) == ("gradwire 9.8.7 (…/old/.venv)", python)


def test_find_with_equal_short_names_returns_names_with_whole_paths(tmp_path: Path) -> None:
    pythons = [of_version(tmp_path / parent / "old", "9.8.7") for parent in ("one", "two")]
    found = installs.find([str(python) for python in pythons], ENVIRON)
    assert [one.name for one in found.values()] == [f"gradwire 9.8.7 ({python})" for python in pythons]


def a_script(folder: Path) -> Path:
    path = folder / "script"
    path.write_text("#!/bin/sh\necho 3.11\n")
    path.chmod(0o700)
    return path


def broken(folder: Path) -> Path:
    return interpreter(folder / "broken", fake_package(folder / "zero", "1 / 0"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "bin" / "python", "/bin/python does not exist; give the path of a Python that has"),
        (lambda folder: folder, "is a folder without bin/python; give the path of a Python that has gradwire"),
        (lambda folder: Path("/dev/null"), "cannot run /dev/null: Permission denied; give the path of a Python"),
        (a_script, "script is not a Python interpreter of version 3.11 or later; give the path of a Python"),
        (
            lambda folder: interpreter(folder / "bare"),
            "python has no gradwire: .*/bare/bin/python -m pip install gradwire",
        ),
        (broken, r"cannot be imported; repair that install:\n(.*\n)*Zero"),
    ],
    ids=["nothing there", "other folder", "not executable", "other program", "without gradwire", "broken gradwire"],
)
def test_find_without_an_install_raises_with_advice(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(gw.ConfigError, match=message):
        installs.find([str(make(tmp_path))], ENVIRON)


def test_this_install_imports_this_package_wherever_it_runs(tmp_path: Path) -> None:
    install = installs.this_install()
    environ = install.environ({"PYTHONPATH": str(tmp_path)})
    assert (install.name, install.python) == ("gradwire", Path(sys.executable))
    assert environ["PYTHONPATH"].split(os.pathsep) == [str(Path(gw.__file__).parents[1]), str(tmp_path)]


def test_parse_against_accepts_names_and_paths_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "gloo").mkdir()
    found = rivals.parse_against("gloo,../python3, old,mpich,./old,gloo")
    assert found == ["gloo", str(tmp_path.parent / "python3"), str(tmp_path / "old"), "mpich"]
    with pytest.raises(gw.ConfigError, match=r"'new' is not one of gloo, .*, nor the path of a Python interpreter"):
        rivals.parse_against("old,new")
