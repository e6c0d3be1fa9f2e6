"""Build the command lines and environments that start the ranks of an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire.bench import start_rank
from gradwire.bench.installs import Install
from gradwire.bench.rivals import Rival
from gradwire.host import malloc
from gradwire.launch import worker_setup
from gradwire.security.secret import TOKEN, new_token

# Variables of a job in which the benchmark runs, or of another MPI. They would make the ranks join that job.
_FOREIGN = ("SLURM_", "PMI_", "PMIX_", "HYDI_", "OMPI_COMM_WORLD_", "TORCHELASTIC_")
_FOREIGN_NAMES = {"OPAL_PREFIX", "I_MPI_ROOT", "MPI_HOME"}
# Each rank computes on one thread.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Command:
    arguments: list[str]
    environ: dict[str, str]


@dataclass(frozen=True)
class EngineSpec:
    """An engine to measure, not started yet."""

    name: str  # in tables and JSON
    commands: Callable[[Path, dict[str, Any]], list[Command]]  # called with the socket's path and the ranks' options
    facts: dict[str, str] = field(default_factory=dict)  # for the report, in addition to the engine's own
    advice: str = ""  # added to the error if the engine does not start


def of_gradwire(
    install: Install, size: int, socket_path: Path, options: Mapping[str, Any], environ: Mapping[str, str]
) -> list[Command]:
    """Return one command per rank, with variables that all versions of gradwire read. Rank 0 serves the rendezvous."""
    shared = {
        **malloc.variables(environ, size),  # the same variables as `gradwire run` sets
        **install.environ(worker_setup.without_identity(_without_foreign(environ))),
        **_ONE_THREAD,
        TOKEN: new_token(),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(worker_setup.free_port()),
    }
    # -P keeps the script's folder off sys.path: the modules of gradwire.bench could hide other modules.
    arguments = [str(install.python), "-P", *_start("gradwire", socket_path, options)]
    return [Command(arguments, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)]


def of_rival(
    rival: Rival,
    python: Path,
    size: int,
    socket_path: Path,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    cores: int,
) -> list[Command]:
    """Return one command per rank, or for MPI a single command: the mpiexec in the folder of that Python."""
    crowded = size > cores
    settings = (*rival.variables, *(rival.crowded_variables if crowded else ()))
    environ = {**_without_foreign(environ), **_ONE_THREAD, "TMPDIR": str(socket_path.parent), **dict(settings)}
    # -I ignores the user's PYTHONPATH, which could hide the engine's own packages.
    if not rival.is_mpi:
        by_rank = [{**options, "rank": rank} for rank in range(size)]
        return [Command([str(python), "-I", *_start(rival.name, socket_path, one)], environ) for one in by_rank]
    mpiexec = [str(python.parent / "mpiexec"), *rival.arguments, *(rival.crowded if crowded else ()), "-n", str(size)]
    return [Command([*mpiexec, str(python), "-I", *_start(rival.name, socket_path, options)], environ)]


def settings_of(rival: Rival, size: int, cores: int) -> str:
    """Return all settings that differ from the engine's defaults, as on a command line."""
    crowded = size > cores
    variables = (*rival.variables, *(rival.crowded_variables if crowded else ()))
    arguments = (*rival.arguments, *(rival.crowded if crowded else ()))
    return " ".join([*(f"{name}={value}" for name, value in variables), *arguments])


def _without_foreign(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environ.items() if name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN)
    }


def _start(name: str, socket_path: Path, options: Mapping[str, Any]) -> list[str]:
    return [start_rank.__file__, name, str(socket_path), json.dumps(options)]
