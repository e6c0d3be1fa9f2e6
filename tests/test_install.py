"""Tests the build of the package: with the native core if it compiles, otherwise without it and with the reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from gradwire.host import native_core

ROOT = Path(__file__).parent.parent
BACKEND = "build_backend/gradwire_build.py"

pytest.importorskip("scikit_build_core", reason="only in an environment that `make` set up")
if not (ROOT / BACKEND).exists():
    pytest.skip("not a source tree", allow_module_level=True)


def hook(tree: Path, call: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Call a hook of the build backend as pip does, in its own process. The last line of its output is the result."""
    program = f"import gradwire_build; print(); print(gradwire_build.{call})"
    inherited = {name: value for name, value in os.environ.items() if name not in ("GRADWIRE_PURE", "CXX", "CXXFLAGS")}
    settings = {**inherited, "PYTHONPATH": str(tree / "build_backend"), **environ}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=tree, env=settings, capture_output=True, text=True, timeout=600, check=False)


def result_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sources")
    name = result_of(hook(ROOT, f"build_sdist({str(folder)!r})"))
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder, filter="data")
    return folder / name.removesuffix(".tar.gz")


@pytest.fixture
def tree(sources: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sources, tmp_path / "tree"))


def test_source_distribution_has_the_build_inputs_and_no_build_outputs(sources: Path) -> None:
    for needed in (BACKEND, "CMakeLists.txt", "native/kernels.inc", "src/gradwire/py.typed", "Makefile", "LICENSE"):
        assert (sources / needed).exists(), needed
    build_outputs = {
        *sources.rglob("*.so"),
        *sources.rglob("_build.json"),
        *sources.rglob("__pycache__"),
        *sources.glob("build"),
    }
    assert not build_outputs


def no_compiler(directory: Path) -> str:
    """Return a PATH with Python and without a compiler."""
    (directory / "python").symlink_to(sys.executable)
    return str(directory)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"GRADWIRE_PURE": "1"}, "GRADWIRE_PURE was set"),
        ({"CXX": "/bin/false"}, "/bin/false does not compile C++20 with Python's headers: exit code 1"),
        ({"CXX": "/no/such/compiler -O2"}, "/no/such/compiler -O2 does not run"),
        ({"PATH": "nothing"}, "there is no C++ compiler"),
        ({"PATH": "nothing", "CXX": "c++ --no-such-option"}, "c++ --no-such-option does not run"),
    ],
)
def test_build_wheel_without_a_core_is_pure_and_records_the_reason(
    tree: Path, tmp_path: Path, environ: dict[str, str], reason: str
) -> None:
    if "PATH" in environ:
        (tmp_path / "bin").mkdir()
        environ = {**environ, "PATH": no_compiler(tmp_path / "bin")}
    assert result_of(hook(tree, "get_requires_for_build_wheel()", **environ)) == "[]"
    done = hook(tree, f"build_wheel({str(tmp_path)!r})", **environ)
    name = result_of(done)
    assert name.endswith("-py3-none-any.whl")
    assert f"gradwire: no native core, {reason}" in done.stderr
    with zipfile.ZipFile(tmp_path / name) as wheel:
        files = wheel.namelist()
        record = json.loads(wheel.read("gradwire/_build.json"))
    assert not record["native"]
    assert reason in record["reason"]
    assert {"gradwire/py.typed", "gradwire/_native.pyi", "gradwire/membership/v1/gradwire.proto"} <= set(files)
    assert not [file for file in files if file.endswith((".so", ".cpp", ".inc")) or file.startswith("native")]


def test_build_wheel_with_a_failing_cmake_is_pure(tree: Path, tmp_path: Path) -> None:
    (tree / "CMakeLists.txt").write_text('message(FATAL_ERROR "broken")\n')
    name = result_of(hook(tree, f"build_wheel({str(tmp_path)!r})"))
    with zipfile.ZipFile(tmp_path / name) as wheel:
        record = json.loads(wheel.read("gradwire/_build.json"))
    assert record == {"native": False, "reason": "its compilation failed; `pip install -v` shows the errors"}


def test_build_wheel_with_gradwire_strict_and_no_core_fails(tree: Path, tmp_path: Path) -> None:
    done = hook(tree, f"build_wheel({str(tmp_path)!r})", CXX="/bin/false", GRADWIRE_STRICT="1")
    assert done.returncode != 0
    assert "GRADWIRE_STRICT is set, but the native core cannot be built" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_build_editable_points_to_the_sources(tree: Path, tmp_path: Path) -> None:
    name = result_of(hook(tree, f"build_editable({str(tmp_path)!r})", GRADWIRE_PURE="1"))
    with zipfile.ZipFile(tmp_path / name) as wheel:
        lines = [wheel.read(file).decode().strip() for file in wheel.namelist() if file.endswith(".pth")]
    assert lines == [str(tree / "src")]
    assert not json.loads((tree / "src/gradwire/_build.json").read_text())["native"]


@pytest.mark.slow
def test_build_wheel_with_a_compiler_has_a_working_core(tree: Path, tmp_path: Path) -> None:
    if native_core.why_pure():
        pytest.skip(f"there is no native core: {native_core.why_pure()}")
    name = result_of(hook(tree, f"build_wheel({str(tmp_path)!r})", GRADWIRE_STRICT="1"))
    assert "-cp3" in name
    installed = tmp_path / "installed"
    with zipfile.ZipFile(tmp_path / name) as wheel:
        wheel.extractall(installed)
    assert (installed / "gradwire/py.typed").exists()
    version = subprocess.run(
        [sys.executable, "-m", "gradwire", "--version"],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.endswith(", with its native core\n")


# -- the installed package ---------------------------------------------------------------------------------------------


def test_why_missing_reports_the_reason_from_the_build_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, error = tmp_path / "_build.json", ImportError("undefined symbol")
    assert "pip install --editable ." in native_core.why_missing(record, error)
    record.write_text('{"nat')
    assert "pip install --editable ." in native_core.why_missing(record, error)
    record.write_text('{"native": true, "reason": null}')
    assert native_core.why_missing(record, error) == "it was built, but cannot be loaded: undefined symbol"
    record.write_text('{"native": false, "reason": "no compiler"}')
    assert native_core.why_missing(record, error) == "no compiler"
    monkeypatch.setenv("GRADWIRE_PURE", "1")
    assert native_core.why_pure() == "GRADWIRE_PURE is set"
    assert native_core.state() == "without its native core: GRADWIRE_PURE is set"
