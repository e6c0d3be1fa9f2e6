"""Read the variables of Open MPI's mpirun.

mpirun gives no address for the rendezvous. If all ranks run on one host, the address is derived from the name of the
mpirun. Otherwise the user must set `GRADWIRE_ADDRESS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.job.environments.launcher_settings import Found, Partial, derived_port, find, join

RANK = "OMPI_COMM_WORLD_RANK"
SIZE = "OMPI_COMM_WORLD_SIZE"
LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
# The unique name of one mpirun, in Open MPI 3 and later, and in earlier versions.
NAMESPACE = "PMIX_NAMESPACE"
OLD_NAMESPACE = "OMPI_MCA_orte_ess_jobid"


def detect(environ: Mapping[str, str]) -> Partial | None:
    """Return Open MPI's settings, or None if its mpirun did not start this process."""
    rank, size = find(environ, RANK), find(environ, SIZE)
    if not (rank and size):
        return None
    local_size, namespace = find(environ, LOCAL_SIZE), find(environ, NAMESPACE, OLD_NAMESPACE)
    job = Found(f"openmpi-{namespace.text}", namespace.source) if namespace else None
    address, hint = None, ""
    if job and local_size and local_size.text == size.text:
        address = Found(join("127.0.0.1", derived_port(job.text)), job.source)
    else:
        hint = "mpirun does not pass on the address of rank 0: use `mpirun -x GRADWIRE_ADDRESS=host:port …`"
    return Partial("Open MPI", rank, size, find(environ, LOCAL_RANK), address, True, job=job, hint=hint)
