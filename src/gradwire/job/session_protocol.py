"""Decide how a member enters the next generation: what it reports to the coordinator, and what a failed set-up means.

The module has no I/O and no clock. `next_generation` is a generator: it yields requests (`Register`, `SetUp`, `Repeat`)
and receives their results. `MemberSession` performs the requests with sockets, `ThreadJob` performs them between
threads, and the simulator performs them in virtual time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass

from gradwire.errors import Broken, ConfigError, GradwireError, NoConnection, Refused, Timeout, UnsupportedOp
from gradwire.membership.types import Assembly, News

SET_UP_SECONDS = 10.0  # limit for connecting all members of an elastic job's generation


@dataclass(frozen=True, slots=True)
class Past:
    """What a member reports about itself when it registers. The coordinator chooses the next members by it."""

    generation: int = 0  # the last generation that the member was in, 0 if none
    run: bytes = b""  # the run of that generation
    lost: tuple[str, ...] = ()  # ids of members of that generation that it could not reach
    lacks_state: bool = False  # it joined that generation and has not received the training state
    stood_still: bool = False  # its process was recently stopped for a moment


@dataclass(frozen=True, slots=True)
class Register:
    """Register at the coordinator and wait for the next generation. The result is its `Assembly`, or a `Failure`."""

    past: Past


@dataclass(frozen=True, slots=True)
class SetUp:
    """Connect to the other members. The result is None, or a `Failure`.

    In an elastic job `within` limits the seconds, so that a frozen member cannot block the others.
    """

    assembly: Assembly
    joined: bool  # this member was not in the previous generation
    within: float | None


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of a request, and the ranks that this member itself found to be lost during it."""

    error: GradwireError
    unreachable: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Repeat:
    """Try again after another member made the set-up fail, or raise the error if the deadline has passed."""

    generation: int
    error: GradwireError


Request = Register | SetUp | Repeat


class SessionProtocol:
    """The state that a member keeps from one generation to the next, and the protocol that changes it."""

    def __init__(self, elastic: bool, past: Past = Past()) -> None:  # noqa: B008
        self.elastic = elastic
        self.generation = past.generation  # the last generation that this member was in
        self.run = past.run  # the run of that generation
        self.rank = -1  # this member's rank in it
        self.member_ids: tuple[str, ...] = ()  # the ids of its members, by rank
        self.lacks_state = past.lacks_state
        self._lost = past.lost
        self._stood_still = past.stood_still

    def past(self) -> Past:
        """Return what this member reports to the coordinator when it registers."""
        return Past(self.generation, self.run, self._lost, self.lacks_state, self._stood_still)

    def next_generation(self) -> Generator[Request, Assembly | Failure | None, None]:
        """Enter the next generation. In an elastic job, a set-up that fails because of another member is repeated."""
        while True:
            answer = yield Register(self.past())
            if isinstance(answer, Assembly):
                self._enter(answer)
                answer = yield SetUp(answer, self.lacks_state, SET_UP_SECONDS if self.elastic else None)
                if answer is None:
                    return
                assert isinstance(answer, Failure)
                self._lost = self._ids(_unreachable(answer))
                self._stood_still = False
            assert isinstance(answer, Failure)
            if not self.elastic or not self._is_others_fault(answer.error):
                raise answer.error
            yield Repeat(self.generation, answer.error)

    def _enter(self, assembly: Assembly) -> None:
        self.lacks_state = self.lacks_state or assembly.generation > self.generation + 1
        self.generation, self.run, self.rank = assembly.generation, assembly.run, assembly.rank
        self.member_ids = tuple(member.id for member in assembly.members)
        self._lost = ()

    def _is_others_fault(self, error: GradwireError) -> bool:
        """Return whether another member caused the error, so that the job can continue without that member.

        A bad entry (`ConfigError`, `UnsupportedOp`) is the fault of the member that registered it. That member raises
        the error, and the others form a generation without it.
        """
        if isinstance(error, ConfigError | UnsupportedOp):
            return error.peer not in (None, self.rank)
        return isinstance(error, Broken | NoConnection | Timeout) and not isinstance(error, Refused)

    def leave(self, unreachable: Iterable[int], *, lacks_state: bool, stood_still: bool) -> None:
        """Record what to report after leaving the current generation: the ranks that this member itself found to be
        lost, whether it still lacks the training state, and whether its process was recently stopped."""
        self._lost = self._ids(unreachable)
        self.lacks_state = lacks_state
        self._stood_still = stood_still

    def concerns(self, news: News | None) -> bool:
        """Return whether news from the coordinator is about this member's run."""
        return news is not None and news.run in (b"", self.run)

    def _ids(self, ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.member_ids[rank] for rank in sorted(ranks))


def _unreachable(failure: Failure) -> frozenset[int]:
    """Return the ranks to report as lost after a failed set-up: those found lost, a silent one, one with a bad entry.

    A rank that refuses connections is not reported. Its process has ended or has left for the next generation, and the
    coordinator learns that from others.
    """
    error = failure.error
    blamed = None
    if isinstance(error, NoConnection) and not isinstance(error.__cause__, ConnectionRefusedError):
        blamed = error.peer
    elif isinstance(error, Timeout):
        blamed = error.culprit
    elif isinstance(error, ConfigError | UnsupportedOp):
        blamed = error.peer
    return failure.unreachable if blamed is None else failure.unreachable | {blamed}
