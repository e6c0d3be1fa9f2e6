"""A PyTorch run that survives the loss of workers, and takes new ones in without a checkpoint.

    gradwire run -n 3 --min 1 examples/elastic_torch.py --lose 1                # rank 1 dies half-way: the rest go on
    gradwire run -n 2 --min 2 --restarts 1 examples/elastic_torch.py --lose 1   # or wait for the one that replaces it
    gradwire run -n 2 --min 1 --max 4 examples/elastic_torch.py                 # others may: gradwire join …
    gradwire run -n 2 examples/elastic_torch.py                                 # of fixed size: a loss is an error
    python examples/elastic_torch.py                                            # one process

What replicas hold alike, the model and its optimizer, is the state of the run. A step is done by all ranks or by none:
when one is lost, the others notice within a second, form the next generation and do the interrupted step again. A
worker that joins gets the state, Adam's moments and all, from a peer. The wrapped model follows by itself.

Which samples a rank sees follows from the step and from who is there, so no batch is lost or seen twice. The network
learns to tell two spirals apart, made on the spot.
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
    """Points of two spirals, and which one each is on; the same on every rank."""
    random = torch.Generator().manual_seed(seed)
    way = torch.rand(SAMPLES, generator=random).sqrt()
    which = torch.randint(0, 2, (SAMPLES,), generator=random)
    angle = 3 * math.pi * way + math.pi * which
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * way[:, None]
    return points + 0.01 * torch.randn(points.shape, generator=random), which


def accuracy(model: Any, points: Any, which: Any) -> float:
    with torch.no_grad():
        return float((model(points).argmax(dim=1) == which).float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description="Elastic training of a PyTorch model.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lose", type=int, metavar="RANK", help="kill this rank half-way (needs an elastic job)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    points, which = spirals(seed=0)

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
                group = run.group  # of this generation
                if options.lose == group.rank and step.index == options.steps // 2 and group.generation == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                sampler = gw.Sampler(SAMPLES, rank=group.rank, size=group.size, seed=1)
                batch = sampler.batch(step.index, BATCH)
                optimizer.zero_grad()
                ddp.weigh(len(batch))
                nn.functional.cross_entropy(ddp(points[batch]), which[batch]).backward()
                optimizer.step()

        group = run.group
        digest = gw.check_replicas(group, model.state_dict())
        right = accuracy(model, *spirals(seed=1))
        if group.rank == 0:
            print(f"generation {group.generation}: {group.size} ranks hold the same weights, {digest[:8]}")
            print(f"{right:.1%} of {SAMPLES} other points right, after {time.monotonic() - began:.1f} s")
        return 0 if right >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
