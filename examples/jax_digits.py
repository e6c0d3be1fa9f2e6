"""Train one network on several processes with JAX: the task of digits.py with a compiled step.

    gradwire run -n 2 examples/jax_digits.py                                # two ranks on this machine
    python examples/jax_digits.py                                           # one rank: the same script
    gradwire run -n 3 --min 2 examples/jax_digits.py --lose 1               # rank 1 dies half-way: the others continue

Needs JAX: pip install 'gradwire[jax]'. The lines that make it distributed are marked with ◆. The whole step (forward,
backward, all-reduce, update) is one compiled program. Each rank computes its share of every global batch. Gradients and
sample counts are summed over all ranks in one exchange and then divided, so uneven shares are weighted correctly.

The exit code is 0 only if all ranks end with the same bits and the accuracy is high enough.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradwire as gw

FILE = Path(__file__).parent / "data" / "digits.csv.gz"
TESTED = 360  # images held out
HIDDEN = 64
BATCH = 100  # samples per step, over all ranks
RATE = 0.1
MOMENTUM = 0.9


def load() -> tuple[Any, Any]:
    """Return (images, labels) for training and for testing. The split is the same on all ranks."""
    table = np.loadtxt(FILE, delimiter=",", dtype=np.float32)
    table = table[gw.Sampler(len(table), rank=0, size=1, seed=1998).epoch(0)]
    images, labels = table[:, :64] / 16, table[:, 64].astype(np.int32)
    return (images[:-TESTED], labels[:-TESTED]), (images[-TESTED:], labels[-TESTED:])


def random_params(key: jax.Array) -> Any:
    one, two = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(one, (64, HIDDEN)) * (2 / 64) ** 0.5, "b": jnp.zeros(HIDDEN)},
        "output": {"w": jax.random.normal(two, (HIDDEN, 10)) * (2 / HIDDEN) ** 0.5, "b": jnp.zeros(10)},
    }


def scores(params: Any, images: Any) -> Any:
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["output"]["w"] + params["output"]["b"]


def loss_sum(params: Any, images: Any, labels: Any, counts: Any) -> Any:
    """Return the sum of the losses, weighted by `counts`: 1 for a sample, 0 for padding.

    Padding gives all batches the same shape, so that the step is compiled once.
    """
    logs = jax.nn.log_softmax(scores(params, images))
    return -jnp.sum(jnp.take_along_axis(logs, labels[:, None], axis=1)[:, 0] * counts)


def step_of(run: gw.Elastic) -> Any:
    """Return the compiled step. It uses the run instead of its group, so it stays valid in the next generation."""

    @gw.jax.jit  # ◆ like jax.jit, but raises gw.PeerLost when a rank is lost
    def step(params: Any, velocity: Any, images: Any, labels: Any, counts: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_sum)(params, images, labels, counts)
        sums = {"gradients": gradients, "loss": loss, "samples": counts.sum()}
        sums = gw.jax.all_reduce(run, sums, op="sum", check_finite=True)  # ◆
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g / sums["samples"], velocity, sums["gradients"])
        params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
        return params, velocity, sums["loss"] / sums["samples"]

    return step


def share(data: Any, group: gw.Group, index: int, seed: int) -> tuple[Any, Any, Any]:
    """Return this rank's samples of a global batch, padded to the same number in every step."""
    images, labels = data
    own = gw.Sampler(len(images), rank=group.rank, size=group.size, seed=seed).batch(index, BATCH)
    count = -(-BATCH // group.size)
    padded = np.concatenate([own, np.zeros(count - len(own), own.dtype)])
    return images[padded], labels[padded], (np.arange(count) < len(own)).astype(np.float32)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train a network on handwritten digits with JAX, in parallel on all ranks."
    )
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches (default: 0)")
    parser.add_argument("--target", type=float, default=0.95, help="the accuracy to reach, 0 to 1 (default: 0.95)")
    parser.add_argument("--lose", type=int, metavar="RANK", help="kill this rank half-way (needs an elastic job)")
    options = parser.parse_args()
    data, (images, labels) = load()
    began = time.monotonic()

    with gw.init() as group:  # ◆
        params = random_params(jax.random.key(options.seed + group.rank))  # the first step replaces them by rank 0's
        state = gw.jax.State(params=params, velocity=jax.tree.map(jnp.zeros_like, params))
        run = gw.elastic(state)  # ◆
        step, epoch = step_of(run), -(-len(data[0]) // BATCH)
        total = options.epochs * epoch
        for turn in run.steps(total):
            with turn:  # completed by all ranks, or repeated after the loss of a rank
                if run.group.generation == 1 and turn.index == total // 2 and group.rank == options.lose:
                    os.kill(os.getpid(), signal.SIGKILL)
                batch = share(data, run.group, turn.index, options.seed)
                state.params, state.velocity, loss = step(state.params, state.velocity, *batch)
            if turn.committed and run.group.rank == 0 and (turn.index + 1) % (5 * epoch) == 0:
                print(f"epoch {(turn.index + 1) // epoch:3}: loss {float(loss):.4f}", flush=True)

        digest = gw.jax.check_replicas(run, state.params)  # ◆ raises an error with rank and leaf if any bit differs
        correct = int((scores(state.params, images).argmax(axis=1) == labels).sum())
        print(
            f"rank {run.group.rank} of {run.group.size} ends with {digest[:8]}: "
            f"{correct / TESTED:.1%} of {TESTED} test images correct, {time.monotonic() - began:.1f} s",
            flush=True,
        )
        return 0 if correct / TESTED >= options.target else 1


if __name__ == "__main__":
    sys.exit(main())
