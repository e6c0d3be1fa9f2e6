"""Builds gradwire: with its native core where that can be compiled, without it elsewhere.

A PEP 517 backend in front of scikit-build-core, which does the work. What became of the core, and why, is recorded in
the package (`gradwire/_build.json`), since pip hides what a build prints: `gradwire.host.native_core` reads it.

    GRADWIRE_PURE=1     do not build the core
    GRADWIRE_STRICT=1   fail rather than do without it; warnings of the compiler are errors

An editable installation is a line in a .pth file that names src/; the core is put into src/gradwire itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from scikit_build_core import build as scikit

Settings = dict[str, "str | list[str]"] | None

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "gradwire"
RECORD = "_build.json"
TEMPLATE = ROOT / "build" / RECORD  # pyproject.toml tells scikit-build-core to put it into the package
PROBE = "#include <Python.h>\n#include <bit>\n#include <concepts>\nstatic_assert(std::integral<int>);\n"

build_sdist = scikit.build_sdist
get_requires_for_build_sdist = scikit.get_requires_for_build_sdist


# --- the hooks. Metadata is prepared before it is known whether there will be a core, so that none of it is taken over.


def get_requires_for_build_wheel(settings: Settings = None) -> list[str]:
    """CMake and ninja, where the machine has none and they would be of use."""
    if obstacle():
        return []
    wanted: list[str] = scikit.get_requires_for_build_wheel(settings)
    return wanted if not wanted or obtainable(wanted) else []


get_requires_for_build_editable = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(directory: str, settings: Settings = None) -> str:
    return str(scikit.prepare_metadata_for_build_wheel(directory, pure(settings)))


def prepare_metadata_for_build_editable(directory: str, settings: Settings = None) -> str:
    return str(scikit.prepare_metadata_for_build_editable(directory, pure(settings)))


def build_wheel(directory: str, settings: Settings = None, metadata: str | None = None) -> str:
    reason = obstacle()
    if reason is None:
        try:
            return native_wheel(directory, settings)
        except (Exception, SystemExit) as error:
            reason = failure(error)
    do_without(reason)
    record(reason)
    return str(scikit.build_wheel(directory, pure(settings)))


def build_editable(directory: str, settings: Settings = None, metadata: str | None = None) -> str:
    for stale in [*PACKAGE.glob(f"_native*{sysconfig.get_config_var('EXT_SUFFIX')}"), PACKAGE / RECORD]:
        stale.unlink(missing_ok=True)
    reason = obstacle()
    if reason is None:
        try:
            build_in_place(settings)
        except (Exception, SystemExit) as error:
            reason = failure(error)
    if reason is not None:
        do_without(reason)
    record(reason)
    shutil.copyfile(TEMPLATE, PACKAGE / RECORD)
    return pointer(Path(directory), settings)


# --- building


def native_wheel(directory: str, settings: Settings) -> str:
    record(None)
    strict = {"cmake.define.GRADWIRE_STRICT": "ON" if asked_for("GRADWIRE_STRICT") else "OFF"}
    return str(scikit.build_wheel(directory, {**strict, **(settings or {})}))


def build_in_place(settings: Settings) -> None:
    """The core into src/gradwire, by way of a wheel. Its build directory stays, so that the next time is quick."""
    kept = {"build-dir": f"build/{sys.implementation.cache_tag}"}
    with tempfile.TemporaryDirectory() as directory:
        wheel = native_wheel(directory, {**kept, **(settings or {})})
        with zipfile.ZipFile(Path(directory, wheel)) as archive:
            for name in archive.namelist():
                if name.startswith("gradwire/_native.") and name.endswith(".so"):
                    replace(PACKAGE / Path(name).name, archive.read(name))


def pointer(directory: Path, settings: Settings) -> str:
    """A wheel that only names src/. Scikit-build-core's has a finder that goes before all others, even PYTHONPATH."""
    with tempfile.TemporaryDirectory() as prepared:
        described = Path(prepared, prepare_metadata_for_build_editable(prepared, settings))
        files = {
            f"{described.name}/{path.relative_to(described)}": path.read_bytes() for path in sorted_files(described)
        }
    files["gradwire.pth"] = f"{PACKAGE.parent}\n".encode()
    listing = f"{described.name}/RECORD"
    lines = [f"{name},sha256={digest(content)},{len(content)}" for name, content in files.items()]
    files[listing] = "\n".join([*lines, f"{listing},,", ""]).encode()
    name = f"{described.name.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(directory / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)
    return name


