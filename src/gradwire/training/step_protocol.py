"""The protocol of elastic training: the vote at the end of a step, and what ranks agree on in a new generation.

Pure: the methods of `StepProtocol` are generators that yield what all ranks do together (`Vote`, `Gather`, `HandOver`)
and receive what came of it; errors of that are thrown into them. They do no I/O and read no clock, and the rules are
those of `commit_rules`. `gw.elastic` performs the requests with a group, the simulator in virtual time.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from gradwire.arrays import Array
from gradwire.errors import Broken, ConfigError, ReplicasDiverged
from gradwire.training.commit_rules import (
    NONE,
    Settlement,
    Standing,
    ballot,
    count,
    has_begun,
    is_intact,
    settle,
)
from gradwire.training.contract import diverged

WAIT_SECONDS = 0.2  # between two looks for others to join

OnDivergence = Literal["raise", "warn"]


@dataclass(frozen=True, slots=True)
class Vote:
    """Reduce the ballots of all ranks by `max`; the answer is the result."""

    ballot: Array


@dataclass(frozen=True, slots=True)
class Gather:
    """Tell all ranks a value; the answer is the values of all ranks, by rank. Errors call it `operation`."""

    value: Any
    operation: str


@dataclass(frozen=True, slots=True)
class GatherDigests:
    """Tell all ranks the digests of each part of the state, None if this rank holds none; the answer is all ranks'."""

    digests: list[tuple[str, str]] | None


@dataclass(frozen=True, slots=True)
class HandOver:
    """Make the takers' state the giver's, which has this digest. With `overwrite` a taker may lose its own state."""

    giver: int
    takers: tuple[int, ...]
    digest: str
    step: int
    overwrite: bool


@dataclass(frozen=True, slots=True)
class NextGeneration:
    """Leave the present generation, and take part in the next."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for some seconds."""

    seconds: float


Request = Vote | Gather | GatherDigests | HandOver | NextGeneration | Pause
Steps = Generator[Request, Any, None]


