"""Provides the clock of a state machine whose own process may be paused."""

from __future__ import annotations

LONGEST_STEP = 2.0  # seconds; the rest of a longer step is not counted
_TOLERANCE = 1e-6  # seconds; a deadline this near counts as reached, because sums of floats are not exact


class Clock:
    """Follows the time passed to `advance`, but counts at most `LONGEST_STEP` seconds of each step.

    A longer step means that this process was itself stopped or starved. That time must not make leases expire.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self._now: float | None = None
        self._paused = 0.0

    def advance(self, now: float) -> None:
        """Set the time to `now`. A time before the last one changes nothing."""
        if self._now is None:
            self._now = now
        self._paused += max(0.0, now - self._now - LONGEST_STEP)
        self._now = max(self._now, now)
        self.time = self._now - self._paused

    def reached(self, deadline: float) -> bool:
        return self.time >= deadline - _TOLERANCE

    def outside(self, deadline: float) -> float:
        """Convert a deadline of this clock to the time base of `advance`."""
        return deadline + self._paused