def sorted_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "RECORD")


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def replace(path: Path, content: bytes) -> None:
    """Never write into a library that a process may have loaded."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    new.chmod(0o755)
    new.replace(path)


def pure(settings: Settings) -> dict[str, str | list[str]]:
    return {**(settings or {}), "wheel.cmake": "false"}


def record(reason: str | None) -> None:
    """What the package will say about its core; as a template, in which $ means something."""
    TEMPLATE.parent.mkdir(exist_ok=True)
    TEMPLATE.write_text(json.dumps({"native": reason is None, "reason": reason}).replace("$", "$$") + "\n", "utf-8")


# --- deciding


def asked_for(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def obstacle() -> str | None:
    """Why the core cannot or shall not be built, as far as can be told beforehand."""
    if asked_for("GRADWIRE_PURE"):
        return "GRADWIRE_PURE was set when gradwire was installed"
    if sys.platform != "linux":
        return f"the core is for Linux, and this is {sys.platform}"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        return f"Python's headers are missing ({headers}): apt install python3-dev, or what your system calls it"
    compiler = shlex.split(os.environ.get("CXX", "")) or first_on_path("c++", "g++", "clang++")
    if not compiler:
        return "there is no C++ compiler (c++, g++ or clang++): apt install g++, or what your system calls it"
    return compiler_obstacle(compiler, headers.parent)


def compiler_obstacle(compiler: list[str], headers: Path) -> str | None:
    command = [*compiler, "-std=c++20", "-fsyntax-only", f"-I{headers}", "-x", "c++", "-"]
    try:
        done = subprocess.run(command, input=PROBE, text=True, capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{shlex.join(compiler)} does not run: {error}"
    if done.returncode == 0:
        return None
    print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    said = next((line for line in done.stderr.splitlines() if "error" in line), f"it exits with {done.returncode}")
    return f"{shlex.join(compiler)} does not compile C++20 with Python's headers: {said}"


def first_on_path(*names: str) -> list[str]:
    return next(([name] for name in names if shutil.which(name)), [])


def obtainable(packages: list[str]) -> bool:
    """Whether pip can get them ready-made: asking in vain makes the whole installation fail. uv has no pip to ask."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # this build's own packages
    if subprocess.run([*pip, "--version"], env=environ, capture_output=True, check=False).returncode != 0:
        return True
    dry = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "--timeout", "15"]
    return subprocess.run([*pip, *dry, *packages], env=environ, capture_output=True, check=False).returncode == 0


def failure(error: BaseException) -> str:
    kind = type(error).__name__
    if kind == "CMakeNotFoundError" or (isinstance(error, Exception) and "Could not find CMake" in str(error)):
        return "there is no CMake, and pip cannot get it: apt install cmake"
    if isinstance(error, SystemExit):
        return "its compilation failed; pip install -v shows how"
    return f"its compilation failed: {kind}: {error}"


def do_without(reason: str) -> None:
    """Say it, for those who watch; refuse it to those who asked for strictness."""
    print(f"gradwire: no native core, {reason}", file=sys.stderr)
    if asked_for("GRADWIRE_STRICT") and not asked_for("GRADWIRE_PURE"):
        raise SystemExit(f"gradwire: GRADWIRE_STRICT is set, but there would be no native core: {reason}")


if __name__ == "__main__":  # what to install before an installation without build isolation
    os.chdir(ROOT)
    print(*get_requires_for_build_editable(), sep="\n")
