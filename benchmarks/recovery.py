"""Measure how long the loss of a worker and the joining of a worker interrupt training.

    python benchmarks/recovery.py                              # 10 kills, 4 workers, a state of 100 MB
    python benchmarks/recovery.py --times 20 --megabytes 400

A job trains a state of the given size. The benchmark repeatedly sends SIGKILL to a random worker. The launcher starts a
replacement, which joins and receives the state. The table shows the seconds from the signal until all survivors have
committed their next step, and how much longer the steps take in which a worker joins.
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
UNDISTURBED_STEPS = 10  # between two faults


class Row(NamedTuple):
    """A committed step of a worker. All processes of a machine share the clock."""

    at: float
    step: int
    generation: int
    size: int


def work(directory: Path, elements: int) -> None:
    """Run one worker. Each step changes the whole state, and the worker writes a line per committed step."""
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
    """Return the rows that the workers have written so far, by process."""
    found = {}
    for path in directory.glob("*.txt"):
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.stem)] = [Row(float(at), *map(int, numbers)) for at, *numbers in lines]
    return found


def until(condition: Callable[[], bool], problem: str) -> None:
    """Wait until a condition holds. Exit with the problem if it takes too long."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"after {HANG_SECONDS:g} s: {problem}")
        time.sleep(0.05)  # poll rarely, to leave the CPU to the workers; they record the exact times


def kill_one(directory: Path, workers: int, rng: random.Random) -> float:
    """Wait for undisturbed steps, kill a worker, and return the seconds until all others commit their next step."""

    def settled() -> list[int]:
        found = [pid for pid, seen in rows(directory).items() if os.path.exists(f"/proc/{pid}") and _undisturbed(seen)]
        return found if len(found) == workers else []

    def _undisturbed(seen: list[Row]) -> bool:
        return len(seen) > UNDISTURBED_STEPS and all(row.size == workers for row in seen[-UNDISTURBED_STEPS:])

    until(lambda: bool(settled()), f"the job did not have {workers} workers for {UNDISTURBED_STEPS} steps")
    pids = settled()
    victim = rng.choice(pids)
    survivors = [pid for pid in pids if pid != victim]
    before = max(row.generation for row in rows(directory)[victim])
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()

    def continued() -> list[float]:
        later = [
            [row.at for row in seen if row.generation > before] for seen in map(rows(directory).get, survivors) if seen
        ]
        return [min(times) for times in later if times]

    until(lambda: len(continued()) == len(survivors), "the survivors did not commit a step after the kill")
    return max(continued()) - killed_at


def pauses(directory: Path) -> list[float]:
    """Return, for each join and worker, how much longer the two steps around the join took than the median step.

    A worker joins at the vote of one step and takes part in the next step, so both steps are counted.
    """
    found = []
    for seen in rows(directory).values():
        usual = statistics.median([b.at - a.at for a, b in itertools.pairwise(seen)] or [0.0])
        trios = zip(seen, seen[1:], seen[2:], strict=False)
        found += [c.at - a.at - 2 * usual for a, b, c in trios if c.size > b.size]
    return found


def steps(directory: Path) -> list[float]:
    """Return the durations of all steps without a change of the generation."""
    seen = [itertools.pairwise(of_one) for of_one in rows(directory).values()]
    return [b.at - a.at for pairs in seen for a, b in pairs if a.generation == b.generation]


def measure(workers: int, megabytes: float, times: int, rng: random.Random) -> None:
    """Run the benchmark and print its table."""
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
                seconds = [kill_one(directory, workers, rng) for _ in range(times)]
                until(lambda: len(pauses(directory)) >= (workers - 1) * (times - 1), "no replacement joined")
            finally:
                (directory / "stop").touch()
                launcher.wait(HANG_SECONDS)
        delays, usual = pauses(directory), steps(directory)
    print(f"{workers} workers, a state of {megabytes:g} MB, {times} kills")
    print(f"  {'a step takes':40} median {statistics.median(usual):.3f} s")
    for what, found in (("from SIGKILL to the next committed step", seconds), ("a join delays the others by", delays)):
        print(f"  {what:40} median {statistics.median(found):.3f} s, worst {max(found):.3f} s")
    print(f"  {'sending the state once takes':40} median {sending(megabytes):.3f} s")


def sending(megabytes: float) -> float:
    """Return the seconds for sending this many bytes from one rank to another: a lower bound for a join."""

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
    parser.add_argument("--workers", type=int, default=4, help="number of workers (default: 4)")
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the state (default: 100)")
    parser.add_argument("--times", type=int, default=10, help="number of kills (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random choices (default: 1)")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(Path(options.work), int(options.megabytes * 1e6) // 4)
    else:
        measure(options.workers, options.megabytes, options.times, random.Random(options.seed))
