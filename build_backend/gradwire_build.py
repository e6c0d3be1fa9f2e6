"""Build gradwire with its native core if the core can be compiled, otherwise without it.

This is a PEP 517 backend around scikit-build-core. pip hides the output of a build. So the backend records in the
package (`gradwire/_build.json`) whether the core was built, and the reason if it was not. `gradwire.host.native_core`
reads this record.

    GRADWIRE_PURE=1     do not build the core
    GRADWIRE_STRICT=1   fail if the core cannot be built, and treat compiler warnings as errors

An editable installation consists of a .pth file that names src/, and of the core in src/gradwire.
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
TEMPLATE = ROOT / "build" / RECORD  # scikit-build-core puts it into the package, by a setting in pyproject.toml
PROBE = "#include <Python.h>\n#include <bit>\n#include <concepts>\nstatic_assert(std::integral<int>);\n"

build_sdist = scikit.build_sdist
get_requires_for_build_sdist = scikit.get_requires_for_build_sdist


# --- PEP 517 hooks. Metadata is prepared before it is known whether the core can be built. The build does not reuse it.


def get_requires_for_build_wheel(settings: Settings = None) -> list[str]:
    """Return CMake and ninja if the machine has none and the core can be built with them."""
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
    report_missing_core(reason)
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
        report_missing_core(reason)
    record(reason)
    shutil.copyfile(TEMPLATE, PACKAGE / RECORD)
    return editable_wheel(Path(directory), settings)


# --- building


def native_wheel(directory: str, settings: Settings) -> str:
    record(None)
    strict = {"cmake.define.GRADWIRE_STRICT": "ON" if is_set("GRADWIRE_STRICT") else "OFF"}
    return str(scikit.build_wheel(directory, {**strict, **(settings or {})}))


def build_in_place(settings: Settings) -> None:
    """Build a wheel and copy the core from it into src/gradwire. The build directory is kept for the next build."""
    build_folder = {"build-dir": f"build/{sys.implementation.cache_tag}"}
    with tempfile.TemporaryDirectory() as directory:
        wheel = native_wheel(directory, {**build_folder, **(settings or {})})
        with zipfile.ZipFile(Path(directory, wheel)) as archive:
            for name in archive.namelist():
                if name.startswith("gradwire/_native.") and name.endswith(".so"):
                    replace(PACKAGE / Path(name).name, archive.read(name))


def editable_wheel(directory: Path, settings: Settings) -> str:
    """Write a wheel that only adds src/ to the import path, and return its name.

    scikit-build-core's editable wheel installs an import finder that takes precedence over PYTHONPATH.
    """
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
    """Replace a library by a new file. Writing into the old one would change it in processes that have loaded it."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    new.chmod(0o755)
    new.replace(path)


def pure(settings: Settings) -> dict[str, str | list[str]]:
    return {**(settings or {}), "wheel.cmake": "false"}


def record(reason: str | None) -> None:
    """Write the record of the build. It is a template for scikit-build-core, so $ is escaped."""
    TEMPLATE.parent.mkdir(exist_ok=True)
    TEMPLATE.write_text(json.dumps({"native": reason is None, "reason": reason}).replace("$", "$$") + "\n", "utf-8")


# --- decisions


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def obstacle() -> str | None:
    """Return why the core cannot or must not be built, or None if nothing speaks against an attempt."""
    if is_set("GRADWIRE_PURE"):
        return "GRADWIRE_PURE was set when gradwire was installed"
    if sys.platform != "linux":
        return f"the core needs Linux, and this is {sys.platform}"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        return f"Python's headers are missing ({headers}): apt install python3-dev, or your system's package for them"
    compiler = shlex.split(os.environ.get("CXX", "")) or first_on_path("c++", "g++", "clang++")
    if not compiler:
        return "there is no C++ compiler (c++, g++ or clang++): apt install g++, or your system's package for it"
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
    message = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
    return f"{shlex.join(compiler)} does not compile C++20 with Python's headers: {message}"


def first_on_path(*names: str) -> list[str]:
    return next(([name] for name in names if shutil.which(name)), [])


def obtainable(packages: list[str]) -> bool:
    """Return whether pip can install binary packages of these.

    If the backend required a package that cannot be installed, the whole installation would fail. uv's environments
    have no pip; then the packages are assumed to be installable.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # PYTHONPATH names the packages of this isolated build, which must not influence pip.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if subprocess.run([*pip, "--version"], env=environ, capture_output=True, check=False).returncode != 0:
        return True
    dry = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "--timeout", "15"]
    return subprocess.run([*pip, *dry, *packages], env=environ, capture_output=True, check=False).returncode == 0


def failure(error: BaseException) -> str:
    kind = type(error).__name__
    if kind == "CMakeNotFoundError" or (isinstance(error, Exception) and "Could not find CMake" in str(error)):
        return "CMake is missing, and pip cannot install it: apt install cmake"
    if isinstance(error, SystemExit):
        return "its compilation failed; `pip install -v` shows the errors"
    return f"its compilation failed: {kind}: {error}"


def report_missing_core(reason: str) -> None:
    """Print why there is no core. With GRADWIRE_STRICT, fail, unless GRADWIRE_PURE asked for it."""
    print(f"gradwire: no native core, {reason}", file=sys.stderr)
    if is_set("GRADWIRE_STRICT") and not is_set("GRADWIRE_PURE"):
        raise SystemExit(f"gradwire: GRADWIRE_STRICT is set, but the native core cannot be built: {reason}")


if __name__ == "__main__":  # print the packages that an installation without build isolation needs first
    os.chdir(ROOT)
    print(*get_requires_for_build_editable(), sep="\n")
