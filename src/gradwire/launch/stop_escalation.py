"""Stops workers by increasingly forceful signals: which one is due when. Pure; the time is an argument.

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
    """The signals to come. Each is due once; SIGKILL is the last, and never moves to later."""

    def __init__(self, grace: float, kill_after: float) -> None:
        self._grace = grace
        self._kill_after = kill_after
        self._steps: list[tuple[float, Signals]] = []
        self._begun = False

    @property
    def next_due(self) -> float | None:
        return self._steps[0][0] if self._steps else None

    def failed(self, now: float) -> None:
        """A worker failed: the others may notice by themselves first. Changes nothing once a stop has begun."""
        if not self._begun:
            term = now + self._grace
            self._set((term, SIGTERM), (term + self._kill_after, SIGKILL))

    def asked(self, number: int, now: float) -> None:
        """The user wants the job to stop, by this signal at first."""
        first, kill = Signals(number), now + self._kill_after
        if first == SIGKILL:
            self._set((now, SIGKILL))
        elif first == SIGINT:  # Python code can be stuck where no KeyboardInterrupt reaches it; SIGTERM ends it there
            self._set((now, SIGINT), (kill, SIGTERM), (kill + self._grace, SIGKILL))
        else:
            self._set((now, first), (kill, SIGKILL))

    def due(self, now: float) -> list[Signals]:
        """The signals whose time has come, in order."""
        due = [number for time, number in self._steps if time <= now]
        self._steps = self._steps[len(due) :]
        return due

    def _set(self, *steps: tuple[float, Signals]) -> None:
        kill = min([time for time, number in (*self._steps, *steps) if number == SIGKILL])
        self._steps = [step for step in steps if step[0] < kill and step[1] != SIGKILL] + [(kill, SIGKILL)]
        self._begun = True
