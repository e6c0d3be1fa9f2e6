"""Soak test of elastic training with a fault every two seconds: kills, freezes, joins, leaves, coordinator restarts."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from support import soak_trainer as trainer

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
PERIOD = 10.0  # seconds with five faults, one every two seconds; this test makes the leaves, `chaos` the others
CHAOS = (
    "kill random @3s every 10s; freeze random @5s every 10s for 1500ms; join @7s every 10s; "
    "restart coordinator @9s every 10s"
)
END_SECONDS = 60.0  # seconds after the last fault within which all workers must end


def living(directory: Path) -> list[int]:
    """Return the workers that have begun to train and still run."""
    pids = [int(path.stem) for path in directory.glob("*.txt")]
    return sorted(pid for pid in pids if os.path.exists(f"/proc/{pid}"))


def committed(directory: Path) -> dict[int, set[str]]:
    """Return the digests that workers recorded for each committed step, without the torn last line of a killed one."""
    found = collections.defaultdict(set)
    for path in directory.glob("*.txt"):
        for line in path.read_text().splitlines(keepends=True):
            fields = line.split()
            if line.endswith("\n"):
                assert fields[2] == "1", f"step {fields[0]}: the ranks voted on different states"
                found[int(fields[0])].add(fields[1])
    return found


def growth(directory: Path) -> list[tuple[int, int]]:
    """Return how many descriptors and threads each worker gained between generations of one size, after its second."""
    gained = []
    for path in directory.glob("*.txt"):
        rows = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        seen: dict[int, collections.Counter[tuple[int, ...]]] = {}
        for row in rows:
            seen.setdefault(int(row[3]), collections.Counter())[tuple(map(int, row[4:]))] += 1
        by_size: dict[int, list[tuple[int, int]]] = {}
        for generation in sorted(seen)[2:]:
            size, descriptors, threads = seen[generation].most_common(1)[0][0]
            by_size.setdefault(size, []).append((descriptors, threads))
        gained += [(held[-1][0] - held[0][0], held[-1][1] - held[0][1]) for held in by_size.values()]
    return gained


@pytest.mark.soak
def test_elastic_soak_with_faults_commits_one_history_and_learns(tmp_path: Path) -> None:
    seed = int(os.environ.get("SOAK_SEED") or random.randrange(10**9))  # at most nine digits
    print(f"SOAK_SEED={seed}")
    chance = random.Random(seed)
    end = time.time() + SECONDS
    command = [sys.executable, "-m", "gradwire", "run", "-n", "6", "--min", "2", "--max", "8", "--restarts", "100000"]
    command += ["--chaos", f"seed {seed}; {CHAOS}", "--log-dir", str(tmp_path / "logs")]
    records = tmp_path / "records"
    records.mkdir()
    with (tmp_path / "output.txt").open("wb") as output:
        job = subprocess.Popen(
            [*command, trainer.__file__, str(records), str(end)], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while time.time() < end and job.poll() is None:
                time.sleep(
                    PERIOD if not living(records) else PERIOD / 2
                )  # this pause is part of the fault, not a wait for an event
                workers = living(records)
                if len(workers) > 4:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chance.choice(workers), signal.SIGUSR1)
            code = job.wait(END_SECONDS)
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(20)
    text = (tmp_path / "output.txt").read_text(errors="replace")
    assert code == 0, text[-5000:]
    steps = committed(records)
    assert steps, text[-5000:]
    assert set(steps) == set(range(max(steps) + 1))
    assert {step: found for step, found in steps.items() if len(found) > 1} == {}
    assert all(descriptors <= 12 and threads <= 4 for descriptors, threads in growth(records)), growth(records)
    final = np.load(records / "final.npz")
    assert int(final["step"]) == max(steps)
    check_accuracy(final)
    print(f"{len(steps)} steps by {len(list(records.glob('*.txt')))} workers in {SECONDS:g} s")


def check_accuracy(final: np.lib.npyio.NpzFile) -> None:
    """Check that the accuracy is within one point of a run of as many steps in one process without faults."""
    digits = trainer.example()
    (images, labels), test = digits.load()
    weights = digits.random_weights(0, 0)
    velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}
    sampler = digits.Sampler(len(images), rank=0, size=1)
    for step in range(int(final["step"]) + 1):
        batch = sampler.batch(step, digits.BATCH)
        digits.take_step(weights, velocity, digits.gradient_sums(weights, (images[batch], labels[batch])))
    found = {name: final[name] for name in weights}
    accuracy = [digits.count_correct(those, test) / len(test[0]) for those in (found, weights)]
    assert abs(accuracy[0] - accuracy[1]) <= 0.01, accuracy
