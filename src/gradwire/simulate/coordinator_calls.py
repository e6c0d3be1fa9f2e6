"""Make calls to the simulated coordinator as a client does: repeat each call until an answer comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradwire.simulate.network import Network
from gradwire.simulate.process import Process, Program

ANSWER_SECONDS = 2.0  # without an answer, the call is repeated; the coordinator may hold a call for 1 s
PAUSE_SECONDS = 0.2  # before the next call if no process listens


@dataclass(frozen=True, slots=True)
class Request:
    """A call as it arrives. `start` is the start of the coordinator that the caller knows: a later one answers
    `Stale`."""

    method: str
    body: Any
    caller: Process
    session: int
    sequence: int
    start: int
    answer: Callable[[Any], None]
    ticket: bytes = b""  # the ticket of the caller's join token; empty if the caller holds the job's secret


@dataclass(frozen=True, slots=True)
class Stale:
    """The coordinator has restarted since the caller's last call: repeat the call with the new `start`."""

    start: int


@dataclass(frozen=True, slots=True)
class Denied:
    """The caller's credentials do not cover the members that it named."""

    reason: str


class Unreachable:
    """No coordinator listens, or its journal failed."""


class CallTarget(Process):
    """A process that receives calls."""

    _sessions = 0

    def new_session(self) -> int:
        """Return a number that no other caller has."""
        self._sessions += 1
        return self._sessions

    def receive(self, request: Request) -> None:
        """Handle a call that has arrived."""
        raise NotImplementedError


class Caller:
    """The calls of one process to the coordinator. A late answer to an earlier call is ignored."""

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
        """Make a call, repeat it until an answer comes, and return the answer."""
        while True:
            self._answer = None
            self.send(method, body, self._accept)
            until = self._process.now + ANSWER_SECONDS
            while self._answer is None and self._process.now < until:
                yield until - self._process.now
            if isinstance(self._answer, Unreachable):
                yield PAUSE_SECONDS
            elif self._answer is not None and not isinstance(self._answer, Stale):
                return self._answer

    def _accept(self, answer: Any) -> None:
        self._answer = answer
        self._process.wake()

    def send(self, method: str, body: Any, answered: Callable[[Any], None]) -> None:
        """Make a call once. `answered` receives the answer, unless another call was made meanwhile."""
        self._sequence += 1
        sequence, process, coordinator = self._sequence, self._process, self._coordinator

        def answer(value: Any) -> None:
            if isinstance(value, Stale):
                self._start = value.start
            if sequence == self._sequence:
                answered(value)

        request = Request(method, body, process, self._session, sequence, self._start, answer, self._ticket)
        self._network.call(process, coordinator, lambda: coordinator.receive(request), lambda: answer(Unreachable()))
