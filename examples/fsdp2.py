"""Train with FSDP2 on gradwire: each rank holds a shard of the weights and of the optimizer's state.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    gradwire run -n 2 examples/fsdp2.py

The script uses the same functions as on any other backend. `fully_shard` gathers the weights of a layer before they are
used, and reduces and scatters the gradients afterwards. `torch.distributed.checkpoint` writes the shard of each rank.
The script saves a checkpoint half-way, continues from it in a new model, and checks that the new model ends with the
same weights as the first one.
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
    """Train for some steps and return the last loss. The step and the rank determine the samples."""
    loss = torch.zeros(())
    for step in steps:
        random = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(32, WIDTH, generator=random)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.item())


def full_weights(model: nn.Module) -> Tensor:
    """Return all weights, gathered from their shards."""
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
    written.result()  # a real program would train meanwhile
    last = train(model, optimizer, range(STEPS // 2, STEPS))

    restored, its_optimizer = build()
    weights, state = get_state_dict(restored, its_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(restored, its_optimizer, model_state_dict=weights, optim_state_dict=state)
    train(restored, its_optimizer, range(STEPS // 2, STEPS))

    shards: list[Any] = list(model.parameters())
    held = sum(shard.to_local().numel() for shard in shards)
    identical = torch.equal(full_weights(model), full_weights(restored))
    if dist.get_rank() == 0:
        print(f"rank 0 of {dist.get_world_size()} holds {held} of {count_weights(model)} weights", flush=True)
        print(f"loss {first:.2f} half-way, {last:.2f} at the end", flush=True)
        print(f"the model from the checkpoint ends with {'the same' if identical else 'DIFFERENT'} weights", flush=True)
        shutil.rmtree(str(folder[0]))
    dist.destroy_process_group()
    return 0 if identical and last < first else 1


def count_weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    raise SystemExit(main())
