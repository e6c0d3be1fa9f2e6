"""Whether a job goes on without a worker, replaces it, or has failed. Pure.

A job whose members are fixed is the case without restarts whose minimum is its size: one failure ends it.

>>> job = Restarts(minimum=2, restarts=1)
>>> for number in range(3): job.started(number)
>>> job.ended(0, well=False), job.used
(<Verdict.REPLACE: 'replace'>, 1)
>>> job.started(3)
>>> job.ended(1, well=False), job.ended(2, well=False)
(<Verdict.GO_ON: 'go on'>, <Verdict.GIVE_UP: 'give up'>)
"""

from __future__ import annotations

import enum


class Verdict(enum.Enum):
    GO_ON = "go on"
    REPLACE = "replace"
    GIVE_UP = "give up"


class Restarts:
    """Counts who lives, who ended well and how many were replaced."""

    def __init__(self, *, minimum: int, restarts: int = 0) -> None:
        self.minimum = minimum
        self.restarts = restarts
        self.used = 0
        self.elsewhere = 0  # members of the job that other launchers look after
        self.recoverable = True  # False: a member that is lost now cannot be done without, nor be replaced
        self.living: set[int] = set()
        self.finished = 0  # ended with code 0
        self.stopping = False  # the job is told to end: nobody is replaced

    def started(self, number: int) -> None:
        self.living.add(number)

    def ended(self, number: int, *, well: bool) -> Verdict:
        """A worker that ends well has left: others may go on, or end too. One that failed is a loss."""
        self.living.discard(number)
        if well:
            self.finished += 1
            return Verdict.GO_ON
        if self._may_replace():
            self.used += 1
            return Verdict.REPLACE
        return self.without_it()

    def without_it(self) -> Verdict:
        """Of a loss that is not replaced."""
        return Verdict.GO_ON if self._enough() else Verdict.GIVE_UP

    def _may_replace(self) -> bool:
        # Where somebody has ended well and nobody is left, the job has done its work: a newcomer would begin it anew.
        over = self.finished > 0 and not self._others
        return self.recoverable and not self.stopping and not over and self.used < self.restarts

    def _enough(self) -> bool:
        """Those who ended well count: in the last moments of a job, when most have left, a loss harms nobody."""
        return self.recoverable and self._others + self.finished >= max(self.minimum, 1)

    @property
    def _others(self) -> int:
        return len(self.living) + self.elsewhere
