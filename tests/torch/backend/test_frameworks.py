"""Users of torch.distributed (FSDP, DTensor, checkpoints, ZeRO, ...) give the same results on gradwire and Gloo."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from support.backend_ranks import environ_of, meet
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

pytestmark = pytest.mark.slow

MINUTES = 300.0


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def batches() -> list[Tensor]:
    random = torch.Generator().manual_seed(100 + dist.get_rank())
    return [torch.randn(4, 8, generator=random, dtype=torch.float64) for _ in range(4)]


def trained(net: Any, optimizer: torch.optim.Optimizer) -> None:
    for x in batches():
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(tensors: Any) -> Tensor:
    return torch.cat([one.detach().flatten() for one in tensors])


def full(parameters: Any) -> Tensor:
    return flat(one.full_tensor() for one in parameters)


def ddp(place: Path) -> Tensor:
    net = DistributedDataParallel(model())
    trained(net, torch.optim.SGD(net.parameters(), 0.1))
    return flat(net.parameters())


def ddp_hooks(place: Path) -> Tensor:
    """Three communication hooks: torch's compression, torch's PowerSGD, and a user's hook with futures."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def doubled(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations of hooks
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * 2)

    found = []
    for state, hook in (
        (None, default_hooks.fp16_compress_hook),
        (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
        (None, doubled),
    ):
        net = DistributedDataParallel(model().float(), gradient_as_bucket_view=True)
        net.register_comm_hook(state, hook)
        net(batches()[0].float()).square().mean().backward()
        found.append(flat(one.grad for one in net.parameters()).double())
    return torch.cat(found)


def join(place: Path) -> Tensor:
    """Train with different amounts of data on the ranks."""
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with net.join():
        for x in batches()[: 2 + dist.get_rank() % 2]:
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(net.parameters())


def compiled(place: Path) -> Tensor:
    net = torch.compile(DistributedDataParallel(model()))
    trained(net, torch.optim.SGD(net.parameters(), 0.1))
    return flat(net.parameters())


def fsdp1(place: Path) -> Tensor:
    from torch.distributed.fsdp import FullyShardedDataParallel as Sharded

    net = Sharded(model(), device_id=torch.device("cpu"), use_orig_params=True)
    trained(net, torch.optim.Adam(net.parameters(), 0.01))
    with Sharded.summon_full_params(net):
        return flat(net.parameters()).clone()


def fsdp2(place: Path) -> Tensor:
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, reshard_after_forward=True)
    fully_shard(net)
    trained(net, torch.optim.Adam(net.parameters(), 0.01))
    return full(net.parameters())


def hybrid(place: Path) -> Tensor:
    """Train with FSDP on a mesh: sharded in one dimension, replicated in the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))
    net = model()
    fully_shard(net, mesh=mesh)
    trained(net, torch.optim.Adam(net.parameters(), 0.01))
    return full(net.parameters())


def dtensor(place: Path) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(48, dtype=torch.float64).reshape(8, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    product = rows @ columns.redistribute(mesh, [Replicate()])
    turned = rows.redistribute(mesh, [Shard(1)])
    partial = distribute_tensor(whole, mesh, [Shard(0)]).sum(0)
    found = [product.full_tensor(), turned.full_tensor(), turned.to_local(), partial.full_tensor()]
    return torch.cat([one.flatten() for one in found]) if dist.get_rank() == 0 else found[0].flatten()


def tensor_parallel(place: Path) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.arange(16, dtype=torch.float64).reshape(2, 8) / 16
    y = net(x)
    y.sum().backward()
    found: list[Tensor] = [y.detach().flatten(), net[0].weight.grad.full_tensor().flatten()]
    return torch.cat(found)


def checkpoint(place: Path) -> Tensor:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    found = []
    for kind in ("save", "async_save"):
        net = model(1)
        fully_shard(net)
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        trained(net, optimizer)
        weights, state = get_state_dict(net, optimizer)
        to = {"model": weights, "optimizer": state}
        if kind == "save":
            dcp.save(to, checkpoint_id=place / kind)
        else:
            apart = dist.new_group()  # another thread writes the checkpoint, concurrently with the training
            writing = dcp.async_save(to, checkpoint_id=place / kind, process_group=apart)
            trained(net, optimizer)  # these steps must not appear in the checkpoint
            writing.result()
        other = model(2)
        fully_shard(other)
        its_optimizer = torch.optim.Adam(other.parameters(), 0.01)
        weights, state = get_state_dict(other, its_optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=place / kind)
        set_state_dict(other, its_optimizer, model_state_dict=weights, optim_state_dict=state)
        if kind == "save":
            assert torch.equal(full(other.parameters()), full(net.parameters()))
        trained(other, its_optimizer)
        if kind == "async_save":
            assert torch.equal(full(other.parameters()), full(net.parameters()))
        found.append(full(other.parameters()))
    return torch.cat(found)


def zero(place: Path) -> Tensor:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    trained(net, optimizer)
    optimizer.consolidate_state_dict(0)
    return flat(net.parameters())


def functional(place: Path) -> Tensor:
    import torch.distributed._functional_collectives as collectives

    group, rank = dist.group.WORLD, dist.get_rank()
    x = torch.arange(8, dtype=torch.float64) + rank
    found = [
        collectives.all_reduce(x, "sum", group),
        collectives.all_gather_tensor(x, 0, group),
        collectives.reduce_scatter_tensor(x, "sum", 0, group),
        collectives.all_to_all_single(x, None, None, group),
        collectives.broadcast(x, 1, group),
    ]
    return torch.cat([one.flatten() + 0 for one in found])


EVERY: dict[str, Callable[[Path], Tensor]] = {
    one.__name__: one
    for one in (
        *(ddp, ddp_hooks, join, fsdp1, fsdp2, hybrid, dtensor),
        *(tensor_parallel, checkpoint, zero, functional, compiled),
    )
}


if shutil.which("c++") is None:
    del EVERY["compiled"]


def outcomes(here: Here, backend: str, place: str) -> None:
    folder = Path(place)
    rank, _ = meet(f"{folder}/store", backend, MINUTES)
    for name, body in EVERY.items():
        torch.save(body(folder / name), folder / f"{name}-{rank}.pt")
        here.send(done=name)
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_backend_frameworks_give_the_results_of_gloo(job: StartJob, tmp_path: Path, size: int) -> None:
    for backend in ("gradwire", "gloo"):
        folder = tmp_path / backend
        folder.mkdir()

        def environ(rank: int, folder: Path = folder) -> dict[str, str]:
            return environ_of(size)(rank) | {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache-{rank}")}

        with job(outcomes, size, backend, str(folder), environ=environ) as ranks:
            for rank in ranks:
                while (report := rank.receive())["done"] != list(EVERY)[-1]:
                    assert report["done"] in EVERY
            for rank in ranks:
                assert rank.ended() == 0, rank.output()
    for file in sorted((tmp_path / "gloo").glob("*.pt")):
        ours, theirs = torch.load(tmp_path / "gradwire" / file.name), torch.load(file)
        # Sums of more than two numbers depend on their order. gradwire sums float16 in float32, Gloo does not.
        close = {"rtol": 1e-6, "atol": 1e-4 if file.name.startswith("ddp_hooks") else 1e-9}
        torch.testing.assert_close(ours, theirs, **close, msg=lambda text, file=file: f"{file.name} {text}")
