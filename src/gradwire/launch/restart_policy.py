"""Decides whether a job continues without a failed worker, replaces it, or has failed itself. Pure.

A job of fixed size fails with its first failed worker.

>>> job = Restarts(minimum=2, restarts=1)
>>> for number in range(3): job.started(number)
>>> job.ended(0, EndKind.LOST), job.used
(<Verdict.REPLACE: 'replace'>, 1)
>>> job.started(3)
>>> job.ended(1, EndKind.LOST), job.ended(2, EndKind.LOST)
(<Verdict.CONTINUE: 'continue'>, <Verdict.GIVE_UP: 'give up'>)
"""

from __future__ import annotations

import collections
import enum

_HEALTHY = 10.0  # seconds: a worker that ran so long resets the count of early failures in its place
_BEGUN = 1.0  # the same for a worker that a signal killed
FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds before a replacement, after the second early failure and at most


class EndKind(enum.Enum):
    """How a worker ended."""

    WELL = "well"  # the worker has finished, or left the job
    LOST = "lost"  # by a signal
    ERROR = "error"  # by an exception, or with another code
    REFUSED = "refused"  # the coordinator did not let it join


class Verdict(enum.Enum):
    CONTINUE = "continue"
    REPLACE = "replace"
    GIVE_UP = "give up"


class Backoff:
    """How long to wait before a process is restarted: longer after each early failure in a row.

    >>> backoff = Backoff(first=1.0, longest=30.0)
    >>> [backoff.delay(2.0, killed=False) for _ in range(4)]
    [0.0, 1.0, 2.0, 4.0]
    >>> backoff.delay(60.0, killed=False)
    0.0
    """

    def __init__(self, *, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._failures = 0  # early ones in a row

    def delay(self, lived: float, *, killed: bool) -> float:
        """Return the seconds to wait after a process that ran `lived` seconds. The first early failure costs nothing.

        `killed`: a signal ended the process. It then counts as an early failure only in its first second.
        """
        if lived >= (_BEGUN if killed else _HEALTHY):
            self._failures = 0
        self._failures += 1
        return min(self._longest, self._first * 2.0 ** min(self._failures - 2, 60)) if self._failures > 1 else 0.0


class Restarts:
    """Counts the workers that run, how others ended, and how many were replaced.

    A new generation resets these counts: its members have recovered from everything before. So a worker that ended
    well counts as finished only if no later generation formed without it, and an error counts against the job only if
    the other members did not recover from it.
    """

    def __init__(
        self, *, minimum: int, restarts: int = 0, fixed: bool = False, first_delay: float = FIRST_DELAY
    ) -> None:
        self.fixed = fixed  # the job has a fixed size: every member is needed until the end
        self.minimum = minimum
        self.restarts = restarts
        self.used = 0
        self.remote = 0  # members of the job that other launchers supervise
        self.repeats_failure = False  # workers fail in the same way before the first generation: restarts do not help
        self.recoverable = True  # False: the job can neither continue without a lost member nor replace it
        self.done = False  # the work of the job: no worker is needed any more, and none would be admitted
        self.stopping = False  # the job is being stopped: no worker is replaced
        self.living: set[int] = set()
        self.pending = 0  # replacements that are to be started later
        self._backoffs: dict[int, Backoff] = collections.defaultdict(
            lambda: Backoff(first=first_delay, longest=LONGEST_DELAY)
        )
        self.finished = 0  # workers that ended well in this generation
        self.errors: list[int] = []  # workers whose failures the others have not recovered from
        self._regrouped = float("-inf")
        self._early_tracebacks: set[str] = set()

    def started(self, number: int) -> None:
        self.living.add(number)

    def regrouped(self, now: float) -> None:
        """Note that a new generation has formed: its members have recovered from all earlier failures."""
        self._regrouped = now
        self.finished = 0
        self.errors = []

    def failed_early(self, traceback: str) -> None:
        """Note that a worker failed before the first generation. If two failed in the same way, restarts do not help.

        >>> job = Restarts(minimum=1, restarts=9)
        >>> job.started(0); job.failed_early("No module named 'x'"); job.ended(0, EndKind.ERROR)
        <Verdict.REPLACE: 'replace'>
        >>> job.started(1); job.failed_early("No module named 'x'"); job.ended(1, EndKind.ERROR)
        <Verdict.GIVE_UP: 'give up'>
        """
        self.repeats_failure |= traceback in self._early_tracebacks
        self._early_tracebacks.add(traceback)

    def ended(self, number: int, end: EndKind, failed: float = 0.0) -> Verdict:
        """Decide what to do after a worker has ended.

        `failed` is the time of its failure: the others have often formed a new generation before its process ends.
        """
        self.living.discard(number)
        if end is EndKind.WELL:
            self.finished += 1
            return Verdict.CONTINUE
        if (self.finished or self.done) and not self._others:  # a replacement would start the work again
            return Verdict.GIVE_UP if end is EndKind.ERROR or self.fixed else Verdict.CONTINUE
        if end is not EndKind.REFUSED and self._may_replace:  # a replacement would be refused too
            self.used += 1
            verdict = Verdict.REPLACE
        else:
            verdict = self.without_it()
        if end is EndKind.ERROR and failed >= self._regrouped:
            self.errors.append(number)
        return verdict

    def delay(self, local_rank: int, lived: float, *, killed: bool) -> float:
        """Return the seconds to wait before the worker with this local rank is replaced."""
        return self._backoffs[local_rank].delay(lived, killed=killed)

    @property
    def over(self) -> bool:
        """Whether a pending replacement would find no work."""
        return self.stopping or self.done or (self.finished > 0 and not self.living and not self.remote)

    def without_it(self) -> Verdict:
        """Decide whether the job continues after a loss that is not replaced. Finished workers count as present."""
        enough = self._others > 0 and (self.done or self._others + self.finished >= self.minimum)
        possible = self.recoverable and not self.fixed and not self.repeats_failure
        return Verdict.CONTINUE if enough and possible else Verdict.GIVE_UP

    @property
    def _may_replace(self) -> bool:
        possible = self.recoverable and not self.repeats_failure and not self.stopping and not self.done
        return possible and self.used < self.restarts

    @property
    def _others(self) -> int:
        return len(self.living) + self.pending + self.remote
