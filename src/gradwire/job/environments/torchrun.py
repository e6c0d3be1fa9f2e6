"""Read the variables of torchrun, which `torch.distributed.run`, Kubeflow and many cluster scripts also set.

`RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` suffice. The address is returned without a rank too: batch scripts
often export only `MASTER_ADDR` and `MASTER_PORT`, and srun gives the ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from gradwire.errors import NoConnection
from gradwire.job.environments.launcher_settings import Found, Partial, find, join

RANK = "RANK"
SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_SIZE = "LOCAL_WORLD_SIZE"
HOST = "MASTER_ADDR"
PORT = "MASTER_PORT"
RUN_ID = "TORCHELASTIC_RUN_ID"
# "True" if torchrun's agent serves its store at MASTER_PORT. Then rank 0 cannot listen there.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def detect(environ: Mapping[str, str]) -> Partial | None:
    """Return torchrun's settings, or None if none of its variables is set."""
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
        # torchrun's run id is "none" if the user gave no id. It does not identify the job.
        job=Found(f"torchrun-{run.text}", run.source) if run and run.text != "none" else None,
        hint=hint,
    )


def on_one_host(environ: Mapping[str, str]) -> bool:
    """Return whether all ranks run on this host."""
    local_size = environ.get(LOCAL_SIZE)
    return local_size is not None and local_size == environ.get(SIZE)


def agree(host: str, port: int, offered: str | None, timeout: float, environ: Mapping[str, str]) -> str:
    """Return the address where the ranks meet. The rank with an `offered` address writes it to torchrun's store."""
    from torch.distributed import TCPStore  # torch is installed: torchrun started this process

    key = f"gradwire/coordinator/{environ.get(RUN_ID, '')}/{environ.get(RESTARTS, '0')}"
    try:
        store = TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout))
        if offered is not None:
            store.set(key, offered)
        return str(store.get(key).decode())
    except RuntimeError as error:  # the store raises it for every kind of failure
        raise NoConnection(f"the ranks could not agree on an address through torchrun's store: {error}") from error
