"""Training that goes on when ranks are lost, and lets others in: `gw.elastic`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, SupportsIndex, get_args

from gradwire.errors import (
    Aborted,
    Broken,
    ConfigError,
    GradwireError,
    InvalidSize,
    PeerLost,
    ReplicasDiverged,
    Timeout,
)
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.job import init, process_hooks
from gradwire.training import transfer
from gradwire.training.commit_rules import (
    NONE,
    Settlement,
    Standing,
    ballot,
    count,
    has_begun,
    has_joiners,
    is_sound,
    settle,
)
from gradwire.training.contract import diverged
from gradwire.training.fence import Fence
from gradwire.training.sampler import whole
from gradwire.training.state import State

log = logging.getLogger("gradwire.training")

WAIT_SECONDS = 0.2  # between two looks for others to join
EARLY = 3  # steps before which it is seen whether the state is changed in between
_RUNS: dict[tuple[int, str], int] = {}  # how many a member of a job has begun

OnDivergence = Literal["raise", "warn"]


def elastic(state: Any, *, min_size: int = 1, on_divergence: OnDivergence = "raise") -> Elastic:
    """Train in steps that survive the loss of ranks: each is done by all ranks or by none, and repeated after a loss.

    `state` is what replicas keep alike: a dict of arrays, or anything with `state_dict` and `load_state_dict`, or a
    dict of such. All begin with rank 0's. After each step the ranks vote, and when the vote returns the step is
    committed. A lost peer brings the next generation: the rest go on from the last step that was completed, and whoever
    is behind, has just joined, or was interrupted while it changed its state, gets it from a peer. With fewer than
    `min_size` members the job waits. In a job whose membership is fixed the loss is raised.

    The vote also compares the digests of the ranks' states. If they differ, the step is not committed, and all ranks
    raise `ReplicasDiverged`, which names a rank and its first array or value that differs. With
    `on_divergence="warn"` that is logged, and the run goes on; ranks that join get the state that most ranks hold.

    >>> import gradwire as gw, numpy as np
    >>> weights = {"w": np.zeros(3)}
    >>> run = gw.elastic(weights)
    >>> for step in run.steps(5):
    ...     with step:
    ...         weights["w"] += run.group.all_reduce(np.ones(3), op="mean")
    >>> weights["w"], run.committed
    (array([5., 5., 5.]), 4)
    >>> run.close()
    """
    State(state).touch()  # what cannot travel is found, and memory is there, before the others wait for this rank
    return Elastic(state, process_hooks.current() or init.init(), min_size, on_divergence)


class Elastic:
    """A run of committed steps; made by `gw.elastic`. `group` is the present generation's, another after each break."""

    def __init__(self, state: Any, group: Group, min_size: int, on_divergence: OnDivergence = "raise") -> None:
        if whole("min_size", min_size) < 1:
            raise InvalidSize(f"min_size is {min_size}: a run has at least one member")
        if on_divergence not in get_args(OnDivergence):
            raise ConfigError(f"on_divergence is {on_divergence!r}: it can be {', '.join(get_args(OnDivergence))}")
        self._state = State(state)
        self.group = group
        self.min_size = min_size
        self.committed = NONE  # the last step that all ranks are known to have completed; -1: none yet
        self.digest = ""  # of the state after the last completed step
        self.identical = True  # whether all ranks held the same state at the last vote
        self.on_divergence = on_divergence
        self._divergence: ReplicasDiverged | None = None  # the one that was found, while the ranks still differ
        self.recoveries = 0
        self._completed, self._completed_in = NONE, 0
        self._overwritten = False  # the state is neither this rank's own nor yet another's
        self._settled: Group | None = None
        self._told = False  # that the state was changed between steps
        self._number = 0  # of the runs that this process has begun
        self._undoing: list[Callable[[], None]] = []

    def steps(self, total: SupportsIndex) -> Iterator[Step]:
        """The steps up to `total` that are still to do, each to be used as `with step:`; begun again after a loss."""
        last = whole("total", total) - 1
        while True:
            if self._settled is not self.group:
                self._go_on(self._settle)
            GroupInternals(self.group).mark_finished(self._completed >= last)
            if self._completed >= last:
                return
            step = Step(self, self._completed + 1)
            yield step
            if not step.ended:
                raise ConfigError(f"step {step.index} was not entered: use `with step:` around the body")

    def finish(self) -> None:
        """All work is done, before the last step: nobody joins the job any more. All ranks call it at the same step."""
        GroupInternals(self.group).mark_finished(True)

    def when_cut_short(self, undo: Callable[[], None]) -> None:
        """Call this when a step has broken, before ranks look whose state is still that of the last completed step.

        For what a body changes even if it comes to nothing, like the running means of a model.
        """
        self._undoing.append(undo)

    def _check_between(self, index: int) -> None:
        """In the first steps, where it is seen at once: what is changed outside of a step is lost on whoever joins."""
        if not self._told and self._completed == index - 1 < EARLY and self._state.digest() != self.digest:
            self._told = True
            log.error(
                "the state was changed between steps %d and %d: a rank that joins there gets it without that change, "
                "and after a loss it counts as spoiled. Change the state only inside of `with step`",
                *(index - 1, index),
            )

    def _holds(self, step: int, generation: int) -> bool:
        """Whether the state is that after a step as it was done in a generation, and all ranks have it."""
        return self.committed == step and (self._completed, self._completed_in) == (step, generation)

    def close(self) -> None:
        """Leave the job: the others go on without this rank."""
        self.group.close()

    @property
    def fence(self) -> Fence:
        """The token of the present generation of this run, by which writers of checkpoints are ordered."""
        identity = GroupInternals(self.group).identity
        return Fence(identity.run, identity.number)

    @property
    def completed(self) -> int:
        """The last step whose body has ended here; -1: none yet."""
        return self._completed

    # -- the end of a step --------------------------------------------------------------------------------------------

    def _end(self, index: int) -> None:
        """The body of a step has ended here: take the vote, and let in who waits."""
        if GroupInternals(self.group).is_closed:  # the program has left
            return
        digest = self._state.digest()
        self._completed, self._completed_in = index, self.group.generation
        self.digest = digest
        self._go_on(self._vote)

    def _vote(self) -> None:
        tally = count(self.group.all_reduce(ballot(self._completed, self.digest, self._others_wait()), op="max"))
        if not tally.agreed:
            raise ConfigError("ranks vote on different steps: all must go through the same run.steps()")
        self._check_identical(tally.identical, self._completed, holds=True)
        self.committed = self._completed
        if tally.renew:
            self.group = self.group.recover()
            self._settle(self.digest)

    def _check_identical(self, identical: bool, step: int, holds: bool) -> None:
        """Report that ranks hold different states of a step: all ranks call it with the same `identical` and `step`.

        `holds` says whether this rank has a state of that step; one that has just joined has none.
        """
        self.identical = identical
        if identical:
            self._divergence = None
            return
        if self._divergence is None:
            mine = list(self._state.digests().items()) if holds else None
            everyones = self.group.all_gather_values(mine)
            self._divergence = diverged(everyones, self.group.generation, step)
            if self.on_divergence == "warn":
                log.error("%s", self._divergence)
        if self.on_divergence == "raise":
            raise self._divergence.with_traceback(None)

    def _others_wait(self) -> bool:
        return has_joiners(GroupInternals(self.group).news(), self.group.generation)

    # -- going on -----------------------------------------------------------------------------------------------------

    def _go_on(self, act: Any) -> None:
        """Do something together with all ranks; if that breaks, recover."""
        try:
            act()
        except Broken as error:
            self._recover(error)

    def _recover(self, error: Broken) -> None:
        """Go on in the next generation, however often it takes."""
        while True:
            if not self._can_recover(error):
                raise error
            began = time.monotonic()
            log.warning("generation %d broke after step %d: %s", self.group.generation, self._completed, error)
            for undo in self._undoing:
                undo()
            self.group = self.group.recover()
            try:
                self._settle()
            except Broken as next_error:
                error = next_error
                continue
            self.recoveries += 1
            took = time.monotonic() - began
            size, generation = self.group.size, self.group.generation
            log.warning("generation %d of %d members goes on after %.2f s", generation, size, took)
            return

    def _can_recover(self, error: Broken) -> bool:
        if not isinstance(error, (PeerLost, Aborted, Timeout)) or not self.group.capabilities.recovers:
            return False
        internals = GroupInternals(self.group)
        own = isinstance(error, Aborted) and error.culprit == self.group.rank and not internals.is_left_behind
        return internals.is_broken and not own

    def _settle(self, digest: str | None = None) -> None:
        """Agree with all ranks of a new generation where to go on, and have or hand over the state of that step.

        `digest` is the state's, if nothing can have changed it since.
        """
        GroupInternals(self.group).begin_settling()
        while self.group.size < self.min_size:
            self._await_others()
        self._number = _begun_runs(GroupInternals(self.group), self._number)
        begun = has_begun(self._completed, self.digest, self._overwritten)
        digest = digest or (self._digest_if_readable() if begun else "")
        sound = is_sound(self._completed, self.digest, digest, self._overwritten)
        mine = Standing(self._completed, self._completed_in, self.committed, digest, sound, self._number)
        standings = self._compared(mine)
        self._check_runs([standing.run for standing in standings])
        if all(one.completed == NONE for one in standings):  # else nobody asks for the digest of who has just come
            digest = digest if begun else self._state.digest()
            standings = self._compared(replace(mine, digest=digest), "settling, with digests")
        settlement = settle(standings)
        self._divergence = None  # ranks that have just joined know of none, and all must report it together
        holds = self.group.rank not in settlement.pulls
        self._check_identical(not settlement.differing, settlement.completed, holds)
        self._exchange(settlement, standings)
        # The digest too, before anything can break: a state that was just pulled must not count as spoiled.
        self._completed, self._completed_in = settlement.version_in(self.group.generation)
        giver = settlement.pulls.get(self.group.rank)
        self.digest = digest if giver is None else standings[giver].digest
        self._tell_all(None, "settling, done")  # until then nobody changes its state: takers may yet fail
        self.committed = settlement.completed  # now all are known to have it
        GroupInternals(self.group).settled()
        self._settled = self.group

    def _digest_if_readable(self) -> str:
        """Of a state that a step has left in pieces (arrays of JAX that were donated), nothing: so it is not sound."""
        try:
            return self._state.digest()
        except Exception as error:
            log.warning("the state cannot be read any more: %s", error)
            return ""

    def _check_runs(self, numbers: list[int]) -> None:
        """Who has come in place of a lost rank begins with the program's first run; others may be in a later one."""
        present = max(numbers)
        if self._number != present:
            self.close()
            raise ConfigError(
                f"this is run {self._number} of this process, and the others are in their run {present}: a process "
                "that joins, or loses the others between two runs, cannot catch up. Use one run for all phases; keep "
                "the phase in its state"
            )
        if min(numbers) != present:
            self._tell_all(None, "settling, until those who are in another run have left")

    def _compared(self, mine: Standing, what: str = "settling") -> list[Standing]:
        """Where all ranks stand."""
        return [Standing.from_wire(told) for told in self._tell_all(mine.to_wire(), what)]

    def _tell_all(self, value: Any, what: str) -> list[Any]:
        return GroupInternals(self.group).gather(value, what)

    def _exchange(self, settlement: Settlement, standings: list[Standing]) -> None:
        rank, step = self.group.rank, settlement.completed
        giver = settlement.pulls.get(rank, rank)
        takers = settlement.gives(giver)
        if not takers:
            return
        # Who has completed something keeps it until the new state is whole: the others may not survive this.
        self._overwritten = giver != rank and self._completed == NONE and step != NONE
        digest = standings[giver].digest
        nbytes = transfer.hand_over(self.group, self._state, giver, takers, digest, overwrite=self._overwritten)
        self._overwritten = False
        if giver != rank:
            log.info("rank %d has got the state of step %d (%d bytes)", rank, step, nbytes)

    def _await_others(self) -> None:
        """Too few members: wait, visibly, until others ask to join, and let them in."""
        log.warning("waiting: %d of at least %d members are here", self.group.size, self.min_size)
        while True:
            if count(self.group.all_reduce(ballot(self._completed, "", self._others_wait()), op="max")).renew:
                self.group = self.group.recover()
                return
            time.sleep(WAIT_SECONDS)


