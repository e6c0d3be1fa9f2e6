"""Define the other engines: their packages, their environments, and the settings with which their ranks are started.

Each engine has its own virtual environment in the user's cache directory. Only `gradwire bench --install` creates it.
Gloo is also found in gradwire's own environment if torch is installed there.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradwire.errors import ConfigError, TransportError

_DONE = "installed.json"  # written last: an environment without it is incomplete


@dataclass(frozen=True)
class Rival:
    """An engine that gradwire is compared with."""

    name: str
    title: str
    environment: str  # the name of its virtual environment
    packages: tuple[str, ...]
    module: str  # the module to import; if that works, the engine is installed
    is_mpi: bool = True
    arguments: tuple[str, ...] = ()  # of mpiexec
    crowded: tuple[str, ...] = ()  # more arguments, if there are more ranks than cores
    variables: tuple[tuple[str, str], ...] = ()
    crowded_variables: tuple[tuple[str, str], ...] = ()  # more variables, if there are more ranks than cores


# Ranks are not bound to cores, except by Intel MPI, whose default binding is the fastest for it.
_OPENMPI = ("--allow-run-as-root", "--bind-to", "none")
_OPENMPI_CROWDED = ("--oversubscribe", "--mca", "mpi_yield_when_idle", "1")

RIVALS = {
    rival.name: rival
    for rival in (
        Rival(
            "gloo",
            "Gloo",
            "gloo",
            ("torch==2.13.0", "numpy", "ml_dtypes"),
            "torch",
            is_mpi=False,
            variables=(("GLOO_SOCKET_IFNAME", "lo"),),
        ),
        Rival(
            "openmpi",
            "Open MPI",
            "openmpi",
            ("openmpi", "mpi4py>=4.1", "numpy", "ml_dtypes"),
            "mpi4py",
            arguments=_OPENMPI,
            crowded=_OPENMPI_CROWDED,
        ),
        Rival(
            "openmpi-tcp",
            "Open MPI over TCP",
            "openmpi",
            ("openmpi", "mpi4py>=4.1", "numpy", "ml_dtypes"),
            "mpi4py",
            arguments=(*_OPENMPI, "--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
            crowded=_OPENMPI_CROWDED,
        ),
        # MPICH yields its core after 1000 polls (MPIR_CVAR_POLLS_BEFORE_YIELD), so it needs no settings for crowding.
        Rival("mpich", "MPICH", "mpich", ("mpich", "mpi4py>=4.1", "numpy", "ml_dtypes"), "mpi4py"),
        Rival(
            "impi",
            "Intel MPI",
            "impi",
            ("impi-rt", "mpi4py>=4.1", "numpy", "ml_dtypes"),
            "mpi4py",
            variables=(("I_MPI_FABRICS", "shm"),),
            crowded_variables=(("I_MPI_THREAD_YIELD", "2"),),
        ),
    )
}
INSTALLABLE = sorted({rival.environment for rival in RIVALS.values()})


def parse(text: str, known: Sequence[str]) -> list[str]:
    """Parse names separated by commas. Each name is returned once."""
    names = _words(text, known)
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r} is not one of {', '.join(known)}")
    return names


def parse_against(text: str) -> list[str]:
    """Parse names of rivals and paths of interpreters, separated by commas. Each is returned once, paths absolute."""
    found = []
    for word in _words(text, list(RIVALS)):
        path = os.path.abspath(os.path.expanduser(word))
        if word not in RIVALS and os.sep not in word and not os.path.exists(path):
            raise ConfigError(f"{word!r} is not one of {', '.join(RIVALS)}, nor the path of a Python interpreter")
        found.append(word if word in RIVALS else path)
    return list(dict.fromkeys(found))


def _words(text: str, known: Sequence[str]) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise ConfigError(f"no name given: choose from {', '.join(known)}")
    return words


# ── finding environments ─────────────────────────────────────────────────────────────────────────────────────────────


def folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the environments."""
    cache = environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"  # XDG: ignore a relative path
    return base / "gradwire" / "rivals"


def find(rival: Rival, environ: Mapping[str, str]) -> Path:
    """Return the Python that has the rival. Raise `ConfigError` with the install command if there is none."""
    place = folder(environ) / rival.environment
    if _is_complete(place, rival):
        return place / "bin" / "python"
    if not rival.is_mpi and importlib.util.find_spec(rival.module) is not None:
        return Path(sys.executable)
    raise ConfigError(f"{rival.title} is not installed: gradwire bench --install {rival.environment}")


def _is_complete(place: Path, rival: Rival) -> bool:
    """Return whether the environment is complete and was created with the current recipe."""
    try:
        recorded = json.loads((place / _DONE).read_text())
    except (OSError, ValueError):
        return False
    return bool(recorded == recipe(rival)) and (place / "bin" / "python").exists()


def recipe(rival: Rival) -> dict[str, object]:
    """Return what determines an environment: the Python version and the packages."""
    return {"python": list(sys.version_info[:2]), "packages": list(rival.packages)}


# ── installing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def install(name: str, environ: Mapping[str, str], progress: Callable[[str], None]) -> Path:
    """Create the environment of that name, unless it is complete. pip's output goes to `progress`, line by line."""
    rival = next(rival for rival in RIVALS.values() if rival.environment == name)
    place = folder(environ) / name
    with _locked(place):
        if _is_complete(place, rival):
            progress(f"{rival.title} is already installed, in {place}")
            return place
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(place)
        progress(f"creating an environment in {place}")
        run_reporting([sys.executable, "-m", "venv", str(place)], f"cannot create an environment in {place}", progress)
        python = str(place / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--progress-bar=off"]
        run_reporting([*pip, *rival.packages], f"cannot install {rival.title}", progress)
        run_reporting(
            [python, "-I", "-c", f"import {rival.module}"], f"{rival.title} was installed but does not load", progress
        )
        (place / _DONE).write_text(json.dumps(recipe(rival)))
    return place


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold the lock of an environment, because another process may be creating it."""
    with contextlib.ExitStack() as stack:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(place.with_suffix(".lock"), "w"))
        except OSError as error:
            problem = f"cannot write to {place.parent}: {error.strerror}; set XDG_CACHE_HOME to use another folder"
            raise TransportError(problem) from error
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_reporting(command: list[str], problem: str, progress: Callable[[str], None]) -> None:
    """Run a command and pass its output to `progress`. Raise `TransportError` with the last lines if it fails."""
    last: deque[str] = deque(maxlen=15)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            for line in process.stdout or ():
                last.append(line.rstrip())
                progress(line.rstrip()[:100])
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise TransportError("\n".join([f"{problem} (exit code {process.returncode}):", *last]))
