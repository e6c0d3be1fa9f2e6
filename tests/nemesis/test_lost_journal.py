"""A coordinator that has lost its journal begins another run without members or state of the old run."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from nemesis.history import broken_promises, read
from nemesis.job import Job
from nemesis.machines import OneMachine
from nemesis.progress import Progress
from support.ranks import eventually

STEPS = 30


@pytest.mark.slow
def test_coordinator_without_its_journal_admits_no_member_of_the_old_run(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ends:
        job = Job(tmp_path, OneMachine(tmp_path))
        ends.callback(job.close)
        front = Progress(job.records)
        job.start_coordinator()
        job.start_guests(0)  # whom nobody replaces
        assert eventually(lambda: front.update().step > 2 * STEPS)
        old = front.run
        job.kill_coordinator()
        job.forget_journal()
        job.start_coordinator()
        job.start_launcher(1)
        job.start_launcher(2)
        assert eventually(lambda: front.update().run != old and 0 <= front.step < STEPS), "no other run began"
        os.kill(job.workers(0)[0][1], signal.SIGKILL)  # the others of the old run ask for its next generation
        assert eventually(lambda: front.update().step > 2 * STEPS)
        assert broken_promises(read(job.records)) == []
        assert eventually(lambda: not job.workers(0)), "members of the old run are still there"
        job.finish(60.0)
    assert broken_promises(read(job.records)) == []