def _begun_runs(internals: GroupInternals, number: int) -> int:
    """How many runs this member has begun, with this one; `number` if that was counted already, in another job run."""
    member = internals.identity.job, internals.member_id
    _RUNS[member] = max(_RUNS.get(member, 0), number) if number else _RUNS.get(member, 0) + 1
    return number or _RUNS[member]


class Step:
    """One step: `with step:` around its body. `index` counts from 0, and the step itself can be used as that number.

    `committed` is true afterwards if this very pass through the body is known to have counted: all ranks have done the
    step, and this rank's state is the one after it. After a loss it is false, and the step comes again, unless a
    survivor had completed it. A rank that the others went on without, and that has come back, is told of later steps.
    """

    def __init__(self, run: Elastic, index: int) -> None:
        self._run = run
        self.index = index
        self.ended = False
        self.committed = False

    def __index__(self) -> int:
        return self.index

    def __repr__(self) -> str:
        return f"<gradwire.Step {self.index}>"

    def __enter__(self) -> Step:
        if self.ended:
            raise ConfigError(f"step {self.index} has ended: each step is used once")
        self._run._check_between(self.index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.ended = True
        if error is None:
            generation = self._run.group.generation
            self._run._end(self.index)
            self.committed = self._run._holds(self.index, generation)
            return False
        if isinstance(error, Broken):
            try:
                self._run._recover(error)
            except GradwireError as final:
                if final is error:
                    return False
                raise
            return True
        return False
