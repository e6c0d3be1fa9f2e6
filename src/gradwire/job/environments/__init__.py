"""Read the settings that launchers pass in variables. Each launcher has a module with its variables and a `detect`.

    launcher_settings   the type that every `detect` returns
    pmi                 PMI_RANK, PMI_SIZE
    torchrun            RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    slurm               SLURM_PROCID, SLURM_STEP_*
    openmpi             OMPI_COMM_WORLD_*

Launchers nest: srun starts the daemons of mpirun, and srun starts torchrun on each host. A process inherits the
variables of the outer launcher, which describe another process. So the innermost launcher takes precedence. It comes
first in `LAUNCHERS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.job.environments import openmpi, pmi, slurm, torchrun
from gradwire.job.environments.launcher_settings import Found, Partial

LAUNCHERS = (torchrun, openmpi, pmi, slurm)

__all__ = ["LAUNCHERS", "Found", "Partial", "detect"]


def detect(environ: Mapping[str, str]) -> tuple[Partial, ...]:
    """Return the settings of each launcher whose variables are set, the innermost launcher first."""
    return tuple(found for launcher in LAUNCHERS if (found := launcher.detect(environ)) is not None)
