"""Schedules the signals that stop workers, from SIGINT or SIGTERM to SIGKILL. Pure; the time is an argument.

>>> escalation = StopEscalation(grace=3, kill_after=10)
>>> escalation.failed(now=100)
>>> escalation.due(now=102), escalation.due(now=103), escalation.due(now=113)
([], [<Signals.SIGTERM: 15>], [<Signals.SIGKILL: 9>])
"""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGTERM, Signals

from gradwire.job.stop_notices import STOP_SIGNALS

GRACE = 3.0  # seconds between a failure and the SIGTERM to the others
KILL_AFTER = 10.0  # seconds between that and SIGKILL
STOP_TIMEOUT = 120.0  # seconds for workers that leave after their current step, until SIGKILL


class StopEscalation:
    """The scheduled signals. Each is due once. SIGKILL is the last one.

    Its time moves to later only once: when workers leave gracefully.
    """

    def __init__(self, grace: float, kill_after: float, stop_timeout: float = STOP_TIMEOUT) -> None:
        self._grace = grace
        self._kill_after = kill_after
        self._stop_timeout = stop_timeout
        self._steps: list[tuple[float, Signals]] = []
        self._begun = False
        self._failed = False
        self._hurried = False  # a user has asked for a stop that does not wait for whole steps
        self.graceful = False  # the workers have `stop_timeout`

    @property
    def next_due(self) -> float | None:
        return self._steps[0][0] if self._steps else None

    def failed(self, now: float) -> None:
        """Schedule the stop after a failure: the other workers first have time to end on their own."""
        self._failed = True
        term = now + self._grace
        if not self._begun:
            self._set((term, SIGTERM), (term + self._kill_after, SIGKILL))
        elif self.graceful:  # nobody can complete the checkpoint any more
            self._set((term + self._kill_after, SIGKILL))
        # Any other stop that has already begun keeps its schedule.

    def asked(self, number: int, now: float, *, watching: bool = False) -> None:
        """Schedule the stop that a user asked for, starting with this signal.

        `watching`: workers leave after their current step if the signal is one of `STOP_SIGNALS`.
        """
        first, kill = Signals(number), now + self._kill_after
        self._hurried |= first not in STOP_SIGNALS
        self.graceful |= watching and not (self._hurried or self._begun)
        if first == SIGKILL:
            self._set((now, SIGKILL))
        elif first == SIGINT:  # code that blocks KeyboardInterrupt is ended by SIGTERM
            self._set((now, SIGINT), (kill, SIGTERM), (kill + self._grace, SIGKILL))
        elif self.graceful and first in STOP_SIGNALS:
            self._set((now, first), (now + self._stop_timeout, SIGKILL))
        else:
            self._set((now, first), (kill, SIGKILL))

    def leaving(self, now: float, *, agreed: bool) -> None:
        """Give the workers more time, because they leave gracefully.

        Before all ranks have `agreed` to leave, this has an effect only if a user has asked for the stop and no worker
        has failed: it is not certain then that the workers will leave.
        """
        if self.graceful or self._hurried or not (agreed or (self._begun and not self._failed)):
            return
        self.graceful = self._begun = True
        self._steps = [step for step in self._steps if step[0] <= now and step[1] != SIGKILL]
        self._steps.append((now + self._stop_timeout, SIGKILL))

    def due(self, now: float) -> list[Signals]:
        """Return the signals that are due, in order, and remove them from the schedule."""
        due = [number for time, number in self._steps if time <= now]
        self._steps = self._steps[len(due) :]
        return due

    def _set(self, *steps: tuple[float, Signals]) -> None:
        kill = min([time for time, number in (*self._steps, *steps) if number == SIGKILL])
        self._steps = [step for step in steps if step[0] < kill and step[1] != SIGKILL] + [(kill, SIGKILL)]
        self._begun = True
