"""Read the variables of PMI, which mpiexec of MPICH, Intel MPI, MVAPICH and Cray sets.

PMI gives rank and size, but no address for the rendezvous: the user must set `GRADWIRE_ADDRESS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.job.environments.launcher_settings import Partial, find

RANK = "PMI_RANK"
SIZE = "PMI_SIZE"
# The variables of MPICH and Intel MPI, of Cray, and of MVAPICH, in this order.
LOCAL_RANKS = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")


def detect(environ: Mapping[str, str]) -> Partial | None:
    """Return PMI's settings, or None if this process was not started through PMI."""
    rank, size = find(environ, RANK), find(environ, SIZE)
    if not (rank and size):
        return None
    hint = "mpiexec does not pass on the address of rank 0: use `mpiexec -genv GRADWIRE_ADDRESS host:port …`"
    return Partial("PMI", rank, size, find(environ, *LOCAL_RANKS), hint=hint)
