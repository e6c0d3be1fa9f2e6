"""The protocol of elastic training: the vote at the end of a step, and the agreement in a new generation.

The methods of `StepProtocol` are generators. They yield requests that all ranks perform together (`Vote`, `Gather`,
`HandOver`, ...), and receive the results; an error of a request is thrown into the generator. They do no I/O and read
no clock. Decisions follow the rules of `commit_rules`. `gw.elastic` performs the requests with a group, the simulator
performs them in virtual time.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from gradwire.errors import Broken, CheckpointError, ConfigError, ReplicasDiverged, StateLost
from gradwire.training.checkpoint_protocol import CheckpointProtocol
from gradwire.training.commit_rules import (
    NONE,
    Settlement,
    Standing,
    Tally,
    Wishes,
    ballot,
    count,
    has_begun,
    is_intact,
    settle,
)
from gradwire.training.contract import diverged
from gradwire.training.step_requests import (
    AwaitWriter,
    Gather,
    GatherDigests,
    HandOver,
    LoadCheckpoint,
    Loaded,
    LoadShard,
    NextGeneration,
    Pause,
    Request,
    Steps,
    Vote,
)

WAIT_SECONDS = 0.2  # the interval between two votes while the job has too few members

OnDivergence = Literal["raise", "warn"]


class Replica(Protocol):
    """This rank and its state: queries that return at once, and reports of the protocol's progress."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def generation(self) -> int:
        """The number of the current generation."""

    def digest(self) -> str:
        """Return the digest of the state."""

    def digest_if_readable(self) -> str:
        """Return the digest of the state after a failure, or "" if the state can no longer be read."""

    def digests(self) -> list[tuple[str, str]]:
        """Return the name and digest of each part of the state."""

    def others_wait(self) -> bool:
        """Return whether members wait to join, so that the generation should end."""

    def stop_wanted(self) -> int:
        """Return the signal or request that asks this rank to stop the run; 0 if there is none."""

    def last_checkpoint(self) -> str:
        """Return the path of the last complete checkpoint; empty if there is none."""

    def can_recover(self, error: Broken) -> bool:
        """Return whether the run can continue in the next generation after this error."""

    def begun_runs(self, number: int) -> int:
        """Return how many runs this process has begun, including this one. `number` is the previous result, or 0."""

    def leave(self) -> None:
        """Leave the job."""

    # -- reports

    def is_short_of_members(self, wanted: int) -> None:
        """Report that the run waits until it has `wanted` members."""

    def begins(self) -> None:
        """Report that a generation begins. A rank that has just joined does not have the training state yet."""

    def decided(self, settlement: Settlement) -> None:
        """Report the step after which all ranks continue."""

    def holds(self, version: tuple[int, int]) -> None:
        """Report that this rank has the state to continue from."""

    def committed(self, version: tuple[int, int]) -> None:
        """Report that all ranks are known to have this state."""

    def diverged(self, error: ReplicasDiverged) -> None:
        """Report that ranks hold different states, if that is not raised."""

    def broke(self, error: Broken, step: int) -> None:
        """Report that the generation broke after this step, and undo the changes of the interrupted next step."""

    def recovered(self) -> None:
        """Report that the next generation continues."""


