"""torchrun, and everything that speaks its variables: `torch.distributed.run`, Kubeflow, many scripts of clusters.

`RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` suffice. The address is reported without a rank too: batch scripts
often export only `MASTER_ADDR` and `MASTER_PORT` and leave the ranks to srun.
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
# "True" when torchrun's agent serves its store at MASTER_PORT, where rank 0 can then not listen.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


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


def on_one_host(environ: Mapping[str, str]) -> bool:
    """Whether all ranks run where this one does."""
    here = environ.get(LOCAL_SIZE)
    return here is not None and here == environ.get(SIZE)


def agree(host: str, port: int, offered: str | None, timeout: float, environ: Mapping[str, str]) -> str:
    """The address at which the ranks meet, told to all through torchrun's store by the one that offers it."""
    from torch.distributed import TCPStore  # torch is there: its launcher started this process

    key = f"gradwire/coordinator/{environ.get(RUN_ID, '')}/{environ.get(RESTARTS, '0')}"
    try:
        store = TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout))
        if offered is not None:
            store.set(key, offered)
        return str(store.get(key).decode())
    except RuntimeError as error:  # what torch raises, whatever went wrong
        raise NoConnection(f"the ranks could not agree on an address through torchrun's store: {error}") from error
