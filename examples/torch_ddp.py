"""Train a PyTorch classifier on several processes. It has three more lines than a program for one process.

    gradwire run -n 2 examples/torch_ddp.py                     # two ranks on this machine
    python examples/torch_ddp.py                                # one rank: the same script
    torchrun --nproc-per-node 2 examples/torch_ddp.py           # started by torchrun
    gradwire run -n 2 examples/torch_ddp.py --compression bf16  # half the bytes between ranks

The lines that make it parallel are marked. Each rank computes its share of each batch. Backward averages the gradients
over the ranks while it runs, so every rank takes the same step. gradwire does the rest: all ranks begin with rank 0's
weights, a NaN on one rank raises an error on all ranks that names it, and every 50 steps the ranks compare digests of
their weights. At the end they compare once more, and rank 0 prints the accuracy on unseen digits.

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
BATCH = 120  # samples per step, over all ranks
TARGET = 0.95


def load() -> tuple[Any, Any]:
    """Return the images of 8 × 8 pixels and their digits, in the same order on all ranks."""
    table = np.loadtxt(FILE, delimiter=",", dtype=np.float32)
    table = table[gw.Sampler(len(table), rank=0, size=1, seed=1998).epoch(0)]
    images = torch.from_numpy(table[:, :64] / np.float32(16)).reshape(-1, 1, 8, 8)
    return images, torch.from_numpy(table[:, 64].astype(np.int64))


def make() -> Any:
    """Return a small convolutional network. The running means of its batch normalisation are synchronised too."""
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
        correct = (model(images).argmax(dim=1) == labels).float().mean()
    model.train()
    return float(correct)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a PyTorch network on handwritten digits, on all ranks.")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the data (default: 12)")
    parser.add_argument("--compression", help="f16, bf16, int8 or topk: fewer bytes between ranks (default: none)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = load()
    test, train = (images[:TESTED], labels[:TESTED]), (images[TESTED:], labels[TESTED:])

    with gw.init() as group:  # ← join the job
        model = gw.torch.DistributedDataParallel(  # ← wrap the model
            make(), group, compression=options.compression, contract_every=50
        )
        sampler = gw.Sampler(len(train[0]), rank=group.rank, size=group.size, seed=0)  # ← this rank's share of the data
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        began = time.monotonic()
        for epoch in range(options.epochs):
            for batch in sampler.batches(epoch, BATCH):
                optimizer.zero_grad()
                model.weigh(len(batch))  # if a batch cannot be divided evenly, the shares differ by one sample
                loss = nn.functional.cross_entropy(model(train[0][batch]), train[1][batch])
                loss.backward()
                optimizer.step()
            if group.rank == 0 and (epoch + 1) % 4 == 0:
                print(
                    f"epoch {epoch + 1:3}  loss {loss.item():.4f}  accuracy {accuracy(model, *test):6.1%}", flush=True
                )

        digest = gw.check_replicas(group, model.state_dict())  # raises if the ranks do not hold the same bits
        correct = accuracy(model, *test)
        if group.rank == 0:
            print(f"{group.size} ranks hold the same weights, {digest[:8]}, after {time.monotonic() - began:.1f} s")
            print(f"{correct:.1%} of {TESTED} test images correct")
        return 0 if correct >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
