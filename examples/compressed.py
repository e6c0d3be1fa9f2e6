"""One network trained again and again, each time with gradients in fewer bytes.

    gradwire run -n 2 examples/compressed.py
    gradwire run -n 4 examples/compressed.py --epochs 40

The data and the network are those of digits.py. For each compression it shows how many bytes a rank sends in a step,
by the transport's own count, and how many digits the network then reads. All of them keep what they did not send and
send it later (error feedback); the last line shows top-k without that.

The exit code is 0 only if all ranks end with the same bits every time, if each compression with feedback comes within
one point of the accuracy that the whole gradients reach, and if top-k without it learns less.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import NamedTuple

import numpy as np
from digits import BATCH, MOMENTUM, RATE, Data, Tensors, count_correct, digests, gradient_sums, load, random_weights

import gradwire as gw
from gradwire.training import Sampler
from gradwire.training.compression import BF16, F16, Compression, Int8, TopK

KINDS: dict[str, Compression | None] = {
    "float32, as it is": None,
    "float16": F16(),
    "bfloat16": BF16(),
    "int8 by block": Int8(),
    "top 2 %": TopK(0.02),
    "top 2 %, rest dropped": TopK(0.02, feedback=False),
}


class Outcome(NamedTuple):
    accuracy: float
    loss: float  # on all images to learn from
    bytes_per_step: float
    seconds: float
    same: bool


def train(group: gw.Group, kind: Compression | None, data: Data, test: Data, epochs: int) -> Outcome:
    """Gradient descent with momentum, from the same beginning each time."""
    images, labels = data
    weights = random_weights(0)
    velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}
    sync = gw.GradientSync(group, weights, compression=kind)
    sampler = Sampler(len(images), rank=group.rank, size=group.size, seed=0)
    began, before, steps = time.monotonic(), group.bytes_sent, 0
    for epoch in range(epochs):
        for mine in sampler.batches(epoch, BATCH):
            sums = gradient_sums(weights, (images[mine], labels[mine]))
            gradients = {name: sums[name] / max(1, len(mine)) for name in weights}
            descend(weights, velocity, sync.sync(gradients, weight=len(mine)))
            steps += 1
    everyones = group.all_gather_values(digests(weights))
    return Outcome(
        count_correct(weights, test) / len(test[1]),
        float(gradient_sums(weights, data)["loss"][0]) / len(labels),
        (group.bytes_sent - before) / steps,
        time.monotonic() - began,
        all(one == everyones[0] for one in everyones),
    )


def descend(weights: Tensors, velocity: Tensors, gradients: Tensors) -> None:
    for name, weight in weights.items():
        velocity[name] *= MOMENTUM
        velocity[name] += gradients[name]
        weight -= RATE * velocity[name]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with compressed gradients, and compare.")
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    data, test = load()
    fine = True
    with gw.init() as group:
        if group.rank == 0:
            print(
                f"{'gradients':<24}{'sent per step':>16}{'fewer':>8}{'loss':>9}{'right':>8}{'seconds':>9}", flush=True
            )
        outcomes: list[Outcome] = []
        for name, kind in KINDS.items():
            outcome = train(group, kind, data, test, options.epochs)
            outcomes.append(outcome)
            if kind is None or kind.feedback:
                as_it_should = outcomes[0].accuracy - outcome.accuracy <= 0.01
            else:  # unless nothing was dropped, for nobody was there to send to
                as_it_should = group.size == 1 or outcome.loss > 1.5 * outcomes[-2].loss
            fine = fine and outcome.same and as_it_should
            if group.rank == 0:
                times = outcomes[0].bytes_per_step / outcome.bytes_per_step if outcome.bytes_per_step else 1
                faults = [] if outcome.same else ["  ✗ other bits on some ranks"]
                faults += [] if as_it_should else ["  ✗ not as it should be"]
                print(
                    f"{name:<24}{outcome.bytes_per_step:>10,.0f} bytes{times:>7.1f}x{outcome.loss:>9.4f}"
                    f"{outcome.accuracy:>8.1%}{outcome.seconds:>9.1f}{''.join(faults)}",
                    flush=True,
                )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
