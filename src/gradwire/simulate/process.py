"""Simulate a process: it reads its own clock, and it can crash, freeze and resume."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

from gradwire.simulate.time import Action, Clock, Event, Timeline

Request = TypeVar("Request")
Program = Generator[float | None, None, Any]
"""The code of a simulated thread, as a generator. It yields when it waits: the seconds after which it continues if it
is not woken before, or None to wait until it is woken."""


def drive(protocol: Generator[Request, Any, Any], perform: Callable[[Request], Program]) -> Program:
    """Run a protocol as `gradwire.drive.drive` does, but in virtual time: `perform` returns a program per request."""
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
    """An open end of a connection, owned by a process."""

    def close(self) -> None: ...

    def drop(self) -> None:
        """Close this end because its host lost its power: the other end is not informed."""


class Process:
    """One process. Actions that are due while it is frozen are deferred, and run in order when it resumes."""

    def __init__(self, name: str, host: str, timeline: Timeline, clock: Clock) -> None:
        self.name = name
        self.host = host
        self.timeline = timeline
        self.clock = clock
        self.alive = True
        self.frozen = False
        self.stopped = False  # stopped by a signal: not even its lifeline sends heartbeats
        self.ends: dict[Stream, None] = {}  # the open ends of its streams, in the order of their creation
        self._deferred: list[Action] = []

    @property
    def now(self) -> float:
        """Return the time of this process's own clock."""
        return self.clock.now

    def later(self, seconds: float, action: Action) -> Event:
        """Run an action after some seconds of this process's own clock."""
        return self.timeline.after(self.clock.seconds(seconds), lambda: self.do(action))

    def do(self, action: Action) -> None:
        """Run an action now, or when this process resumes. Drop it if the process has ended."""
        if self.frozen:
            self._deferred.append(action)
        elif self.alive:
            action()

    def compute(self, seconds: float) -> Program:
        """Compute for some seconds. Waking the thread does not interrupt it."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            yield until - self.now

    def wake(self) -> None:
        """Wake the waiting program of this process, because something has arrived. Processes with a thread override
        it."""

    def freeze(self) -> None:
        self.frozen = True

    def resume(self) -> None:
        self.frozen = False
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            self.do(action)

    def crash(self, power: bool = False) -> None:
        """End at once. The operating system closes the process's streams, unless the whole host lost its power."""
        self.alive = self.frozen = False
        self._deferred.clear()
        for end in list(self.ends):
            if power:
                end.drop()
            else:
                end.close()


class Thread:
    """Runs a program inside a process. `wake` lets a waiting program continue. `failed` receives its errors."""

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
        """Let the program continue, after the current event."""
        if not self._woken and not self.ended:
            self._woken = True
            self._process.later(0.0, self._advance)

    def hold(self) -> None:
        """Stop the program where it waits now. The rest of the process continues."""
        self._held = True

    def release(self) -> None:
        self._held = False
        self.wake()

    def _advance(self) -> None:
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
                self._due = self._process.later(seconds, self._advance)
