"""Train one network on several processes with NumPy, and check that all ranks hold the same weights.

    gradwire run -n 4 examples/digits.py               # four ranks on this machine
    python examples/digits.py                          # one rank: the same script, the same result
    gradwire run -n 4 examples/digits.py --epochs 10   # shorter
    gradwire run -n 4 examples/digits.py --tamper 2    # rank 2 changes one bit at the end: the check names it
    gradwire run -n 4 --min 2 --restarts 1 examples/digits.py --lose 2   # rank 2 dies half-way: the others continue
    gradwire run -n 4 examples/digits.py --checkpoint DIR   # stop it with kill -USR2, and run it again: it continues

This is data-parallel training without a framework. Every rank holds the whole network and computes its share of each
batch. The gradients are summed over the ranks, so every rank takes the same step. Batches that cannot be divided evenly
need no special case: the ranks sum the gradients *and* the number of samples, and then divide.

A step is committed when all ranks have completed it. If a rank dies, the others notice it, repeat the interrupted step
and divide the same global batches among fewer ranks. A worker that replaces the lost one receives the state from
another rank.

With `--checkpoint`, the ranks write their weights to a folder, at intervals and when SIGTERM or SIGUSR2 stops them. The
same command then continues after the last step that is in the folder, also with another number of ranks.

At the end the ranks compare digests of their weights, and rank 0 trains again in a single process on the same global
batches. The exit code is 0 only if the weights have the same bits on all ranks, if they are within TOLERANCE of those
of the single process (float32 sums round differently in another order), and if the accuracy is high enough.

The images are from the UCI repository (see data/README.md). A random fifth is held out for testing: digits that the
network has never seen, by people whose other digits it has seen. This split is an easy one (98.9 %). Over 20 random
splits the accuracy is 97.2 % on average and 96.1 % at worst. On the file's last fifth, by people that the network has
not seen, it is about 92 %.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import gradwire as gw
from gradwire.training import Sampler

Array = NDArray[np.float32]
Data = tuple[Array, NDArray[np.int64]]  # images, one per row, and the digit that each shows
Tensors = dict[str, Array]
Losses = Iterator[tuple[int, float]]

FILE = Path(__file__).parent / "data" / "digits.csv.gz"
TESTED = 360  # images held out
HIDDEN = 64
BATCH = 100  # samples per step, over all ranks
RATE = 0.1
MOMENTUM = 0.9
CHECKPOINT_EVERY = 150  # steps: ten epochs
TOLERANCE = 1e-4


# ── the data ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def load() -> tuple[Data, Data]:
    """Return the training data and the test data. The split is the same on all ranks and for every seed."""
    table = np.loadtxt(FILE, delimiter=",", dtype=np.float32)
    table = table[Sampler(len(table), rank=0, size=1, seed=1998).epoch(0)]
    images, labels = table[:, :64] / np.float32(16), table[:, 64].astype(np.int64)
    return (images[:-TESTED], labels[:-TESTED]), (images[-TESTED:], labels[-TESTED:])


# ── the network: 64 pixels, one hidden layer, 10 digits ──────────────────────────────────────────────────────────────


def random_weights(*seed: int) -> Tensors:
    random = np.random.default_rng(seed)
    return {
        "hidden.weight": random.normal(0, np.sqrt(2 / 64), (64, HIDDEN)).astype(np.float32),
        "hidden.bias": np.zeros(HIDDEN, np.float32),
        "output.weight": random.normal(0, np.sqrt(2 / HIDDEN), (HIDDEN, 10)).astype(np.float32),
        "output.bias": np.zeros(10, np.float32),
    }


def forward(weights: Tensors, images: Array) -> tuple[Array, Array]:
    """Return the values of the hidden layer, and the logarithm of each digit's probability."""
    hidden = np.maximum(images @ weights["hidden.weight"] + weights["hidden.bias"], 0)
    scores = hidden @ weights["output.weight"] + weights["output.bias"]
    scores -= scores.max(axis=1, keepdims=True)
    return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def gradient_sums(weights: Tensors, data: Data) -> Tensors:
    """Return the sums of the gradients and of the loss over these samples, and their number, which may be 0."""
    images, labels = data
    hidden, logs = forward(weights, images)
    targets = np.arange(len(labels)), labels
    errors = np.exp(logs)
    errors[targets] -= 1
    hidden_errors = (errors @ weights["output.weight"].T) * (hidden > 0)
    return {
        "hidden.weight": images.T @ hidden_errors,
        "hidden.bias": hidden_errors.sum(axis=0),
        "output.weight": hidden.T @ errors,
        "output.bias": errors.sum(axis=0),
        "loss": np.array([-logs[targets].sum()], np.float32),
        "samples": np.array([len(labels)], np.float32),
    }


def count_correct(weights: Tensors, data: Data) -> int:
    images, labels = data
    return int((forward(weights, images)[1].argmax(axis=1) == labels).sum())


# ── training: the only call that involves other ranks is `all_reduce_named` ──────────────────────────────────────────


