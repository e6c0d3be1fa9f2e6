"""The ways of being started: one small file per launcher, its variables as constants, and a `detect`.

    launcher_settings   what each of them returns
    pmi                 PMI_RANK, PMI_SIZE
    torchrun            RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    slurm               SLURM_PROCID, SLURM_STEP_*
    openmpi             OMPI_COMM_WORLD_*

Launchers nest: mpirun starts its daemons through srun, torchrun is started by srun on each host. The variables of the
outer one are inherited and describe other processes, so the innermost, first in `LAUNCHERS`, takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.job.environments import openmpi, pmi, slurm, torchrun
from gradwire.job.environments.launcher_settings import Found, Partial

LAUNCHERS = (torchrun, openmpi, pmi, slurm)

__all__ = ["LAUNCHERS", "Found", "Partial", "detect"]


def detect(environ: Mapping[str, str]) -> tuple[Partial, ...]:
    """What each launcher that left its variables here says, the innermost first."""
    return tuple(found for launcher in LAUNCHERS if (found := launcher.detect(environ)) is not None)
