"""Launchers and ranks killed at random moments while checkpoints are written: every run continues from the newest one.

A seed chooses what is killed, and after how many steps. The moment within a step is up to the scheduler.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.training.checkpoints import CheckpointFolder
from support.ranks import eventually

RANKS = 3
TRAIN = """
import os
import sys
import numpy as np
import gradwire as gw

open(f"pids/{os.getpid()}", "x").close()
weights = np.zeros((8, 1 << 16))  # 4 MiB: about as long to write as a few steps
run = gw.elastic({"weights": weights}, checkpoint="checkpoints", checkpoint_every=2)
with open("progress", "a", buffering=1) as progress:
    for step in run.steps(int(sys.argv[1])):
        with step:
            group = run.group
            if sys.argv[2] == "elastic":  # exact for any number of ranks
                gradient = np.full(weights.shape[1], float(step.index))
            else:
                gradient = np.random.default_rng([step.index, group.rank]).normal(size=weights.shape[1])
            group.all_reduce(gradient, op="mean")
            weights[step.index % 8] += gradient
        if group.rank == 0 and step.committed:
            print(step.index, os.path.basename(run.last_checkpoint or "none"), file=progress)
if run.group.rank == 0:
    print("ends with", run.digest)
run.close()
"""


class Job:
    """The same job, started again and again in one folder."""

    def __init__(self, folder: Path, kind: str, steps: int) -> None:
        self.folder, self._kind, self._steps = folder, kind, steps
        (folder / "train.py").write_text(TRAIN)
        (folder / "pids").mkdir()
        self.checkpoints = CheckpointFolder(folder / "checkpoints")
        self._starts = 0
        self.launcher: subprocess.Popen[bytes] | None = None
        self.output = folder / "output"

    def start(self) -> None:
        """Start the job, and forget the processes and the progress of the last start."""
        for pid in (self.folder / "pids").iterdir():
            pid.unlink()
        (self.folder / "progress").write_text("")
        options = ["--min", "1", "--restarts", "1"] if self._kind == "elastic" else []
        command = [sys.executable, "-m", "gradwire", "run", "-n", str(RANKS), *options, "--grace", "0.5"]
        self._starts += 1
        self.output = self.folder / f"output-{self._starts}"
        with self.output.open("wb") as output:
            self.launcher = subprocess.Popen(
                [*command, "--log-dir", "logs", "train.py", str(self._steps), self._kind],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
            )

    def progress(self) -> list[str]:
        """The last complete checkpoint that rank 0 knew after each step."""
        lines = (self.folder / "progress").read_text().splitlines(keepends=True)
        return [line.split()[1] for line in lines if line.endswith("\n")]

    def ended(self) -> bool:
        return self.launcher is None or self.launcher.poll() is not None

    def reaches(self, steps: int) -> None:
        """Wait until so many steps are committed since the start, or the job has ended."""
        assert eventually(lambda: self.ended() or len(self.progress()) >= steps)

    def workers(self) -> list[int]:
        return [int(path.name) for path in (self.folder / "pids").iterdir() if Path("/proc", path.name).exists()]

    def kill(self, victim: str, chance: random.Random) -> None:
        """Kill the launcher, or one of the workers if one is left."""
        workers = sorted(self.workers())
        if victim == "launcher" and self.launcher is not None:
            self.launcher.kill()
        elif workers:
            os.kill(chance.choice(workers), signal.SIGKILL)

    def wait(self) -> int:
        """Wait until all processes have ended, and return the exit code of the launcher."""
        assert self.launcher is not None
        code = self.launcher.wait(60)
        assert eventually(lambda: not self.workers())
        return code

    def continued_after(self) -> int:
        """The step of the checkpoint from which the last start continued; -1 if it began anew."""
        found = re.search(r"continuing after step (\d+), from the checkpoint", self.output.read_text())
        return int(found[1]) if found else -1

    def digest(self) -> str:
        found = re.search(r"ends with (\w+)", self.output.read_text())
        assert found is not None, self.output.read_text()
        return found[1]

    def newest(self) -> int:
        complete = self.checkpoints.complete()
        return complete[0].step if complete else -1

    def torn(self) -> int:
        return sum(not checkpoint.is_complete for checkpoint in self.checkpoints.find())


@pytest.fixture(name="jobs")
def jobs_fixture(tmp_path: Path) -> Iterator[list[Job]]:
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        if job.launcher is not None:
            job.launcher.kill()
            job.wait()


def kill_repeatedly(jobs: list[Job], folder: Path, kind: str, kills: int, seed: int) -> int:
    """Kill processes until `kills` were killed, check each restart, and return how many torn checkpoints were seen."""
    chance, steps = random.Random(seed), 20 * kills + 20
    for name in ("killed", "undisturbed"):
        (folder / name).mkdir()
        jobs.append(Job(folder / name, kind, steps))
    job, undisturbed = jobs
    killed = torn = 0
    newest = -1
    while killed < kills:
        job.start()
        victims = ["worker", "launcher"] if kind == "elastic" else [chance.choice(["worker", "launcher"])]
        for victim in victims:
            job.reaches(len(job.progress()) + chance.randrange(1, 24))
            job.kill(victim, chance)
            killed += 1
        job.wait()
        if job.progress():  # it was not killed before its first step
            assert job.continued_after() == newest
        known = [int(name[5:17]) for name in job.progress() if name != "none"]
        newest = job.newest()
        assert newest >= max(known, default=-1)
        torn += job.torn()
    job.start()
    assert job.wait() == 0
    assert job.continued_after() == newest
    undisturbed.start()
    assert undisturbed.wait() == 0
    assert job.digest() == undisturbed.digest()
    return torn


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_job_killed_25_times_while_it_writes_checkpoints_ends_like_an_undisturbed_run(
    kind: str, jobs: list[Job], tmp_path: Path
) -> None:
    assert kill_repeatedly(jobs, tmp_path, kind, kills=25, seed=int(os.environ.get("SOAK_SEED", "23"))) > 0
