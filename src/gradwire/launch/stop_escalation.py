"""Schedules the signals that stop workers, from SIGINT or SIGTERM to SIGKILL. Pure; the time is an argument.

>>> escalation = StopEscalation(grace=3, kill_after=10)
>>> escalation.failed(now=100)
>>> escalation.due(now=102), escalation.due(now=103), escalation.due(now=113)
([], [<Signals.SIGTERM: 15>], [<Signals.SIGKILL: 9>])
"""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGTERM, Signals

GRACE = 3.0  # seconds between a failure and the SIGTERM to the others
KILL_AFTER = 10.0  # seconds between that and SIGKILL


class StopEscalation:
    """The scheduled signals. Each is due once. SIGKILL is the last one, and its time never moves to later."""

    def __init__(self, grace: float, kill_after: float) -> None:
        self._grace = grace
        self._kill_after = kill_after
        self._steps: list[tuple[float, Signals]] = []
        self._begun = False

    @property
    def next_due(self) -> float | None:
        return self._steps[0][0] if self._steps else None

    def failed(self, now: float) -> None:
        """Schedule the stop after a failure: the other workers first have time to end on their own."""
        # A stop that has already begun keeps its schedule.
        if not self._begun:
            term = now + self._grace
            self._set((term, SIGTERM), (term + self._kill_after, SIGKILL))

    def asked(self, number: int, now: float) -> None:
        """Schedule the stop that a user asked for, starting with this signal."""
        first, kill = Signals(number), now + self._kill_after
        if first == SIGKILL:
            self._set((now, SIGKILL))
        elif first == SIGINT:  # code that blocks KeyboardInterrupt is ended by SIGTERM
            self._set((now, SIGINT), (kill, SIGTERM), (kill + self._grace, SIGKILL))
        else:
            self._set((now, first), (kill, SIGKILL))

    def due(self, now: float) -> list[Signals]:
        """Return the signals that are due, in order, and remove them from the schedule."""
        due = [number for time, number in self._steps if time <= now]
        self._steps = self._steps[len(due) :]
        return due

    def _set(self, *steps: tuple[float, Signals]) -> None:
        kill = min([time for time, number in (*self._steps, *steps) if number == SIGKILL])
        self._steps = [step for step in steps if step[0] < kill and step[1] != SIGKILL] + [(kill, SIGKILL)]
        self._begun = True
