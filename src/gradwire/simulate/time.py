"""Virtual time: a queue of what happens when. Nothing here waits, and equal seeds give equal orders."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Event:
    """Something that is going to happen, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class Timeline:
    """Events in the order of their time; of equal ones the one that was planned first."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._planned = 0
        self._queue: list[tuple[float, int, Event]] = []

    def after(self, seconds: float, action: Action) -> Event:
        return self.at(self.now + seconds, action)

    def at(self, time: float, action: Action) -> Event:
        """Plan an event; what should have happened already happens next."""
        event = Event(action)
        self._planned += 1
        heapq.heappush(self._queue, (max(time, self.now), self._planned, event))
        return event

    def step(self) -> bool:
        """Let the next event happen; False if nothing is planned any more."""
        while self._queue:
            time, _, event = heapq.heappop(self._queue)
            if event.action is not None:
                self.now = time
                self.happened += 1
                event.action()
                return True
        return False


class Clock:
    """What a process reads: not quite the true time, and never the same zero as anybody else's."""

    __slots__ = ("_offset", "_rate", "_timeline")

    def __init__(self, timeline: Timeline, offset: float = 0.0, rate: float = 1.0) -> None:
        self._timeline = timeline
        self._offset = offset
        self._rate = rate

    @property
    def now(self) -> float:
        return self._offset + self._timeline.now * self._rate

    def skew(self, rate: float) -> None:
        """Run faster or slower from now on, without a jump."""
        now = self.now
        self._rate = rate
        self._offset = now - self._timeline.now * rate

    def seconds(self, local: float) -> float:
        """True seconds in which this clock counts so many."""
        return local / self._rate
