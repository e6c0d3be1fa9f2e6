"""The clock of a state machine whose own process may be paused."""

from __future__ import annotations

LONGEST_STEP = 2.0  # seconds between two looks; what is beyond counts for nobody
_NEAR = 1e-6  # seconds; a deadline so near has been reached: sums of floats are not exact


class Clock:
    """Goes on with the time that it is told, except for pauses longer than `LONGEST_STEP`.

    Whoever is told the time only after ten seconds was itself stopped or starved, and holds that against nobody.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self._now: float | None = None
        self._paused = 0.0

    def advance(self, now: float) -> None:
        """It is `now`; a time before the last one changes nothing."""
        if self._now is None:
            self._now = now
        self._paused += max(0.0, now - self._now - LONGEST_STEP)
        self._now = max(self._now, now)
        self.time = self._now - self._paused

    def reached(self, deadline: float) -> bool:
        return self.time >= deadline - _NEAR

    def outside(self, deadline: float) -> float:
        """A deadline of this clock in the time that it is told."""
        return deadline + self._paused
