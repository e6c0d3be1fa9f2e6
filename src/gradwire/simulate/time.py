"""Provide virtual time: a queue of events, and clocks. Nothing here waits, and the order of events is deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Event:
    """An action that is scheduled, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class Timeline:
    """Events in the order of their time. Events of equal time run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._planned = 0
        self._queue: list[tuple[float, int, Event]] = []

    def after(self, seconds: float, action: Action) -> Event:
        return self.at(self.now + seconds, action)

    def at(self, time: float, action: Action) -> Event:
        """Schedule an event. An event in the past runs next."""
        event = Event(action)
        self._planned += 1
        heapq.heappush(self._queue, (max(time, self.now), self._planned, event))
        return event

    def step(self) -> bool:
        """Run the next event. Return False if no event is left."""
        while self._queue:
            time, _, event = heapq.heappop(self._queue)
            if event.action is not None:
                self.now = time
                self.happened += 1
                event.action()
                return True
        return False


class Clock:
    """The clock of a process. It has its own origin, and its rate differs from the true one."""

    __slots__ = ("_offset", "_rate", "_timeline")

    def __init__(self, timeline: Timeline, offset: float = 0.0, rate: float = 1.0) -> None:
        self._timeline = timeline
        self._offset = offset
        self._rate = rate

    @property
    def now(self) -> float:
        return self._offset + self._timeline.now * self._rate

    def skew(self, rate: float) -> None:
        """Change the rate from now on, without a jump."""
        now = self.now
        self._rate = rate
        self._offset = now - self._timeline.now * rate

    def seconds(self, local: float) -> float:
        """Return the true seconds in which this clock advances by `local` seconds."""
        return local / self._rate
