"""torch's DDP on our backend holds gradients once: they are views of its buckets, unless a script says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP wants it: once, before ranks are forked
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from backend_ranks import meet, run
from processes import Here, StartJob
from processes import job_fixture as job_fixture
from processes import zygote_fixture as zygote_fixture
from small_models import batch, loss, mlp, weights


def in_buckets(ddp: Any) -> bool:
    """Whether a backward leaves all gradients in one piece of memory: of a small model there is one bucket."""
    ddp(torch.ones(2, 4)).sum().backward()
    return len({one.grad.untyped_storage().data_ptr() for one in ddp.parameters()}) == 1


def wrapped(here: Here, file: str) -> None:
    meet(file)
    gloo, mesh = dist.new_group(backend="gloo"), init_device_mesh("cpu", (dist.get_world_size(),))
    ways: dict[str, Any] = {
        "unsaid": DistributedDataParallel,
        "in a group": lambda one: DistributedDataParallel(one, process_group=dist.new_group()),
        "in a mesh": lambda one: DistributedDataParallel(one, device_mesh=mesh),
        "refused": lambda one: DistributedDataParallel(one, gradient_as_bucket_view=False),
        "refused by position": lambda one: DistributedDataParallel(one, *NO_VIEWS),
        "on Gloo": lambda one: DistributedDataParallel(one, process_group=gloo),
    }
    found: dict[str, Any] = {name: in_buckets(wrap(nn.Linear(4, 2))) for name, wrap in ways.items()}
    try:
        DistributedDataParallel(nn.Linear(4, 2), no_such_option=1)
    except TypeError as error:
        found["unknown"] = str(error)
    here.tell(**found)
    dist.destroy_process_group()


NO_VIEWS = (None, None, 0, None, True, None, None, False, False, False)  # what torch has before and at the option


def test_gradients_are_views_of_buckets_unless_told_otherwise(job: StartJob, tmp_path: Path) -> None:
    for one in run(job, wrapped, 2, tmp_path):
        assert "no_such_option" in one.pop("unknown")
        assert one == {
            "unsaid": True,
            "in a group": True,
            "in a mesh": True,
            "refused": False,
            "refused by position": False,
            "on Gloo": False,
        }


def trains(here: Here, file: str) -> None:
    rank, _ = meet(file)
    gloo = dist.new_group(backend="gloo")
    found, expected = (steps(DistributedDataParallel(mlp(7), process_group=group), rank) for group in (None, gloo))
    here.tell(far=max(float((found[name] - one).abs().max()) for name, one in expected.items()))
    dist.destroy_process_group()


def steps(ddp: Any, rank: int) -> dict[str, Any]:
    """Gradients that are dropped, zeroed, or added to with and without sync."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for number in range(12):
        if number % 4:
            optimizer.zero_grad(set_to_none=number % 4 == 1)
        if number % 5 == 0:
            with ddp.no_sync():
                x, y = batch(1000 + number, rank)
                loss(ddp(x), y).backward()
        x, y = batch(number, rank)
        loss(ddp(x), y).backward()
        optimizer.step()
    return weights(ddp.module)


def test_weights_are_those_of_gloo_without_views(job: StartJob, tmp_path: Path) -> None:
    assert max(one["far"] for one in run(job, trains, 2, tmp_path)) <= 1e-6
