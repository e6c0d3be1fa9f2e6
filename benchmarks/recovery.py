"""How long training stands still when a worker is lost, and when one joins.

    python benchmarks/recovery.py                              # 10 kills, 4 workers, a state of 100 MB
    python benchmarks/recovery.py --times 20 --megabytes 400

A job trains a state of the given size. Again and again a random worker gets SIGKILL, and the launcher starts another
one in its place, which joins and gets the state. The table shows the seconds from the signal until all survivors have
committed their next step, and by how much the step in which a worker joined took longer than the others.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

import gradwire as gw

HANG_SECONDS = 60.0
QUIET_STEPS = 10  # between two faults


class Row(NamedTuple):
    """A step that a worker has seen committed; the clock is the same for all processes of a machine."""

    at: float
    step: int
    generation: int
    size: int


def work(directory: Path, elements: int) -> None:
    """One worker: the whole state changes in each step, and every committed step is a line."""
    state = {"w": np.zeros(elements, np.float32)}
    run = gw.elastic(state)
    with (directory / f"{os.getpid()}.txt").open("w", buffering=1) as file:
        for step in run.steps(1 << 40):
            with step:
                group = run.group
                gradient = group.empty(1 << 18)
                gradient[:] = 1.0
                gradient[-1] = (directory / "stop").exists()
                group.all_reduce(gradient, op="max")
                ends = bool(gradient[-1])
                if ends:
                    run.finish()
                state["w"] += gradient[0]
            if step.committed:
                file.write(f"{time.monotonic()} {step.index} {group.generation} {group.size}\n")
            if ends and step.committed:
                break
    run.close()


def rows(directory: Path) -> dict[int, list[Row]]:
    """What the workers have written so far, by process."""
    found = {}
    for path in directory.glob("*.txt"):
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.stem)] = [Row(float(at), *map(int, numbers)) for at, *numbers in lines]
    return found


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until something is true of what the workers wrote."""
    deadline = time.monotonic() + HANG_SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"after {HANG_SECONDS:g} s: {what}")
        time.sleep(0.05)  # looking takes time from the workers; they write down when things happened


def strike(directory: Path, workers: int, chance: random.Random) -> float:
    """Wait for a quiet job, kill one of its workers, and return the seconds until all others have gone on."""

    def settled() -> list[int]:
        whole = [pid for pid, seen in rows(directory).items() if os.path.exists(f"/proc/{pid}") and _quiet(seen)]
        return whole if len(whole) == workers else []

    def _quiet(seen: list[Row]) -> bool:
        return len(seen) > QUIET_STEPS and all(row.size == workers for row in seen[-QUIET_STEPS:])

    until(lambda: bool(settled()), f"there were never {workers} workers in step")
    pids = settled()
    victim = chance.choice(pids)
    survivors = [pid for pid in pids if pid != victim]
    before = max(row.generation for row in rows(directory)[victim])
    os.kill(victim, signal.SIGKILL)
    struck = time.monotonic()

    def gone_on() -> list[float]:
        later = [
            [row.at for row in seen if row.generation > before] for seen in map(rows(directory).get, survivors) if seen
        ]
        return [min(times) for times in later if times]

    until(lambda: len(gone_on()) == len(survivors), "the survivors did not go on")
    return max(gone_on()) - struck


def pauses(directory: Path) -> list[float]:
    """By how much longer it took when somebody joined, than steps take that worker in the middle.

    Who joins comes in at the vote of one step, and takes part in the next: both are looked at.
    """
    found = []
    for seen in rows(directory).values():
        calm = statistics.median([b.at - a.at for a, b in itertools.pairwise(seen)] or [0.0])
        trios = zip(seen, seen[1:], seen[2:], strict=False)
        found += [c.at - a.at - 2 * calm for a, b, c in trios if c.size > b.size]
    return found


def steps(directory: Path) -> list[float]:
    """How long steps took in which nothing happened."""
    seen = [itertools.pairwise(of_one) for of_one in rows(directory).values()]
    return [b.at - a.at for pairs in seen for a, b in pairs if a.generation == b.generation]


def measure(workers: int, megabytes: float, times: int, chance: random.Random) -> None:
    """The whole run, and its table."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        command = [
            sys.executable,
            "-c",
            "from gradwire.cli import main; main()",
            "run",
            "-n",
            str(workers),
            "--min",
            "1",
        ]
        command += ["--restarts", str(times + 1), __file__, "--work", name, "--megabytes", str(megabytes)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
            try:
                seconds = [strike(directory, workers, chance) for _ in range(times)]
                until(lambda: len(pauses(directory)) >= (workers - 1) * (times - 1), "nobody joined")
            finally:
                (directory / "stop").touch()
                launcher.wait(HANG_SECONDS)
        held, calm = pauses(directory), steps(directory)
    print(f"{workers} workers, a state of {megabytes:g} MB, {times} kills")
    print(f"  {'a step takes':40} median {statistics.median(calm):.3f} s")
    for what, found in (("from SIGKILL to the next committed step", seconds), ("a join pauses the others for", held)):
        print(f"  {what:40} median {statistics.median(found):.3f} s, worst {max(found):.3f} s")
    print(f"  {'sending so many bytes takes':40} median {copying(megabytes):.3f} s")


def copying(megabytes: float) -> float:
    """Seconds that it takes to send so many bytes from one rank to another, and to look at them once: the least."""

    def send(size: int) -> float:
        with gw.init() as group:
            x = np.ones(size, np.uint8)
            seconds = []
            for _ in range(5):
                group.barrier()
                began = time.perf_counter()
                group.send(x, 1) if group.rank == 0 else group.recv(x, 0)
                seconds.append(time.perf_counter() - began)
            return statistics.median(seconds)

    return max(gw.launch(send, 2, (int(megabytes * 1e6),)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(Path(options.work), int(options.megabytes * 1e6) // 4)
    else:
        measure(options.workers, options.megabytes, options.times, random.Random(options.seed))
