"""torchrun, and everything that speaks its variables: `torch.distributed.run`, Kubeflow, many scripts of clusters.

`RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` suffice. The address is reported without a rank too: batch scripts
often export only `MASTER_ADDR` and `MASTER_PORT` and leave the ranks to srun.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.environments.found import Found, Partial, find, join

RANK = "RANK"
SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
HOST = "MASTER_ADDR"
PORT = "MASTER_PORT"
RUN_ID = "TORCHELASTIC_RUN_ID"
# "True" when torchrun's agent serves its store at MASTER_PORT, where rank 0 can then not listen.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def detect(environ: Mapping[str, str]) -> Partial | None:
    """What torchrun's variables say, or None if none of them is set."""
    rank, size = find(environ, RANK), find(environ, SIZE)
    host, port = find(environ, HOST), find(environ, PORT)
    if not (rank or size or host or port):
        return None
    address, hint = None, ""
    if host and port:
        address = Found(join(host.text, port.text), f"{HOST} and {PORT}")
    elif host or port:
        there, missing = (HOST, PORT) if host else (PORT, HOST)
        hint = f"{there} is set, but {missing} is not"
    run = find(environ, RUN_ID)
    return Partial(
        launcher="torchrun",
        rank=rank,
        size=size,
        local_rank=find(environ, LOCAL_RANK),
        address=address,
        address_taken=address is not None and environ.get(AGENT_STORE) == "True",
        # "none" is torchrun's run id where the user gave none: it names nothing.
        job=Found(f"torchrun-{run.text}", run.source) if run and run.text != "none" else None,
        hint=hint,
    )
