"""PMI: mpiexec of MPICH, Intel MPI, MVAPICH and Cray. It tells ranks and sizes, but no address to meet at."""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.job.environments.launcher_settings import Partial, find

RANK = "PMI_RANK"
SIZE = "PMI_SIZE"
# MPICH and Intel MPI; Cray; MVAPICH.
LOCAL_RANKS = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")


def detect(environ: Mapping[str, str]) -> Partial | None:
    """What PMI's variables say, or None if this process was not started through PMI."""
    rank, size = find(environ, RANK), find(environ, SIZE)
    if not (rank and size):
        return None
    hint = "mpiexec does not say where rank 0 runs; `mpiexec -genv GRADWIRE_ADDRESS host:port …` does"
    return Partial("PMI", rank, size, find(environ, *LOCAL_RANKS), hint=hint)
