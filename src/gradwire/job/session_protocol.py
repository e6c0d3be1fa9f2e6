"""How a member goes from one generation to the next: what it tells the coordinator, and what a failed set-up means.

Pure: `next_generation` yields what is to be done (`Register`, `SetUp`, `Repeat`) and receives what came of it, without
I/O and without a clock. `MemberSession` performs the requests with sockets,
`ThreadJob` between threads, the simulator in virtual time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass

from gradwire.errors import Broken, ConfigError, GradwireError, NoConnection, Refused, Timeout, UnsupportedOp
from gradwire.membership.types import Assembly, News

SET_UP_SECONDS = 10.0  # in which the members of an elastic job's generation must have found each other


@dataclass(frozen=True, slots=True)
class Past:
    """What a member tells the coordinator with its claim: the last generation that it was in, 0 if none, the run of
    that one, members of it that could not be reached, and what else the choice of the next members depends on."""

    generation: int = 0
    run: bytes = b""
    lost: tuple[str, ...] = ()
    stranger: bool = False  # it joined that generation, and has not got the state of the training
    stood_still: bool = False  # it was stopped for a moment lately


@dataclass(frozen=True, slots=True)
class Register:
    """Ask the coordinator for the next generation, until it has one. The answer is the `Assembly`, or a `Failure`."""

    past: Past


@dataclass(frozen=True, slots=True)
class SetUp:
    """Connect with the other members, within some seconds if the job is elastic: a frozen member must not hold up the
    others. The answer is None, or a `Failure`."""

    assembly: Assembly
    joined: bool  # this member was not in the generation before
    within: float | None


@dataclass(frozen=True, slots=True)
class Failure:
    """What could not be done, and the ranks that this member itself found to be lost meanwhile."""

    error: GradwireError
    unreachable: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Repeat:
    """A generation did not come about because of another member: begin again, or raise the error if it is too late."""

    generation: int
    error: GradwireError


Request = Register | SetUp | Repeat


class SessionProtocol:
    """What a member remembers from one generation to the next."""

    def __init__(self, elastic: bool, past: Past = Past()) -> None:  # noqa: B008
        self.elastic = elastic
        self.generation = past.generation  # the last one that this member was in
        self.run = past.run  # of that one
        self.rank = -1  # in that one
        self.member_ids: tuple[str, ...] = ()  # of that one, by rank
        self.stranger = past.stranger
        self._lost = past.lost
        self._stood_still = past.stood_still

    def past(self) -> Past:
        """What the coordinator is told."""
        return Past(self.generation, self.run, self._lost, self.stranger, self._stood_still)

    def next_generation(self) -> Generator[Request, Assembly | Failure | None, None]:
        """Take part in the next generation. In an elastic job members that are lost meanwhile are done without."""
        while True:
            answer = yield Register(self.past())
            if isinstance(answer, Assembly):
                self._enter(answer)
                answer = yield SetUp(answer, self.stranger, SET_UP_SECONDS if self.elastic else None)
                if answer is None:
                    return
                assert isinstance(answer, Failure)
                self._lost = self._ids(_out_of_reach(answer))
                self._stood_still = False
            assert isinstance(answer, Failure)
            if not self.elastic or not self._is_others_fault(answer.error):
                raise answer.error
            yield Repeat(self.generation, answer.error)

    def _enter(self, assembly: Assembly) -> None:
        self.stranger = self.stranger or assembly.generation > self.generation + 1
        self.generation, self.run, self.rank = assembly.generation, assembly.run, assembly.rank
        self.member_ids = tuple(member.id for member in assembly.members)
        self._lost = ()

    def _is_others_fault(self, error: GradwireError) -> bool:
        """Whether the job can go on without the member that is to blame. What is wrong with one member's entry is
        blamed on that member: the others regroup without it, and it raises the error itself."""
        if isinstance(error, ConfigError | UnsupportedOp):
            return error.peer not in (None, self.rank)
        return isinstance(error, Broken | NoConnection) and not isinstance(error, Refused)

    def leave(self, unreachable: Iterable[int], *, stranger: bool, stood_still: bool) -> None:
        """The present generation ends, for the next one. `unreachable` are the ranks that this member itself found to
        be lost. It is a stranger as long as it has not got the state of the training."""
        self._lost = self._ids(unreachable)
        self.stranger = stranger
        self._stood_still = stood_still

    def concerns(self, news: News | None) -> bool:
        """Whether news is of this member's run: whatever happens in another one does not concern it."""
        return news is not None and news.run in (b"", self.run)

    def _ids(self, ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.member_ids[rank] for rank in sorted(ranks))


def _out_of_reach(failure: Failure) -> frozenset[int]:
    """The ranks that could not be reached while the generation came together.

    A rank that refuses connections is dead, or has left for the next generation: others know. Silence is a complaint,
    and so is an entry that cannot be worked with.
    """
    error = failure.error
    silent = None
    if isinstance(error, NoConnection) and not isinstance(error.__cause__, ConnectionRefusedError):
        silent = error.peer
    elif isinstance(error, Timeout):
        silent = error.culprit
    elif isinstance(error, ConfigError | UnsupportedOp):
        silent = error.peer
    return failure.unreachable if silent is None else failure.unreachable | {silent}
