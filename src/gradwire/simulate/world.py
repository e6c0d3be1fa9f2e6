"""A whole job in virtual time, from one seed: its members, its coordinator, the network, and what happens to them.

    World(seed).run()    →  Outcome, or `Violation` with the history of what led to it

Nothing in it depends on anything but the seed, so whatever was found once is found again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from gradwire.membership.coordinator.state_machine import SILENT_GRACE
from gradwire.simulate import faults
from gradwire.simulate.fault_effects import strike
from gradwire.simulate.scenario import Scenario, draw_setting
from gradwire.simulate.simulated_job import SimulatedJob

PROGRESS_SECONDS = 150.0  # seconds after the last fault in which the job must go on
RESTARTED = 5.0  # seconds after the last fault in which launchers have started whom they would
ENDLESS = 2_000_000  # events: something goes round in circles


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a simulated job went."""

    seed: int
    steps: int
    generations: int
    seconds: float  # of virtual time
    events: int
    recovery: float  # seconds from the end of the last fault to the next committed step
    ending: str
    faults: tuple[str, ...] = ()  # by kind


class World(SimulatedJob):
    """One simulated job, and what happens to it."""

    def __init__(
        self,
        seed: int,
        setting: Scenario | None = None,
        members: int | None = None,
        kinds: Collection[str] = faults.USUAL,
    ) -> None:
        """`kinds` are the faults to draw from; `setting` decides on everything instead."""
        random = Random(seed)
        setting = setting or draw_setting(seed, random, members, kinds)
        super().__init__(seed, setting, random, faults.command(seed, members, kinds))
        self.timeline.at(self.quiet_at + RESTARTED, self._look_for_life)
        for fault in setting.faults:
            self.timeline.at(fault.at, partial(strike, self, fault))

    def run(self) -> Outcome:
        """Let everything happen, until the job has gone on after the last fault."""
        with np.errstate(all="ignore"):
            while not self.ending:
                goes_on = self.timeline.step()
                if not goes_on or self.timeline.now > self._limit or self.timeline.happened > ENDLESS:
                    self._give_up()
        recovery = (self.recovered_at or self.timeline.now) - self.quiet_at
        return Outcome(
            self.seed,
            self.ledger.committed + 1,
            self.coordinator.membership.generation,
            self.timeline.now,
            self.timeline.happened,
            max(0.0, recovery),
            self.ending,
            tuple(fault.kind for fault in self.setting.faults),
        )

    @property
    def _limit(self) -> float:
        """When the job must have gone on. Each unfit newcomer that was let in may be waited for once."""
        return self.quiet_at + PROGRESS_SECONDS + len(self.let_in) * (self.setting.lease + SILENT_GRACE)

    def _look_for_life(self) -> None:
        runs = (b"", self.coordinator.run)
        able = [one for one in self.workers if one.run in runs and not one.profile.unfit and one.name not in self.lost]
        if len(able) < self.setting.minimum:
            self.ending = "too few"

    def _give_up(self) -> None:
        """Time is over."""
        self._look_for_life()
        if self.ending:
            return
        if all(worker.leaving for worker in self.workers):
            self.ending = "all left"
        else:
            waits = [f"{worker.name} in {worker.generation}: {worker.waiting or 'at work'}" for worker in self.workers]
            self.fail(f"no step was committed for {PROGRESS_SECONDS:g} s after the last fault: {'; '.join(waits)}")
