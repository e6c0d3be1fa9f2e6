"""Which workers are frozen for good: stopped by a signal, while the others went on without them. Pure."""

from __future__ import annotations

PATIENCE = 5.0  # seconds for a frozen worker to thaw; it may then join again


class Frozen:
    """Tell it again and again who stands still; it tells who is not worth waiting for.

    >>> frozen = Frozen()
    >>> frozen.lost(1, paused=True, generation=3, alone=False, now=10.0)
    False
    >>> frozen.lost(1, paused=True, generation=4, alone=False, now=15.0)
    True
    """

    def __init__(self) -> None:
        self._since: dict[int, tuple[float, int]] = {}  # by number: when it froze, and in which generation

    def lost(self, number: int, *, paused: bool, generation: int, alone: bool, now: float) -> bool:
        """`alone`: nobody else is left, and somebody has finished the job: there is nothing to come back for."""
        if not paused:
            self._since.pop(number, None)
            return False
        since, before = self._since.setdefault(number, (now, generation))
        return now >= since + PATIENCE and (generation > before or alone)
