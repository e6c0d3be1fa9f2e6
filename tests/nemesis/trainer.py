"""The training script of each worker under the nemesis: steps that change a small state, and a record of each step.

trainer.py FOLDER MACHINE

It adds random numbers to the state, so a step that is done a second time leaves another state than the first time. Rank
0 writes a checkpoint every few steps, unless a later generation has written one. It trains until there is a file
FOLDER/stop.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import numpy as np

import gradwire as gw
from nemesis.history import NOT_YET, Record

STEPS = 1 << 30
NUMBERS = 16 << 10  # of the state
PACE = 0.01  # seconds that a step takes
CHECKPOINT_EVERY = 20  # steps


class Recorder:
    """Appends lines to a file: one call of the system for each, so that a killed worker's lines are all there."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, record: Record) -> None:
        os.write(self._file, record.line().encode())


def write_checkpoint(folder: Path, fence: gw.Fence, step: int, digest: str) -> None:
    draft = folder / f"draft-{os.getpid()}"
    draft.write_text(f"{fence} {step} {digest}\n")
    try:
        fence.replace(draft, folder / "checkpoint")
    except gw.Fenced as error:
        logging.getLogger("nemesis").warning("no checkpoint: %s", error)


def main(folder: Path, machine: str) -> None:
    member = f"{machine}-{os.getpid()}-{time.monotonic_ns()}"  # the kernel may use a process id again
    recorder = Recorder(folder / f"{member}.txt")
    chance = np.random.default_rng()
    state = {"numbers": chance.standard_normal(NUMBERS)}
    run = gw.elastic(state)
    for step in run.steps(STEPS):
        began, parent = time.monotonic(), run.digest
        fence = run.fence
        name, generation = fence.run.hex(), fence.generation
        recorder.write(Record("begin", name, generation, step.index, NOT_YET, parent, member, began, began))
        with step:
            numbers = chance.standard_normal(NUMBERS + 1)
            numbers[-1] = (folder / "stop").exists()
            first = run.group.rank == 0
            numbers = run.group.all_reduce(numbers)
            time.sleep(PACE)
            state["numbers"] *= 0.5
            state["numbers"] += numbers[:-1]
        if step.committed:
            now = time.monotonic()
            recorder.write(Record("commit", name, generation, step.index, run.digest, parent, member, began, now))
            if first and step.index % CHECKPOINT_EVERY == 0:
                write_checkpoint(folder, fence, step.index, run.digest)
            if numbers[-1]:
                run.finish()
                break
    run.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    main(Path(sys.argv[1]), sys.argv[2])
