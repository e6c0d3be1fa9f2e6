"""Decides whether a job goes on without a worker, replaces it, or has failed. Pure.

In a job whose members are fixed, any failure ends it.

>>> job = Restarts(minimum=2, restarts=1)
>>> for number in range(3): job.started(number)
>>> job.ended(0, EndKind.LOST), job.used
(<Verdict.REPLACE: 'replace'>, 1)
>>> job.started(3)
>>> job.ended(1, EndKind.LOST), job.ended(2, EndKind.LOST)
(<Verdict.GO_ON: 'go on'>, <Verdict.GIVE_UP: 'give up'>)
"""

from __future__ import annotations

import collections
import enum

_HEALTHY = 10.0  # seconds of life after which earlier deaths are forgotten
_BEGUN = 1.0  # likewise for one that was killed
FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds before a worker that died young twice, or many times, is replaced


class EndKind(enum.Enum):
    """How a worker ended."""

    WELL = "well"  # with code 0: it was done, or has left
    LOST = "lost"  # by a signal
    ERROR = "error"  # by an exception, or with another code
    TURNED_AWAY = "turned away"  # it asked to join and was not let in


class Verdict(enum.Enum):
    GO_ON = "go on"
    REPLACE = "replace"
    GIVE_UP = "give up"


class Backoff:
    """How long to wait before a process is started anew: longer each time that it has died young.

    >>> backoff = Backoff(first=1.0, longest=30.0)
    >>> [backoff.delay(2.0, killed=False) for _ in range(4)]
    [0.0, 1.0, 2.0, 4.0]
    >>> backoff.delay(60.0, killed=False)
    0.0
    """

    def __init__(self, *, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._deaths = 0  # in a row, after a short life

    def delay(self, lived: float, *, killed: bool) -> float:
        """Seconds until the next start, of one that lived so long. The first death in a row costs nothing; a signal
        from outside is no fault of its own, if it had time to begin."""
        if lived >= (_BEGUN if killed else _HEALTHY):
            self._deaths = 0
        self._deaths += 1
        return min(self._longest, self._first * 2.0 ** min(self._deaths - 2, 60)) if self._deaths > 1 else 0.0


class Restarts:
    """Counts who lives, who ended how, and how many were replaced.

    What the others survived is forgotten when they regroup. So a worker that ended well counts as having finished the
    job only if nobody went on without it; and an error counts against the job only if nobody recovered from it.
    """

    def __init__(
        self, *, minimum: int, restarts: int = 0, fixed: bool = False, first_delay: float = FIRST_DELAY
    ) -> None:
        self.fixed = fixed  # the members of the job, so that each is needed to the end
        self.minimum = minimum
        self.restarts = restarts
        self.used = 0
        self.elsewhere = 0  # members of the job that other launchers look after
        self.recoverable = True  # False: a member that is lost now cannot be done without, nor be replaced
        self.done = False  # all work: nobody is needed any more, and nobody would be let in
        self.stopping = False  # the job is told to end: nobody is replaced
        self.living: set[int] = set()
        self.coming = 0  # replacements that are yet to be started
        self._backoffs: dict[int, Backoff] = collections.defaultdict(
            lambda: Backoff(first=first_delay, longest=LONGEST_DELAY)
        )
        self.finished = 0  # since the members last regrouped
        self.errors: list[int] = []  # likewise: whose failures nobody got over
        self._regrouped = float("-inf")

    def started(self, number: int) -> None:
        self.living.add(number)

    def regrouped(self, now: float) -> None:
        """A new generation has formed: those who are in it have got over whatever was before."""
        self._regrouped = now
        self.finished = 0
        self.errors = []

    def ended(self, number: int, fate: EndKind, failed: float = 0.0) -> Verdict:
        """A worker that ends well has left: others may go on, or end too. Otherwise it is a loss.

        `failed` is when it failed: often the others have regrouped before its process has ended.
        """
        self.living.discard(number)
        if fate is EndKind.WELL:
            self.finished += 1
            return Verdict.GO_ON
        if (self.finished or self.done) and not self._others:  # a newcomer would begin the work anew
            return Verdict.GIVE_UP if fate is EndKind.ERROR or self.fixed else Verdict.GO_ON
        if fate is not EndKind.TURNED_AWAY and self._may_replace:  # another would be turned away too
            self.used += 1
            verdict = Verdict.REPLACE
        else:
            verdict = self.without_it()
        if fate is EndKind.ERROR and failed >= self._regrouped:
            self.errors.append(number)
        return verdict

    def delay(self, place: int, lived: float, *, killed: bool) -> float:
        """Seconds to wait before the worker in this place (its local rank) is replaced."""
        return self._backoffs[place].delay(lived, killed=killed)

    @property
    def over(self) -> bool:
        """Whether a replacement that is still to come would find nothing to do."""
        return self.stopping or self.done or (self.finished > 0 and not self.living and not self.elsewhere)

    def without_it(self) -> Verdict:
        """Of a loss that is not replaced. Who finished counts: it needs nobody any more."""
        enough = self._others > 0 and (self.done or self._others + self.finished >= self.minimum)
        return Verdict.GO_ON if enough and self.recoverable and not self.fixed else Verdict.GIVE_UP

    @property
    def _may_replace(self) -> bool:
        return self.recoverable and not self.stopping and not self.done and self.used < self.restarts

    @property
    def _others(self) -> int:
        return len(self.living) + self.coming + self.elsewhere
