"""Measure how long checkpoints interrupt training, and how long it takes to write them and to continue from one.

    python benchmarks/checkpoints.py                              # 2 ranks, a state of 1 GB, 5 checkpoints
    python benchmarks/checkpoints.py --ranks 4 --megabytes 200 --folder /mnt/shared

Each rank copies its share of the state in the loop, and a thread writes it. The table shows seconds: how much longer a
step takes that copies the state, how long until the checkpoint is complete, and how long steps take meanwhile. Beside
them it shows a plain copy of a rank's share, and a plain write of the whole state to the same folder with fsync.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
from typing import NamedTuple

import numpy as np

import gradwire as gw

EVERY = 10  # steps between two checkpoints; more if writing takes longer
ARRAYS = 16


class Seconds(NamedTuple):
    """The durations that rank 0 has measured."""

    usual: list[float]  # leaving a step while nothing is written
    writing: list[float]  # leaving a step while a thread writes
    pauses: list[float]  # leaving a step that copies the state, beyond the usual duration
    written: list[float]  # from the copy to the vote that shows the complete checkpoint


def state_of(megabytes: float) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {f"w{i}": random.random(int(megabytes * 1e6) // 8 // ARRAYS) for i in range(ARRAYS)}


def train(folder: str, megabytes: float, times: int) -> Seconds:
    """Train until `times` checkpoints are complete."""
    state = state_of(megabytes)
    run = gw.elastic(state, checkpoint=folder, keep=1)
    usual, writing, pauses, written = Seconds([], [], [], [])
    known, copied_at, since = run.last_checkpoint, 0.0, 0
    for step in run.steps(1 << 40):
        with step:
            gradient = run.group.all_reduce(np.ones(1 << 18), op="mean")
            state["w0"][: gradient.size] += gradient
            copies = not copied_at and since >= EVERY
            if copies:
                run.checkpoint()
            began = time.perf_counter()
        now = time.perf_counter()
        since += 1
        if copies:
            pauses.append(now - began)
            copied_at = now
        elif copied_at:
            writing.append(now - began)
        else:
            usual.append(now - began)
        if run.last_checkpoint != known:
            written.append(now - copied_at)
            known, copied_at, since = run.last_checkpoint, 0.0, 0
        if len(written) == times:
            run.finish()
            break
    run.close()
    middle = statistics.median(usual)
    return Seconds(usual, writing, [pause - middle for pause in pauses], written)


def resume(folder: str, megabytes: float) -> float:
    """Return the seconds from the agreement of the ranks on the newest checkpoint to the first step."""
    state = state_of(megabytes)
    run = gw.elastic(state, checkpoint=folder)
    began = time.perf_counter()
    next(run.steps(1 << 40))
    seconds = time.perf_counter() - began
    run.close()
    return seconds


def plain_copy(nbytes: int) -> float:
    """Return the median seconds of a copy of this many bytes between arrays that were written before."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    times = [time.perf_counter()]
    for _ in range(5):
        np.copyto(target, source)
        times.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def plain_write(folder: str, nbytes: int) -> float:
    """Return the median seconds of writing this many bytes to a file, with fsync."""
    data, times = memoryview(b"x" * nbytes), []
    for _ in range(3):
        began = time.perf_counter()
        with open(os.path.join(folder, "plain"), "wb", buffering=0) as file:
            for start in range(0, nbytes, 4 << 20):
                file.write(data[start : start + (4 << 20)])
            os.fsync(file.fileno())
        times.append(time.perf_counter() - began)
    os.unlink(os.path.join(folder, "plain"))
    return statistics.median(times)


def measure(ranks: int, megabytes: float, times: int, parent: str | None) -> None:
    """Run the benchmark and print its table."""
    folder = tempfile.mkdtemp(prefix="gradwire-checkpoints-", dir=parent)
    try:
        seconds = gw.launch(train, ranks, (folder, megabytes, times))[0]
        resumed = max(gw.launch(resume, ranks, (folder, megabytes)))
        copy, write = plain_copy(int(megabytes * 1e6) // ranks), plain_write(folder, int(megabytes * 1e6))
    finally:
        shutil.rmtree(folder)
    print(f"{ranks} ranks, a state of {megabytes:g} MB, {times} checkpoints")
    for what, found in (
        ("leaving a step, nothing is written", seconds.usual),
        ("leaving a step, a thread writes", seconds.writing),
        ("pause for the copy, first checkpoint", seconds.pauses[:1]),
        ("pause for the copy, later checkpoints", seconds.pauses[1:]),
        ("a plain copy of one rank's share", [copy]),
        ("from the copy to the complete checkpoint", seconds.written),
        ("a plain write of the whole state, by one", [write]),
        ("continuing from the checkpoint", [resumed]),
    ):
        if found:
            print(f"  {what:42} median {statistics.median(found):.3f} s, worst {max(found):.3f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--megabytes", type=float, default=1000.0, help="size of the state (default: 1000)")
    parser.add_argument("--times", type=int, default=5, help="number of checkpoints (default: 5)")
    parser.add_argument("--folder", help="where to write (default: the system's folder for temporary files)")
    options = parser.parse_args()
    measure(options.ranks, options.megabytes, options.times, options.folder)