def take_step(weights: Tensors, velocity: Tensors, sums: Tensors) -> None:
    """Update the weights in place. `sums` are the sums over all ranks."""
    for name, weight in weights.items():
        velocity[name] *= MOMENTUM
        velocity[name] += sums[name] / sums["samples"]
        weight -= RATE * velocity[name]


def train(run: gw.Elastic, weights: Tensors, velocity: Tensors, data: Data, options: argparse.Namespace) -> Losses:
    """Train, also if other ranks are lost, and yield the number and the mean loss of each epoch when it ends."""
    images, labels = data
    loss = samples = 0.0
    total = options.epochs * len(range(0, len(images), BATCH))
    loss_plan = PlannedLoss(options.lose, total // 2)
    for step in run.steps(total):
        with step, loss_plan.watched(run, step):
            sampler = Sampler(len(images), rank=run.group.rank, size=run.group.size, seed=options.seed)
            share = sampler.batch(step.index, BATCH)
            sums = run.group.all_reduce_named(gradient_sums(weights, (images[share], labels[share])))
            take_step(weights, velocity, sums)  # last: after the state has changed, nothing may fail
        if not step.committed:
            continue  # a rank was lost, so this step is repeated
        loss += float(sums["loss"][0])
        samples += float(sums["samples"][0])
        if (run.committed + 1) % sampler.steps(BATCH) == 0:
            yield (run.committed + 1) // sampler.steps(BATCH), loss / samples
            loss = samples = 0.0


def train_single(data: Data, options: argparse.Namespace) -> Tensors:
    """Return the weights of a run in one process, with the same global batches and rank 0's initial weights."""
    images, labels = data
    weights = random_weights(options.seed, 0)
    velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}
    sampler = Sampler(len(images), rank=0, size=1, seed=options.seed)
    for epoch in range(options.epochs):
        for batch in sampler.batches(epoch, BATCH):
            take_step(weights, velocity, gradient_sums(weights, (images[batch], labels[batch])))
    return weights


# ── a planned loss ───────────────────────────────────────────────────────────────────────────────────────────────────