class Replica(Protocol):
    """This rank and its state: what the protocol asks without waiting, and what it reports."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def generation(self) -> int:
        """The number of the present one."""

    def digest(self) -> str:
        """Of the state."""

    def digest_if_readable(self) -> str:
        """Of the state that a step has left; empty if that cannot be read any more."""

    def digests(self) -> list[tuple[str, str]]:
        """Of each part of the state, by its name."""

    def others_wait(self) -> bool:
        """Whether the generation should end here: members wait to join it."""

    def can_recover(self, error: Broken) -> bool:
        """Whether the next generation can go on after this error."""

    def begun_runs(self, number: int) -> int:
        """How many runs this process has begun, with this one; `number` if that was counted before."""

    def leave(self) -> None:
        """Take no more part in the job."""

    # -- reports

    def is_short_of_members(self, wanted: int) -> None: ...

    def begins(self) -> None:
        """A generation begins: if this rank has joined it, it does not have the state of the training yet."""

    def decided(self, settlement: Settlement) -> None:
        """All ranks have decided where to go on."""

    def holds(self, version: tuple[int, int]) -> None:
        """This rank has the state to go on from."""

    def committed(self, version: tuple[int, int]) -> None:
        """All ranks are known to have this state."""

    def diverged(self, error: ReplicasDiverged) -> None: ...

    def broke(self, error: Broken, step: int) -> None:
        """The generation has broken after this step: undo what the body of the next has changed."""

    def recovered(self) -> None:
        """The next generation goes on."""


class StepProtocol:
    """Where one rank stands in a run of steps."""

    def __init__(self, replica: Replica, min_size: int = 1, on_divergence: OnDivergence = "raise") -> None:
        self._replica = replica
        self.min_size = min_size
        self.on_divergence = on_divergence
        self.completed, self.completed_in = NONE, 0  # the last step whose body has ended here, and its generation
        self.committed = NONE  # the last step that all ranks are known to have completed
        self.digest = ""  # of the state after the last completed step, or of what all ranks began with
        self.identical = True  # whether all ranks held the same state at the last vote
        self.overwritten = False  # the state is neither this rank's own nor yet another's
        self._divergence: ReplicasDiverged | None = None  # the one that was found, while the ranks still differ
        self._agreed_in = 0  # the last generation in which all ranks have agreed where to go on
        self._number = 0  # of the runs that this process has begun

    def begin(self) -> Steps:
        """Agree with all ranks of the present generation where to go on, unless that is done."""
        if self._agreed_in != self._replica.generation:
            yield from self._or_recover(self._agree())

    def end(self, step: int) -> Steps:
        """The body of a step has ended here: take the vote, and let in members that wait."""
        digest = self._replica.digest()
        self.completed, self.completed_in = step, self._replica.generation
        self.digest = digest
        yield from self._or_recover(self._vote())

    def recover(self, error: Broken) -> Steps:
        """Go on in the next generation, however often it takes."""
        while True:
            if not self._replica.can_recover(error):
                raise error
            self._replica.broke(error, self.completed)
            yield NextGeneration()
            try:
                yield from self._agree()
            except Broken as next_error:
                error = next_error
                continue
            self._replica.recovered()
            return

    @property
    def version(self) -> tuple[int, int]:
        """Which state this rank has: after which step, and completed in which generation."""
        return self.completed, self.completed_in

    def counts(self, step: int, generation: int) -> bool:
        """Whether the pass through a step in a generation is the one that all ranks have gone on from."""
        return self.committed == step and self.version == (step, generation)

    def _or_recover(self, act: Steps) -> Steps:
        try:
            yield from act
        except Broken as error:
            yield from self.recover(error)

    # -- the end of a step

    def _vote(self) -> Steps:
        tally = count((yield Vote(ballot(self.completed, self.digest, self._replica.others_wait()))))
        if not tally.agreed:
            raise ConfigError("ranks vote on different steps: all must go through the same run.steps()")
        yield from self._check_identical(tally.identical, self.completed, holds=True)
        self.committed = self.completed
        self._replica.committed(self.version)
        if tally.renew:
            yield NextGeneration()
            yield from self._agree(self.digest)

    def _check_identical(self, identical: bool, step: int, holds: bool) -> Steps:
        """Report that ranks hold different states of a step: all ranks call it with the same `identical` and `step`.

        `holds` says whether this rank has a state of that step; one that has just joined has none.
        """
        self.identical = identical
        if identical:
            self._divergence = None
            return
        if self._divergence is None:
            everyones = yield GatherDigests(self._replica.digests() if holds else None)
            self._divergence = diverged(everyones, self._replica.generation, step)
            if self.on_divergence == "warn":
                self._replica.diverged(self._divergence)
        if self.on_divergence == "raise":
            raise self._divergence.with_traceback(None)

    # -- a new generation

    def _agree(self, digest: str | None = None) -> Steps:
        """Agree with all ranks of a new generation where to go on, and have or hand over the state of that step.

        `digest` is the state's, if nothing can have changed it since.
        """
        self._replica.begins()
        while self._replica.size < self.min_size:
            yield from self._await_others()
            self._replica.begins()
        self._number = self._replica.begun_runs(self._number)
        begun = has_begun(self.completed, self.digest, self.overwritten)
        digest = digest or (self._replica.digest_if_readable() if begun else "")
        intact = is_intact(self.completed, self.digest, digest, self.overwritten)
        mine = Standing(self.completed, self.completed_in, self.committed, digest, intact, self._number)
        standings = _standings((yield Gather(mine.to_wire(), "settling")))
        yield from self._check_runs([standing.run for standing in standings])
        if all(one.completed == NONE for one in standings):  # else nobody asks for the digest of who has just come
            digest = digest if begun else self._replica.digest()
            standings = _standings((yield Gather(replace(mine, digest=digest).to_wire(), "settling, with digests")))
        settlement = settle(standings)
        self._divergence = None  # ranks that have just joined know of none, and all must report it together
        holds = self._replica.rank not in settlement.pulls
        yield from self._check_identical(not settlement.differing, settlement.completed, holds)
        self._replica.decided(settlement)
        yield from self._exchange(settlement, standings, digest)
        yield Gather(None, "settling, done")  # until then nobody changes its state: takers may yet fail
        self.committed = settlement.completed  # now all are known to have it
        self._agreed_in = self._replica.generation
        self._replica.committed(settlement.version)

    def _exchange(self, settlement: Settlement, standings: Sequence[Standing], digest: str) -> Steps:
        """Have or hand over the state to go on from; `digest` is this rank's own."""
        rank, step = self._replica.rank, settlement.completed
        giver = settlement.pulls.get(rank, rank)
        takers = settlement.gives(giver)
        if takers:
            # Who has completed something keeps it until the new state is whole: the others may not survive this.
            self.overwritten = giver != rank and self.completed == NONE and step != NONE
            yield HandOver(giver, takers, standings[giver].digest, step, self.overwritten)
            self.overwritten = False
        # The digest too, before anything can break: a state that was just pulled must not count as spoiled.
        self.completed, self.completed_in = settlement.version_in(self._replica.generation)
        self.digest = digest if giver == rank else standings[giver].digest
        self._replica.holds(settlement.version)

    def _check_runs(self, numbers: Sequence[int]) -> Steps:
        """Who has come in place of a lost rank begins with the program's first run; others may be in a later one."""
        present = max(numbers)
        if self._number != present:
            self._replica.leave()
            raise ConfigError(
                f"this is run {self._number} of this process, and the others are in their run {present}: a process "
                "that joins, or loses the others between two runs, cannot catch up. Use one run for all phases; keep "
                "the phase in its state"
            )
        if min(numbers) != present:
            yield Gather(None, "settling, until those who are in another run have left")

    def _await_others(self) -> Steps:
        """Too few members: wait until others ask to join, and let them in."""
        self._replica.is_short_of_members(self.min_size)
        while not count((yield Vote(ballot(self.completed, "", self._replica.others_wait())))).renew:
            yield Pause(WAIT_SECONDS)
        yield NextGeneration()


def _standings(told: Sequence[object]) -> list[Standing]:
    return [Standing.from_wire(one) for one in told]
