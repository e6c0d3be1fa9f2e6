"""Measure how fast plain torch scripts learn of the loss of a rank: torch's DDP on the backend "gradwire".

    python benchmarks/torch_failures.py                          # 10 kills and 10 stops of each kind: a few minutes
    python benchmarks/torch_failures.py --times 20 --how kill --transport shm --ranks 3

The faults and the table are those of failures.py. Here the ranks train with the variables of torchrun, and must raise
`PeerLost` from `backward()`. The sizes are those of the model's gradients.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable

import failures
import torch
import torch._dynamo  # DDP imports it; imported here once, before the ranks are forked
import torch.distributed as dist
from torch import nn

import gradwire.torch  # noqa: F401 — also imported before the fork

LAYERS = 4


def trains(case: failures.Case, rank: int, size: int, port: int, ready: Callable[[], object]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GRADWIRE_TRANSPORT": case.transport,
    }
    torch.set_num_threads(1)
    dist.init_process_group("gradwire")
    width = max(1, math.isqrt(case.nbytes // (4 * LAYERS)))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.ones(4, width)
    for step in range(sys.maxsize):
        if step == 3:  # DDP has built its final buckets by then
            ready()
            if not case.nbytes:
                if rank == 0:
                    time.sleep(failures.HANG_SECONDS)
                dist.barrier()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    sys.exit(failures.main(trains, __doc__, "64Ki,16Mi"))