class PlannedLoss:
    """Kills the process of one rank at a given step. The other ranks print when they noticed it."""

    def __init__(self, victim: int | None, at: int) -> None:
        self.victim, self.at = victim, at
        self.killed_at = self.continued_at = 0.0

    @contextlib.contextmanager
    def watched(self, run: gw.Elastic, step: gw.Step) -> Iterator[None]:
        exists = self.victim is not None and self.victim < run.group.size
        if exists and step.index == self.at and run.group.generation == 1:
            self.killed_at = run.group.broadcast_value(time.monotonic(), root=self.victim or 0)
            if run.group.rank == self.victim:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            yield
        except gw.PeerLost as lost:
            milliseconds = 1000 * (time.monotonic() - self.killed_at)
            print(f"rank {run.group.rank} noticed after {milliseconds:.0f} ms: {lost}", flush=True)
            raise
        if self.killed_at and not self.continued_at and run.group.generation > 1:
            self.continued_at = time.monotonic()
            rank, size, seconds = run.group.rank, run.group.size, self.continued_at - self.killed_at
            print(f"now rank {rank} of {size}: completed step {step.index} {seconds:.2f} s after the loss", flush=True)


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Display:
    """A progress bar on a terminal. In a pipe, as under `gradwire run`, it prints about ten lines instead."""

    def __init__(self, console: Console, epochs: int) -> None:
        self.console, self.epochs, self.moving = console, epochs, console.file.isatty()
        self.bar = Progress(
            TextColumn("epoch {task.completed:>3.0f}"),
            BarColumn(24),
            TextColumn("loss {task.fields[loss]:.4f}  test accuracy {task.fields[accuracy]:6.1%}"),
            TimeElapsedColumn(),
            console=console,
        )
        self.task = self.bar.add_task("", total=epochs, loss=float("nan"), accuracy=0.0)

    def __enter__(self) -> None:
        if self.moving:
            self.bar.start()

    def __exit__(self, *_: object) -> None:
        if self.moving:
            self.bar.stop()

    def show(self, epoch: int, loss: float, accuracy: float) -> None:
        self.bar.update(self.task, completed=epoch, loss=loss, accuracy=accuracy)
        if not self.moving and (epoch % max(1, self.epochs // 10) == 0 or epoch == self.epochs):
            self.console.print(self.bar)


def picture(weights: Tensors, data: Data) -> str:
    """Return six images with the network's answers. Up to three wrong answers come last."""
    images, labels = data
    read = forward(weights, images)[1].argmax(axis=1)
    wrong = np.flatnonzero(read != labels)[:3]
    shown = [*np.flatnonzero(read == labels)[: 6 - len(wrong)], *wrong]
    lines = []
    for top in range(0, 8, 2):  # one character shows two pixels, one above the other
        pairs = (images[i].reshape(8, 8)[top : top + 2] > 0.4 for i in shown)
        lines.append("   ".join("".join(" ▀▄█"[upper + 2 * lower] for upper, lower in pair.T) for pair in pairs))
    words = (f"{read[i]}" if read[i] == labels[i] else f"{read[i]}, is {labels[i]}" for i in shown)
    return "\n".join([*lines, "   ".join(f"{word:^8}" for word in words)])


@contextlib.contextmanager
def stop_reported(run: gw.Elastic, console: Console) -> Iterator[None]:
    """Print after which step a signal has stopped the run."""
    try:
        yield
    except SystemExit:
        saved = f", saved in {run.last_checkpoint}" if run.last_checkpoint else ""
        console.print(f"rank {run.group.rank} stops after step {run.committed}{saved}", soft_wrap=True)
        raise


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def digests(weights: Tensors) -> dict[str, str]:
    return {name: xxhash.xxh3_128_hexdigest(weight.tobytes()) for name, weight in weights.items()}


def short(digests: dict[str, str]) -> str:
    return xxhash.xxh3_64_hexdigest("".join(digests.values()).encode())[:8]


def find_differing(of_ranks: list[dict[str, str]]) -> list[str]:
    """Return the tensors, with their ranks, that differ from those of most ranks."""
    usual = {name: Counter(own[name] for own in of_ranks).most_common(1)[0][0] for name in of_ranks[0]}
    return [f"{name} on rank {rank}" for rank, own in enumerate(of_ranks) for name in own if own[name] != usual[name]]


def claims(weights: Tensors, of_ranks: list[dict[str, str]], options: argparse.Namespace) -> list[tuple[bool, str]]:
    """Return the claims about this run, and whether each holds. `of_ranks` are the digests of all ranks."""
    data, test = load()
    single = train_single(data, options)
    distance = max(float(np.abs(weights[name] - single[name]).max()) for name in weights)
    accuracy, single_accuracy = count_correct(weights, test) / TESTED, count_correct(single, test) / TESTED
    wrong = find_differing(of_ranks)
    return [
        (
            not wrong,
            f"the same bits on every rank ({len(of_ranks)})" if not wrong else f"different bits: {', '.join(wrong)}",
        ),
        (distance <= TOLERANCE, f"at most {distance:.1e} from a single process's weights (allowed: {TOLERANCE:.0e})"),
        (
            accuracy >= options.target,
            f"{accuracy:.1%} of {TESTED} test images correct (required: {options.target:.0%})",
        ),
        (abs(accuracy - single_accuracy) < 0.01, f"{single_accuracy:.1%} correct in a single process"),
    ]


# ── main program ─────────────────────────────────────────────────────────────────────────────────────────────────────


def run_example(options: argparse.Namespace, console: Console) -> bool:
    """Train, run the checks, and return on every rank whether all claims hold."""
    data, test = load()

    # Every rank draws its own weights. In the first step all ranks receive those of rank 0, or of a rank that has
    # already completed steps.
    with gw.init() as group:
        weights = random_weights(options.seed, group.rank)
        velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}
        every = CHECKPOINT_EVERY if options.checkpoint else None
        run = gw.elastic(
            {"weights": weights, "velocity": velocity}, checkpoint=options.checkpoint, checkpoint_every=every
        )
        console.print(
            f"rank {group.rank} of {group.size}, pid {os.getpid()}: drew weights {short(digests(weights))}"
            + (f"; joins generation {group.generation}" if group.generation > 1 else "")
        )

        # Load the newest checkpoint, if there is one.
        run.begin()
        if options.checkpoint and run.completed >= 0 and run.group.generation == 1:
            console.print(f"rank {group.rank} continues after step {run.completed} with {short(digests(weights))}")

        # Train. Rank 0 prints the progress.
        display = Display(console, options.epochs) if group.rank == 0 else None
        with display or contextlib.nullcontext(), stop_reported(run, console):
            for epoch, loss in train(run, weights, velocity, data, options):
                if display:
                    display.show(epoch, loss, accuracy=count_correct(weights, test) / TESTED)

        # Check. All ranks exchange the digests of their weights. Rank 0 evaluates the claims and broadcasts the result.
        group = run.group
        if group.rank == options.tamper:
            weights["output.bias"].view(np.uint32)[3] ^= 1
        console.print(f"rank {group.rank} ends with {short(digests(weights))}")
        of_ranks = group.all_gather_values(digests(weights))
        judged = claims(weights, of_ranks, options) if group.rank == 0 else []
        if group.rank == 0:
            console.print(picture(weights, test))
        for holds, claim in judged:
            console.print(f"{'✓' if holds else '✗ FAILED:'} {claim}")
        return bool(group.broadcast_value(all(holds for holds, _ in judged)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a network on handwritten digits, in parallel on all ranks.")
    parser.add_argument("--epochs", type=int, default=80, help="passes over the data (default: 80)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches (default: 0)")
    parser.add_argument("--target", type=float, default=0.95, help="the accuracy to reach, 0 to 1 (default: 0.95)")
    parser.add_argument("--tamper", type=int, metavar="RANK", help="let this rank change one bit of its weights")
    parser.add_argument("--lose", type=int, metavar="RANK", help="kill this rank half-way (needs an elastic job)")
    parser.add_argument("--checkpoint", metavar="DIR", help="write checkpoints to this folder, and continue from them")
    options = parser.parse_args()
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 110)
    return 0 if run_example(options, console) else 1


if __name__ == "__main__":
    sys.exit(main())
