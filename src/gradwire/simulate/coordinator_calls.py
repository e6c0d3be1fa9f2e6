"""Calls to the simulated coordinator, as a client makes them: tried again until an answer comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradwire.simulate.network import Network
from gradwire.simulate.process import Process, Program

ANSWER_SECONDS = 2.0  # in which an answer must come before a call is made again; it may be held for one of them
PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Request:
    """A call as it arrives. `start` tells a coordinator that was started anew from the one that was meant."""

    method: str
    body: Any
    caller: Process
    session: int
    sequence: int
    start: int
    answer: Callable[[Any], None]
    ticket: bytes = b""  # of the join token that the caller proves itself by; empty: by the job's secret


@dataclass(frozen=True, slots=True)
class Stale:
    """The coordinator was started anew: say hello again."""

    start: int


@dataclass(frozen=True, slots=True)
class Denied:
    """The caller may not speak for these members."""

    reason: str


class Unreachable:
    """Nobody listens there, or the coordinator's journal failed."""


class CallTarget(Process):
    """The process that calls go to."""

    _sessions = 0

    def new_session(self) -> int:
        """A number that no other caller has."""
        self._sessions += 1
        return self._sessions

    def receive(self, request: Request) -> None:
        """A call has arrived."""
        raise NotImplementedError


class Caller:
    """One process's conversations with the coordinator; a late answer to an earlier call is no answer."""

    def __init__(self, process: Process, coordinator: CallTarget, network: Network, ticket: bytes = b"") -> None:
        self._process = process
        self._coordinator = coordinator
        self._network = network
        self._ticket = ticket
        self._session = coordinator.new_session()
        self._sequence = 0
        self._start = 0
        self._answer: Any = None

    def ask(self, method: str, body: Any) -> Program:
        """The answer to a call, for a program that waits for it."""
        while True:
            self._answer = None
            self.send(method, body, self._take)
            until = self._process.now + ANSWER_SECONDS
            while self._answer is None and self._process.now < until:
                yield until - self._process.now
            if isinstance(self._answer, Unreachable):
                yield PAUSE_SECONDS
            elif self._answer is not None and not isinstance(self._answer, Stale):
                return self._answer

    def _take(self, answer: Any) -> None:
        self._answer = answer
        self._process.wake()

    def send(self, method: str, body: Any, answered: Callable[[Any], None]) -> None:
        """Call once."""
        self._sequence += 1
        mine, process, coordinator = self._sequence, self._process, self._coordinator

        def answer(value: Any) -> None:
            if isinstance(value, Stale):
                self._start = value.start
            if mine == self._sequence:
                answered(value)

        request = Request(method, body, process, self._session, mine, self._start, answer, self._ticket)
        self._network.call(process, coordinator, lambda: coordinator.receive(request), lambda: answer(Unreachable()))
