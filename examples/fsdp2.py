"""FSDP2 on gradwire: each rank holds a share of weights and optimizer's state, and a checkpoint brings them back.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    gradwire run -n 2 examples/fsdp2.py

The same functions as on any other backend: `fully_shard` gathers the weights of a layer before it is used and scatters
the gradients after it; `torch.distributed.checkpoint` writes each rank's share. Here the training is interrupted
half-way, goes on in a new model from the checkpoint, and must end with the weights of a run without interruption.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, WIDTH = 20, 64


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Each rank sees its own samples; which ones, the step alone decides."""
    loss = torch.zeros(())
    for step in steps:
        random = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(32, WIDTH, generator=random)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.item())


def whole(model: nn.Module) -> Tensor:
    """All weights, gathered from their shards."""
    shards: list[Any] = list(model.parameters())
    return torch.cat([shard.full_tensor().detach().flatten() for shard in shards])


def main() -> int:
    torch.set_num_threads(1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gradwire")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)

    model, optimizer = build()
    first = train(model, optimizer, range(STEPS // 2))
    weights, state = get_state_dict(model, optimizer)
    written = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    written.result()  # it could go on training meanwhile
    last = train(model, optimizer, range(STEPS // 2, STEPS))

    again, its_optimizer = build()
    weights, state = get_state_dict(again, its_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(again, its_optimizer, model_state_dict=weights, optim_state_dict=state)
    train(again, its_optimizer, range(STEPS // 2, STEPS))

    shards: list[Any] = list(model.parameters())
    held = sum(shard.to_local().numel() for shard in shards)
    alike = torch.equal(whole(model), whole(again))
    if dist.get_rank() == 0:
        print(f"each of {dist.get_world_size()} ranks holds {held} of {whole_size(model)} weights", flush=True)
        print(f"loss {first:.2f} half-way, {last:.2f} in the end", flush=True)
        print(f"from the checkpoint the weights come out {'the same' if alike else 'DIFFERENT'}", flush=True)
        shutil.rmtree(str(folder[0]))
    dist.destroy_process_group()
    return 0 if alike and last < first else 1


def whole_size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    raise SystemExit(main())