class StepProtocol:
    """The progress of one rank in a run of steps."""

    def __init__(
        self,
        replica: Replica,
        min_size: int = 1,
        on_divergence: OnDivergence = "raise",
        checkpoints: CheckpointProtocol | None = None,
    ) -> None:
        self._replica = replica
        self._checkpoints = checkpoints
        self.min_size = min_size
        self.on_divergence = on_divergence
        self.completed, self.completed_in = NONE, 0  # the last step whose body has ended here, and its generation
        self.committed = NONE  # the last step that all ranks are known to have completed
        self.digest = ""  # of the state after the last completed step, or of the agreed initial state
        self.identical = True  # whether all ranks held the same state at the last vote
        self.stop = 0  # the signal or request that ends the run after the last completed step; 0: none
        self.overwritten = False  # a transfer that did not finish has overwritten the state
        self.finished = False  # `finish` has reached its end: the last checkpoint is complete or has failed
        self._divergence: ReplicasDiverged | None = None  # the difference that was found, as long as it lasts
        self._agreed_in = 0  # the last generation in which all ranks have agreed on the state
        self._number = 0  # how many runs this process has begun, including this one

    def begin(self) -> Steps:
        """Agree with all ranks of the current generation on the state to continue from, unless that is done."""
        if self._agreed_in != self._replica.generation:
            yield from self._or_recover(self._agree())

    def end(self, step: int) -> Steps:
        """Vote at the end of a step's body, and admit members that wait to join."""
        digest = self._replica.digest()
        self.completed, self.completed_in = step, self._replica.generation
        self.digest = digest
        yield from self._or_recover(self._vote())

    def finish(self) -> Steps:
        """Complete the checkpoint of the last step. Return also if a failure interrupts that: call it until `finished`.

        A new generation may have begun meanwhile, so `begin` comes first each time.
        """
        self.finished = False
        yield from self._or_recover(self._save_last())

    def recover(self, error: Broken) -> Steps:
        """Continue in the next generation; repeat if that one fails too."""
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
        """The state of this rank: its last completed step, and the generation of that step."""
        return self.completed, self.completed_in

    def counts(self, step: int, generation: int) -> bool:
        """Return whether all ranks continue from this step as it was completed in this generation."""
        return self.committed == step and self.version == (step, generation)

    def _or_recover(self, act: Steps) -> Steps:
        try:
            yield from act
        except Broken as error:
            yield from self.recover(error)

    # -- the end of a step

    def _vote(self) -> Steps:
        tally = yield from self._tally(self.digest)
        if not tally.agreed:
            raise ConfigError("ranks vote on different steps: all ranks must iterate over the same run.steps(total)")
        yield from self._check_identical(tally.identical, self.completed, holds=True)
        self.committed = self.completed
        self.stop = tally.wishes.stop
        self._replica.committed(self.version)
        if self._checkpoints is not None:
            yield from self._checkpoints.advance(self.completed, self.digest, tally.wishes)
        if tally.wishes.renew and not self.stop:
            yield NextGeneration()
            yield from self._agree(self.digest)

    def _tally(self, digest: str, *, last: bool = False) -> Generator[Request, Any, Tally]:
        """Vote with all ranks and return the result. `last`: the run ends after this step."""
        stop = max(self.stop, self._replica.stop_wanted())
        wishes = Wishes() if self._checkpoints is None else self._checkpoints.wishes(self.completed, last=last)
        wishes = replace(wishes, renew=self._replica.others_wait(), stop=stop)
        return count((yield Vote(ballot(self.completed, digest, wishes))))

    def _save_last(self) -> Steps:
        """Vote until the checkpoint of the last step is complete or has failed."""
        if self._checkpoints is not None:
            while True:
                tally = yield from self._tally(self.digest, last=True)
                yield from self._checkpoints.advance(self.completed, self.digest, tally.wishes, last=True)
                if not self._checkpoints.unfinished:
                    break
                yield AwaitWriter(WAIT_SECONDS)
        self.finished = True

    def _check_identical(self, identical: bool, step: int, holds: bool) -> Steps:
        """Raise or report if ranks hold different states. All ranks call it with the same `identical` and `step`.

        `holds` is False for a rank that has no state of that step, because it has just joined or is behind.
        """
        self.identical = identical
        if identical:
            self._divergence = None
            return
        if self._divergence is None:
            digests_by_rank = yield GatherDigests(self._replica.digests() if holds else None)
            self._divergence = diverged(digests_by_rank, self._replica.generation, step)
            if self.on_divergence == "warn":
                self._replica.diverged(self._divergence)
        if self.on_divergence == "raise":
            raise self._divergence.with_traceback(None)

    # -- a new generation

    def _agree(self, digest: str | None = None) -> Steps:
        """Agree with all ranks of a new generation on the state to continue from, and transfer it where needed.

        `digest` is the digest of this rank's state, if it is known to be unchanged; None computes it.
        """
        self._replica.begins()
        if self._checkpoints is not None:
            self._checkpoints.begin_generation()
        while self._replica.size < self.min_size and not self.stop:
            yield from self._await_others()
            self._replica.begins()
        self._number = self._replica.begun_runs(self._number)
        begun = has_begun(self.completed, self.digest, self.overwritten)
        digest = digest or (self._replica.digest_if_readable() if begun else "")
        standings = _standings((yield Gather(self._standing(digest).to_wire(), "elastic agreement (step)")))
        yield from self._check_runs([standing.run for standing in standings])
        self._check_settings([standing.saving for standing in standings])
        self.stop = max(standing.stop for standing in standings)
        if all(one.completed == NONE for one in standings):  # only then the digest of a rank without state matters
            yield from self._resume()
            if self.completed != NONE:
                digest = self.digest
            elif not begun:
                digest = self._replica.digest()
            gathered = yield Gather(self._standing(digest).to_wire(), "elastic agreement (initial state)")
            standings = _standings(gathered)
        settlement = self._settled(standings)
        self._divergence = None  # ranks that have just joined do not know of it, and all ranks must report together
        holds = self._replica.rank not in settlement.pulls
        yield from self._check_identical(not settlement.differing, settlement.completed, holds)
        self._replica.decided(settlement)
        yield from self._exchange(settlement, standings, digest)
        # Before this gather returns, no rank changes its state: a transfer may still fail, and be repeated.
        yield Gather(None, "elastic agreement (done)")
        self.committed = settlement.completed  # now all ranks are known to have this state
        self._agreed_in = self._replica.generation
        self._replica.committed(settlement.version)

    def _standing(self, digest: str) -> Standing:
        """Return the progress of this rank, whose state has this digest; empty if it has no state."""
        intact = is_intact(self.completed, self.digest, digest, self.overwritten)
        saving = "" if self._checkpoints is None else self._checkpoints.settings
        stop = max(self.stop, self._replica.stop_wanted())
        return Standing(
            self.completed, self.completed_in, self.committed, digest, intact, self._number, stop=stop, saving=saving
        )

    def _settled(self, standings: Sequence[Standing]) -> Settlement:
        try:
            return settle(standings)
        except StateLost as lost:
            last = self._replica.last_checkpoint() if self._checkpoints is not None else ""
            if last:
                advice = f"Start the job again: it continues from the last complete checkpoint, {last}"
            elif self._checkpoints is not None:
                advice = "Start the job again, from the beginning: there is no complete checkpoint"
            else:
                advice = "Restart the job, from a checkpoint if the program has written one"
            raise StateLost(f"{lost}. {advice}", checkpoint=last or None) from None

    def _resume(self) -> Steps:
        """Continue from the newest complete checkpoint, if there is one. No rank has completed a step.

        Rank 0 loads the replicated state. The other ranks then receive it like ranks that have just joined.
        """
        if self._checkpoints is None:
            return
        loaded = Loaded()
        if self._replica.rank == 0:
            loaded = yield LoadCheckpoint()
        first, *_ = yield Gather([loaded.step, loaded.name, loaded.problem], "elastic agreement (checkpoint)")
        step, name, problem = first
        if not problem and name:
            problems = yield Gather((yield LoadShard(name, step)), "elastic agreement (shards)")
            problem = next(filter(None, problems), "")
        if problem:
            raise CheckpointError(problem)
        if name:
            self._checkpoints.resumed(step)
        if self._replica.rank == 0 and name:
            self.completed = self.committed = step
            self.digest = self._replica.digest()

    def _exchange(self, settlement: Settlement, standings: Sequence[Standing], digest: str) -> Steps:
        """Send or receive the agreed state if needed. `digest` is the digest of this rank's own state."""
        rank, step = self._replica.rank, settlement.completed
        giver = settlement.pulls.get(rank, rank)
        takers = settlement.gives(giver)
        if takers:
            # A rank that has completed a step keeps its own state until the new one has arrived completely: the giver
            # may fail in between. Only a rank without a completed step receives into its own arrays.
            self.overwritten = giver != rank and self.completed == NONE and step != NONE
            yield HandOver(giver, takers, standings[giver].digest, step, self.overwritten)
            self.overwritten = False
        # Set version and digest together, before the next request can fail: otherwise a state that was just received
        # would not count as intact.
        self.completed, self.completed_in = settlement.version_in(self._replica.generation)
        self.digest = digest if giver == rank else standings[giver].digest
        self._replica.holds(settlement.version)

    def _check_runs(self, numbers: Sequence[int]) -> Steps:
        """Raise and leave if this rank is in an earlier run than the others.

        A program may begin several runs, one after the other. A process that replaces a lost one begins with the first.
        """
        current = max(numbers)
        if self._number != current:
            self._replica.leave()
            raise ConfigError(
                f"this process is in its elastic run {self._number}, but the other ranks are in their run {current}. A "
                "process that joins, or is separated from the others between two runs, cannot catch up. Use one "
                "elastic run for all phases of the program, and keep the current phase in its state"
            )
        if min(numbers) != current:
            yield Gather(None, "elastic agreement (earlier runs)")

    def _check_settings(self, settings: Sequence[str]) -> None:
        for rank, one in enumerate(settings):
            if one != settings[0]:
                raise ConfigError(
                    f"ranks have different settings of checkpoints: rank 0 has ({settings[0] or 'none'}), rank {rank} "
                    f"has ({one or 'none'}). Pass the same checkpoint, checkpoint_every and keep to gw.elastic"
                )

    def _await_others(self) -> Steps:
        """Wait until enough members ask to join, and begin the next generation with them. Return also to stop."""
        self._replica.is_short_of_members(self.min_size)
        while True:
            wishes = (yield from self._tally("")).wishes
            self.stop = wishes.stop
            if self.stop:
                return
            if wishes.renew:
                yield NextGeneration()
                return
            yield Pause(WAIT_SECONDS)


def _standings(gathered: Sequence[object]) -> list[Standing]:
    return [Standing.from_wire(one) for one in gathered]
