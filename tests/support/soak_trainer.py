"""The program of each worker of the soak test: it trains the demo's model and records every committed step.

trainer.py DIRECTORY SECONDS
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import gradwire as gw

STEPS = 1 << 30
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("digits", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits"] = module
    spec.loader.exec_module(module)
    return module


def main(directory: Path, end: float) -> None:
    digits = example()
    leaving = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: leaving.set())
    weights = digits.random_weights(0, 0)
    velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}
    (images, labels), _ = digits.load()
    run = gw.elastic({"weights": weights, "velocity": velocity})
    record = (directory / f"{os.getpid()}.txt").open("w", buffering=1)
    for step in run.steps(STEPS):
        with step:
            group = run.group
            sampler = gw.Sampler(len(images), rank=group.rank, size=group.size)
            mine = sampler.batch(step.index, digits.BATCH)
            sums = digits.gradient_sums(weights, (images[mine], labels[mine]))
            over = time.time() >= end and group.rank == 0
            sums["over"] = np.array([over], np.float32)
            sums = group.all_reduce_named(sums)
            digits.take_step(weights, velocity, sums)
        if not step.committed:
            continue
        held = len(os.listdir("/proc/self/fd")), threading.active_count()
        print(step.index, run.digest, int(run.identical), group.generation, group.size, *held, file=record)
        if leaving.is_set():
            break
        if sums["over"][0]:
            run.finish()
            if group.rank == 0:
                np.savez(directory / "final.npz", step=step.index, **weights)
            break
    run.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    main(Path(sys.argv[1]), float(sys.argv[2]))
