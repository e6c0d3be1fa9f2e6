"""A PyTorch classifier on several processes: three lines more than on one.

    gradwire run -n 2 examples/torch_ddp.py                     # two ranks on this machine
    python examples/torch_ddp.py                                # one rank: the same script
    torchrun --nproc-per-node 2 examples/torch_ddp.py           # started by torch, if you like
    gradwire run -n 2 examples/torch_ddp.py --compression bf16  # half the bytes between ranks

The lines that make it parallel are marked. Each rank computes its share of each batch; backward averages the gradients
over the ranks while it runs, and every rank takes the same step. Nothing else has to be kept in step by hand: the
weights begin as rank 0's, a NaN on one rank stops all of them with its name, and every 50 steps the ranks compare
digests of their weights. At the end they do so once more, and rank 0 says how many unseen digits are read right.

The images are from the UCI repository (see data/README.md).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gradwire as gw

FILE = Path(__file__).parent / "data" / "digits.csv.gz"
TESTED = 360  # images held out
BATCH = 120  # samples in a step, of all ranks together
TARGET = 0.95


def load() -> tuple[Any, Any]:
    """Images of 8 × 8 pixels and which digit each shows, in an order that is the same on all ranks."""
    table = np.loadtxt(FILE, delimiter=",", dtype=np.float32)
    table = table[gw.Sampler(len(table), rank=0, size=1, seed=1998).epoch(0)]
    images = torch.from_numpy(table[:, :64] / np.float32(16)).reshape(-1, 1, 8, 8)
    return images, torch.from_numpy(table[:, 64].astype(np.int64))


def make() -> Any:
    """A small convolutional network, with batch normalisation: its running means are kept in step, too."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def accuracy(model: Any, images: Any, labels: Any) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).float().mean()
    model.train()
    return float(right)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a PyTorch network on handwritten digits, on all ranks.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--compression", help="f16, bf16, int8 or topk: fewer bytes between ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = load()
    test, train = (images[:TESTED], labels[:TESTED]), (images[TESTED:], labels[TESTED:])

    with gw.init() as group:  # ← who am I?
        model = gw.torch.DistributedDataParallel(  # ← wrap the model
            make(), group, compression=options.compression, contract_every=50
        )
        sampler = gw.Sampler(len(train[0]), rank=group.rank, size=group.size, seed=0)  # ← this rank's share of the data
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        began = time.monotonic()
        for epoch in range(options.epochs):
            for batch in sampler.batches(epoch, BATCH):
                optimizer.zero_grad()
                model.weigh(len(batch))  # shares differ by a sample where a batch cannot be divided
                loss = nn.functional.cross_entropy(model(train[0][batch]), train[1][batch])
                loss.backward()
                optimizer.step()
            if group.rank == 0 and (epoch + 1) % 4 == 0:
                right = accuracy(model, *test)
                print(f"epoch {epoch + 1:3}  loss {loss.item():.4f}  accuracy {right:6.1%}", flush=True)

        digest = gw.check_replicas(group, model.state_dict())  # raises if the ranks do not hold the same bits
        right = accuracy(model, *test)
        if group.rank == 0:
            print(f"{group.size} ranks hold the same weights, {digest[:8]}, after {time.monotonic() - began:.1f} s")
            print(f"{right:.1%} of {TESTED} test images right")
        return 0 if right >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
