"""Simulate a whole job and its faults in virtual time, from one seed.

    World(seed).run()    →  `Outcome`, or raises `Violation` with the history that led to it

The simulation depends on the seed only, so a violation can be replayed with its seed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from gradwire.membership.coordinator.state_machine import SILENT_GRACE
from gradwire.simulate import faults
from gradwire.simulate.fault_effects import apply_fault
from gradwire.simulate.scenario import Scenario, draw_scenario
from gradwire.simulate.simulated_job import SimulatedJob

PROGRESS_SECONDS = 150.0  # limit for the next commits after the last fault
RESTART_SECONDS = 5.0  # after the last fault; by then launchers have started all replacements
MAX_EVENTS = 2_000_000  # more events mean an endless loop


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulated job."""

    seed: int
    steps: int
    generations: int
    seconds: float  # of virtual time
    events: int
    recovery: float  # seconds from the end of the last fault to the next committed step
    ending: str
    faults: tuple[str, ...] = ()  # the kind of each fault


class World(SimulatedJob):
    """One simulated job and its faults."""

    def __init__(
        self,
        seed: int,
        scenario: Scenario | None = None,
        members: int | None = None,
        kinds: Collection[str] = faults.USUAL,
    ) -> None:
        """`kinds` are the kinds of faults to draw. `scenario` replaces the scenario that the seed would draw."""
        random = Random(seed)
        scenario = scenario or draw_scenario(seed, random, members, kinds)
        super().__init__(seed, scenario, random, faults.command(seed, members, kinds))
        self.timeline.at(self.faults_over_at + RESTART_SECONDS, self._check_member_count)
        for fault in scenario.faults:
            self.timeline.at(fault.at, partial(apply_fault, self, fault))

    def run(self) -> Outcome:
        """Run all events until the job has committed steps after the last fault, or has ended."""
        with np.errstate(all="ignore"):
            while not self.ending:
                happened = self.timeline.step()
                if not happened or self.timeline.now > self._limit or self.timeline.happened > MAX_EVENTS:
                    self._time_out()
        recovery = (self.recovered_at or self.timeline.now) - self.faults_over_at
        return Outcome(
            self.seed,
            self.ledger.committed + 1,
            self.coordinator.membership.generation,
            self.timeline.now,
            self.timeline.happened,
            max(0.0, recovery),
            self.ending,
            tuple(fault.kind for fault in self.scenario.faults),
        )

    @property
    def _limit(self) -> float:
        """Return the time limit for the next commits. Each admitted unfit worker may delay the job once."""
        delays = len(self.unfit_admissions) * (self.scenario.lease + SILENT_GRACE)
        return self.faults_over_at + PROGRESS_SECONDS + delays

    def _check_member_count(self) -> None:
        runs = (b"", self.coordinator.run)
        able = [one for one in self.workers if one.run in runs and not one.profile.unfit and one.name not in self.lost]
        if len(able) < self.scenario.minimum:
            self.ending = "too few members"

    def _time_out(self) -> None:
        """End the job at its limit: as a violation, unless too few members are left or all have left."""
        self._check_member_count()
        if self.ending:
            return
        if all(worker.leaving for worker in self.workers):
            self.ending = "all left"
        else:
            waits = [
                f"{worker.name} in generation {worker.generation}: {worker.waiting or 'training'}"
                for worker in self.workers
            ]
            self.fail(f"no step was committed for {PROGRESS_SECONDS:g} s after the last fault: {'; '.join(waits)}")
