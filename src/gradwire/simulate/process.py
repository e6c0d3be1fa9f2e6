"""A simulated process: it reads its own clock, and it can crash, freeze and thaw."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

from gradwire.simulate.time import Action, Clock, Event, Timeline

Request = TypeVar("Request")
Program = Generator[float | None, None, Any]
"""What a thread of a process does: it yields the seconds for which it waits unless it is woken; None: only that."""


def drive(protocol: Generator[Request, Any, Any], perform: Callable[[Request], Program]) -> Program:
    """Run a protocol as `gradwire.drive.drive` does, in virtual time: `perform` gives a program for each request."""
    try:
        request = next(protocol)
        while True:
            try:
                answer = yield from perform(request)
            except Exception as error:
                request = protocol.throw(error)
            else:
                request = protocol.send(answer)
    except StopIteration as end:
        return end.value


class Stream(Protocol):
    """What a process has open: an end of a connection."""

    def close(self) -> None: ...

    def vanish(self) -> None:
        """The host has lost its power: nobody is told that the connection ended."""


class Process:
    """One process. While it is frozen, what should happen in it is kept and happens when it thaws, in order."""

    def __init__(self, name: str, host: str, timeline: Timeline, clock: Clock) -> None:
        self.name = name
        self.host = host
        self.timeline = timeline
        self.clock = clock
        self.alive = True
        self.frozen = False
        self.stopped = False  # by a signal: not even its lifeline beats
        self.ends: dict[Stream, None] = {}  # of its streams, in the order in which they were made
        self._kept: list[Action] = []

    @property
    def now(self) -> float:
        """The time by this process's own clock."""
        return self.clock.now

    def later(self, seconds: float, action: Action) -> Event:
        """Do something when the clock of this process has counted so many seconds."""
        return self.timeline.after(self.clock.seconds(seconds), lambda: self.do(action))

    def do(self, action: Action) -> None:
        """Do something as soon as this process can."""
        if self.frozen:
            self._kept.append(action)
        elif self.alive:
            action()

    def compute(self, seconds: float) -> Program:
        """Work that notices nothing of what happens around it."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            yield until - self.now

    def wake(self) -> None:
        """Something came for this process, for whichever program of it waits."""

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        kept, self._kept = self._kept, []
        for action in kept:
            self.do(action)

    def crash(self, power: bool = False) -> None:
        """End at once. The system closes what the process had open; if the whole host lost its power, nobody does."""
        self.alive = self.frozen = False
        self._kept.clear()
        for end in list(self.ends):
            if power:
                end.vanish()
            else:
                end.close()


class Thread:
    """Runs a program inside a process. `wake` lets it look around; errors of it go to `failed`."""

    def __init__(self, process: Process, program: Program, failed: Callable[[BaseException], None]) -> None:
        self._process = process
        self._program = program
        self._failed = failed
        self._due: Event | None = None
        self._woken = False
        self._held = False
        self.ended = False
        self.wake()

    def wake(self) -> None:
        """Let the program go on, after what happens at this very moment."""
        if not self._woken and not self.ended:
            self._woken = True
            self._process.later(0.0, self._go_on)

    def hold(self) -> None:
        """Stop where the program waits now, while the rest of the process goes on."""
        self._held = True

    def release(self) -> None:
        self._held = False
        self.wake()

    def _go_on(self) -> None:
        self._woken = False
        if self.ended or self._held:
            return
        if self._due is not None:
            self._due.cancel()
            self._due = None
        try:
            seconds = next(self._program)
        except StopIteration:
            self.ended = True
        except Exception as error:
            self.ended = True
            self._failed(error)
        else:
            if seconds is not None:
                self._due = self._process.later(seconds, self._go_on)
