"""Train a PyTorch model that survives the loss of workers and accepts new workers, without a checkpoint.

    gradwire run -n 3 --min 1 examples/elastic_torch.py --lose 1                # rank 1 dies half-way, others continue
    gradwire run -n 2 --min 2 --restarts 1 examples/elastic_torch.py --lose 1   # rank 1 dies and is replaced
    gradwire run -n 2 --min 1 --max 4 examples/elastic_torch.py                 # more workers may join: gradwire join …
    gradwire run -n 2 examples/elastic_torch.py                                 # fixed size: a loss is an error
    python examples/elastic_torch.py                                            # one process

The state of the run is what all replicas share: the model and its optimizer. A step is completed by all ranks or
repeated. If a rank is lost, the others notice it within a second, form the next generation and repeat the interrupted
step. A worker that joins receives the state from another rank, including Adam's moments. The wrapped model switches to
the new generation's group automatically.

The step and the current ranks determine which samples each rank computes, so no sample is lost or computed twice. The
network learns to separate two spirals of generated points.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

import gradwire as gw

SAMPLES, BATCH, STEPS = 2000, 200, 600
TARGET = 0.97


def spirals(seed: int) -> tuple[Any, Any]:
    """Return points on two spirals, and the spiral of each point; the same on every rank."""
    random = torch.Generator().manual_seed(seed)
    radius = torch.rand(SAMPLES, generator=random).sqrt()
    spiral = torch.randint(0, 2, (SAMPLES,), generator=random)
    angle = 3 * math.pi * radius + math.pi * spiral
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * radius[:, None]
    return points + 0.01 * torch.randn(points.shape, generator=random), spiral


def accuracy(model: Any, points: Any, spiral: Any) -> float:
    with torch.no_grad():
        return float((model(points).argmax(dim=1) == spiral).float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a PyTorch model in an elastic job.")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default: {STEPS})")
    parser.add_argument("--lose", type=int, metavar="RANK", help="kill this rank half-way (needs an elastic job)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    points, spiral = spirals(seed=0)

    with gw.init() as group:
        model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        run = gw.elastic({"model": model, "optimizer": optimizer})
        ddp = gw.torch.DistributedDataParallel(model, run)
        if group.generation > 1:
            print(f"pid {os.getpid()} joins generation {group.generation} as rank {group.rank}", flush=True)

        began = time.monotonic()
        for step in run.steps(options.steps):
            with step:
                group = run.group  # the group of the current generation
                if options.lose == group.rank and step.index == options.steps // 2 and group.generation == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                sampler = gw.Sampler(SAMPLES, rank=group.rank, size=group.size, seed=1)
                batch = sampler.batch(step.index, BATCH)
                optimizer.zero_grad()
                ddp.weigh(len(batch))
                nn.functional.cross_entropy(ddp(points[batch]), spiral[batch]).backward()
                optimizer.step()

        group = run.group
        digest = gw.check_replicas(group, model.state_dict())
        correct = accuracy(model, *spirals(seed=1))
        if group.rank == 0:
            print(f"generation {group.generation}: {group.size} ranks hold the same weights, {digest[:8]}")
            print(f"{correct:.1%} of {SAMPLES} new points correct, after {time.monotonic() - began:.1f} s")
        return 0 if correct >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
