"""Train one network several times, each time with another compression of the gradients.

    gradwire run -n 2 examples/compressed.py
    gradwire run -n 4 examples/compressed.py --epochs 40

The data and the network are those of digits.py. For each compression the example prints how many bytes a rank sends per
step, counted by the transport, and the accuracy. All compressions keep the part of a gradient that they did not send
and add it to the next one (error feedback). The last line shows top-k without error feedback.

The exit code is 0 only if all ranks end with the same bits every time, if each compression with error feedback comes
within one percentage point of the accuracy of uncompressed gradients, and if top-k without it learns less.
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
    "float32, uncompressed": None,
    "float16": F16(),
    "bfloat16": BF16(),
    "int8 by block": Int8(),
    "top 2 %": TopK(0.02),
    "top 2 %, no feedback": TopK(0.02, feedback=False),
}


class Outcome(NamedTuple):
    accuracy: float
    loss: float  # on all training images
    bytes_per_step: float
    seconds: float
    same: bool


def train(group: gw.Group, kind: Compression | None, data: Data, test: Data, epochs: int) -> Outcome:
    """Train by gradient descent with momentum, with the same initial weights each time."""
    images, labels = data
    weights = random_weights(0)
    velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}
    sync = gw.GradientSync(group, weights, compression=kind)
    sampler = Sampler(len(images), rank=group.rank, size=group.size, seed=0)
    began, before, steps = time.monotonic(), group.bytes_sent, 0
    for epoch in range(epochs):
        for share in sampler.batches(epoch, BATCH):
            sums = gradient_sums(weights, (images[share], labels[share]))
            gradients = {name: sums[name] / max(1, len(share)) for name in weights}
            descend(weights, velocity, sync.sync(gradients, weight=len(share)))
            steps += 1
    of_ranks = group.all_gather_values(digests(weights))
    return Outcome(
        count_correct(weights, test) / len(test[1]),
        float(gradient_sums(weights, data)["loss"][0]) / len(labels),
        (group.bytes_sent - before) / steps,
        time.monotonic() - began,
        all(one == of_ranks[0] for one in of_ranks),
    )


def descend(weights: Tensors, velocity: Tensors, gradients: Tensors) -> None:
    for name, weight in weights.items():
        velocity[name] *= MOMENTUM
        velocity[name] += gradients[name]
        weight -= RATE * velocity[name]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with compressed gradients, and compare the results.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (default: 30)")
    options = parser.parse_args()
    data, test = load()
    passed = True
    with gw.init() as group:
        if group.rank == 0:
            print(
                f"{'gradients':<24}{'sent per step':>16}{'fewer':>8}{'loss':>9}{'correct':>8}{'seconds':>9}", flush=True
            )
        outcomes: list[Outcome] = []
        for name, kind in KINDS.items():
            outcome = train(group, kind, data, test, options.epochs)
            outcomes.append(outcome)
            if kind is None or kind.feedback:
                as_expected = outcomes[0].accuracy - outcome.accuracy <= 0.01
            else:  # a single rank sends nothing, so it drops nothing
                as_expected = group.size == 1 or outcome.loss > 1.5 * outcomes[-2].loss
            passed = passed and outcome.same and as_expected
            if group.rank == 0:
                times = outcomes[0].bytes_per_step / outcome.bytes_per_step if outcome.bytes_per_step else 1
                problems = [] if outcome.same else ["  ✗ different bits on some ranks"]
                problems += [] if as_expected else ["  ✗ unexpected accuracy or loss"]
                print(
                    f"{name:<24}{outcome.bytes_per_step:>10,.0f} bytes{times:>7.1f}x{outcome.loss:>9.4f}"
                    f"{outcome.accuracy:>8.1%}{outcome.seconds:>9.1f}{''.join(problems)}",
                    flush=True,
                )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
