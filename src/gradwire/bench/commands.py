"""The command lines and environments that start the ranks of an engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.bench import start
from gradwire.bench.rivals import Rival
from gradwire.launch import worker_setup
from gradwire.launch.rendezvous import Rendezvous

# Whoever starts a benchmark from within a job, or beside another MPI, does not make the ranks part of it.
_FOREIGN = ("SLURM_", "PMI_", "PMIX_", "HYDI_", "OMPI_COMM_WORLD_", "TORCHELASTIC_")
_FOREIGN_NAMES = {"OPAL_PREFIX", "I_MPI_ROOT", "MPI_HOME"}
# One thread for arithmetic in each process.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Command:
    arguments: list[str]
    environ: dict[str, str]


def of_gradwire(
    size: int, meeting_place: Path, options: Mapping[str, Any], environ: Mapping[str, str], meeting: Rendezvous
) -> list[Command]:
    """One for each rank, started as `gradwire run` starts them."""
    shared = worker_setup.shared_by_workers(
        environ,
        size,
        coordinator=meeting.coordinator.address,
        job=meeting.job,
        token=meeting.token,
        port=worker_setup.free_port(),
    )
    worker = [sys.executable, "-P", *_worker("gradwire", meeting_place, options)]
    return [Command(worker, worker_setup.of_worker({**shared, **_ONE_THREAD}, rank)) for rank in range(size)]


def of_rival(
    rival: Rival,
    python: Path,
    size: int,
    meeting_place: Path,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    cores: int,
) -> list[Command]:
    """One for each rank; for MPI a single one, of the mpiexec beside that Python."""
    crowded = size > cores
    clean = {name: value for name, value in environ.items() if not _is_foreign(name)}
    settings = (*rival.variables, *(rival.crowded_variables if crowded else ()))
    environ = {**clean, **_ONE_THREAD, "TMPDIR": str(meeting_place.parent), **dict(settings)}
    # -I: nothing of the user's Python path gets between the engine and its own packages.
    if not rival.is_mpi:
        each = [{**options, "rank": rank} for rank in range(size)]
        return [Command([str(python), "-I", *_worker(rival.name, meeting_place, one)], environ) for one in each]
    mpiexec = [str(python.parent / "mpiexec"), *rival.arguments, *(rival.crowded if crowded else ()), "-n", str(size)]
    return [Command([*mpiexec, str(python), "-I", *_worker(rival.name, meeting_place, options)], environ)]


def settings_of(rival: Rival, size: int, cores: int) -> str:
    """What was set beyond the engine's defaults, as one would type it."""
    crowded = size > cores
    variables = (*rival.variables, *(rival.crowded_variables if crowded else ()))
    arguments = (*rival.arguments, *(rival.crowded if crowded else ()))
    return " ".join([*(f"{name}={value}" for name, value in variables), *arguments])


def _is_foreign(name: str) -> bool:
    return name in _FOREIGN_NAMES or name.startswith(_FOREIGN)


def _worker(name: str, meeting_place: Path, options: Mapping[str, Any]) -> list[str]:
    return [start.__file__, name, str(meeting_place), json.dumps(options)]
