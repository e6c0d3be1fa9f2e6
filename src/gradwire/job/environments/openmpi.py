"""Open MPI's mpirun. It names no address where rank 0 could serve: on one host it is derived, else asked for."""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.job.environments.launcher_settings import Found, Partial, derived_port, find, join

RANK = "OMPI_COMM_WORLD_RANK"
SIZE = "OMPI_COMM_WORLD_SIZE"
LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
# The name of one mpirun among all others: from Open MPI 3 on, and before.
NAMESPACE = "PMIX_NAMESPACE"
OLD_NAMESPACE = "OMPI_MCA_orte_ess_jobid"


def detect(environ: Mapping[str, str]) -> Partial | None:
    """What Open MPI's variables say, or None if this process was not started by its mpirun."""
    rank, size = find(environ, RANK), find(environ, SIZE)
    if not (rank and size):
        return None
    local_size, namespace = find(environ, LOCAL_SIZE), find(environ, NAMESPACE, OLD_NAMESPACE)
    job = Found(f"openmpi-{namespace.text}", namespace.source) if namespace else None
    address, hint = None, ""
    if job and local_size and local_size.text == size.text:
        address = Found(join("127.0.0.1", derived_port(job.text)), job.source)
    else:
        hint = "mpirun does not say where rank 0 runs; `mpirun -x GRADWIRE_ADDRESS=host:port …` does"
    return Partial("Open MPI", rank, size, find(environ, LOCAL_RANK), address, True, job=job, hint=hint)
