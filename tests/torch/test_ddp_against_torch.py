"""DistributedDataParallel and the DDP of torch on Gloo, in real processes: the same weights after 50 steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers need it: import it once, before ranks are forked
import torch.distributed as dist
import xxhash

import gradwire as gw
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.small_models import batch, loss, mlp, weights

STEPS = 50
ALGORITHMS = ("auto", "star", "ring", "tree", "halving", "direct", "hierarchical")


def train(ddp: Any, rank: int) -> dict[str, Any]:
    """Train with momentum; some steps accumulate without sync, and some drop the gradients, others zero them."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=number % 3 > 0)
        if number % 5 == 0:
            with ddp.no_sync():
                x, y = batch(1000 + number, rank)
                loss(ddp(x), y).backward()
        x, y = batch(number, rank)
        loss(ddp(x), y).backward()
        optimizer.step()
    return weights(ddp.module)


def trains_both_ways(here: Here, folder: str) -> None:
    rank, size = int(os.environ["GRADWIRE_RANK"]), int(os.environ["GRADWIRE_SIZE"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    expected = train(torch.nn.parallel.DistributedDataParallel(mlp(7)), rank)
    dist.destroy_process_group()
    results = {}
    with gw.init() as group:
        for algorithm in ALGORITHMS:
            model = mlp(7 if rank == 0 else rank)  # the other ranks start with different weights
            ddp = gw.torch.DistributedDataParallel(
                model, group, algorithm=algorithm, bucket_mb=0.001, first_bucket_mb=0.0005, contract_every=10
            )
            found = train(ddp, rank)
            far = max(float((found[name] - one).abs().max()) for name, one in expected.items())
            bits = xxhash.xxh3_64_hexdigest(b"".join(one.numpy().tobytes() for one in found.values()))
            results[algorithm] = [far, bits]
    here.send(**results)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ddp_weights_equal_those_of_torch_ddp_on_gloo(size: int, job: StartJob, tmp_path: Path) -> None:
    with job(trains_both_ways, size, str(tmp_path)) as ranks:
        reports = [rank.receive() for rank in ranks]
        assert [rank.ended() for rank in ranks] == [0] * size
    for algorithm in ALGORITHMS:
        assert max(rank[algorithm][0] for rank in reports) <= 1e-6, algorithm
        assert len({rank[algorithm][1] for rank in reports}) == 1, algorithm
