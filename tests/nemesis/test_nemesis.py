"""Training under injected faults (crashes, freezes, partitions, coordinator or disk loss): each run has one history."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import gradwire as gw
from nemesis.history import Record, broken_promises, read, summary
from nemesis.job import Job
from nemesis.machines import machines
from nemesis.plan import DECK, MACHINES, plan
from nemesis.progress import Progress
from nemesis.strikes import Nemesis
from support.ranks import eventually

SECONDS = float(os.environ.get("SOAK_SECONDS", "25"))
SEED = os.environ.get("SOAK_SEED")
REPORT_EVERY = 15.0  # seconds
# Seconds after the last fault in which the job must go on. Members that may still be at work are waited for over a
# minute, and one that others could not reach several times may join again only after minutes.
RECOVERY = max(90.0, min(150.0, SECONDS / 4))
ENDING = 60.0  # seconds in which the job must end when it is told to
AFTERWARDS = 20  # steps that it must then commit
CUTS_OF_ONE_MACHINE = "cut random @4s every 5s for 1500ms"


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(SECONDS + RECOVERY + ENDING + 60)
def test_elastic_training_under_a_nemesis_keeps_one_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(SEED) if SEED else random.randrange(10**6)

    def write_log(line: str) -> None:
        with (tmp_path / "nemesis.log").open("a") as log:
            log.write(f"{line}\n")

    def report(line: str) -> None:
        write_log(line)
        with capsys.disabled():
            print(f"nemesis: {line}", flush=True)

    with contextlib.ExitStack() as ends:
        where, why = machines(tmp_path, ends)
        report(
            f"SOAK_SEED={seed}, {SECONDS:g} s, {tmp_path}" + (f"; links are cut by chaos only: {why}" if why else "")
        )
        job = Job(tmp_path, where, "" if where.can_cut else f"seed {seed}; {CUTS_OF_ONE_MACHINE}")
        ends.callback(job.close)
        job.start_coordinator()
        for machine in range(MACHINES):
            job.start_launcher(machine)
        try:
            nemesis = train(job, seed, write_log, report)
        except Exception as error:
            error.add_note("\n".join(broken_promises(read(job.records))) or "the history is sound so far")
            raise
    records = read(job.records)
    report(summary(records))
    found = broken_promises(records)
    assert not found, "\n".join(found)
    reasons = nemesis.done["lose the journal"] + nemesis.done["kill all workers"]
    assert len({record.run for record in records}) <= 1 + reasons, "a run was given up without a reason"
    check_checkpoint(job.records, records)
    assert job.left() == []


def train(job: Job, seed: int, write_log: Callable[[str], None], report: Callable[[str], None]) -> Nemesis:
    front = Progress(job.records)
    assert eventually(lambda: front.update().step >= 0), "no step was committed"
    nemesis = Nemesis(job, front, plan(seed, SECONDS), write_log)
    while nemesis.elapsed < SECONDS:
        nemesis.run(min(SECONDS, nemesis.elapsed + REPORT_EVERY))
        front.update()
        where = f"step {front.step} of generation {front.generation} of run {front.run}"
        report(f"{nemesis.elapsed:.0f} s, {nemesis.done.total()} faults, {where}")
    nemesis.stop()
    report(f"done: {dict(nemesis.done)}; left out: {dict(nemesis.skipped)}; ended by themselves: {job.restarted}")
    see_progress(front, nemesis)
    assert job.finish(ENDING) == 0
    return nemesis


def check_checkpoint(folder: Path, records: Sequence[Record]) -> None:
    """The last checkpoint is part of the history, and no earlier generation has written over a later one's.

    A writer notes its fence before it replaces the file, so one that was killed in between has only done the former.
    """
    fences = [gw.Fence.parse(line) for line in (folder / "checkpoint.fence").read_text().split()]
    assert fences == sorted(fences)
    fence, step, digest = (folder / "checkpoint").read_text().split()
    written = gw.Fence.parse(fence)
    assert written in fences
    committed = {(one.run, one.generation, one.step, one.digest) for one in records if one.kind == "commit"}
    assert (written.run.hex(), written.generation, int(step), digest) in committed


def see_progress(front: Progress, nemesis: Nemesis) -> None:
    """With all faults undone, the run of the present coordinator goes on."""
    goals: dict[str, int] = {}
    deadline = time.monotonic() + RECOVERY
    while front.update().run == nemesis.abandoned or front.step < goals.setdefault(front.run, front.step + AFTERWARDS):
        assert time.monotonic() < deadline, f"no progress at step {front.step} of run {front.run}"
        nemesis.end_abandoned_run()
        nemesis.run(nemesis.elapsed + 1.0)


def test_plan_of_one_seed_is_deterministic() -> None:
    assert plan(7, 100.0) == plan(7, 100.0)
    assert plan(7, 100.0) != plan(8, 100.0)


def test_plan_of_one_hour_has_every_kind_of_fault() -> None:
    faults = plan(7, 3600.0)
    assert {fault.kind for fault in faults} == set(DECK)
    assert all(fault.machine != fault.other for fault in faults)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
