"""Training that goes on when ranks are lost, and lets others in: `gw.elastic`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, SupportsIndex, get_args

from gradwire.drive import drive
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
from gradwire.training.commit_rules import Settlement, has_joiners
from gradwire.training.fence import Fence
from gradwire.training.sampler import whole
from gradwire.training.state import State
from gradwire.training.step_protocol import (
    Gather,
    GatherDigests,
    HandOver,
    NextGeneration,
    OnDivergence,
    Pause,
    Request,
    StepProtocol,
    Vote,
)

log = logging.getLogger("gradwire.training")

EARLY = 3  # steps before which it is seen whether the state is changed in between
_RUNS: dict[tuple[int, str], int] = {}  # how many a member of a job has begun


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
        self._replica = _Replica(self._state, group)
        self._protocol = StepProtocol(self._replica, min_size, on_divergence)
        self._told = False  # that the state was changed between steps

    @property
    def group(self) -> Group:
        """The present generation's."""
        return self._replica.group

    @group.setter
    def group(self, group: Group) -> None:
        self._replica.group = group

    @property
    def min_size(self) -> int:
        """With fewer members the run waits."""
        return self._protocol.min_size

    @property
    def on_divergence(self) -> OnDivergence:
        """What happens when ranks hold different states: "raise" or "warn"."""
        return self._protocol.on_divergence

    @property
    def completed(self) -> int:
        """The last step whose body has ended here; -1: none yet."""
        return self._protocol.completed

    @property
    def committed(self) -> int:
        """The last step that all ranks are known to have completed; -1: none yet."""
        return self._protocol.committed

    @property
    def digest(self) -> str:
        """Of the state after the last completed step."""
        return self._protocol.digest

    @property
    def identical(self) -> bool:
        """Whether all ranks held the same state at the last vote."""
        return self._protocol.identical

    @property
    def recoveries(self) -> int:
        """How often the run went on after a break."""
        return self._replica.recoveries

    def steps(self, total: SupportsIndex) -> Iterator[Step]:
        """The steps up to `total` that are still to do, each to be used as `with step:`; begun again after a loss."""
        last = whole("total", total) - 1
        while True:
            drive(self._protocol.begin(), self._replica.perform)
            GroupInternals(self.group).mark_finished(self.completed >= last)
            if self.completed >= last:
                return
            step = Step(self, self.completed + 1)
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
        self._replica.undoing.append(undo)

    def _check_between(self, index: int) -> None:
        """In the first steps, where it is seen at once: what is changed outside of a step is lost on whoever joins."""
        if not self._told and self.completed == index - 1 < EARLY and self._state.digest() != self.digest:
            self._told = True
            log.error(
                "the state was changed between steps %d and %d: a rank that joins there gets it without that change, "
                "and after a loss it counts as spoiled. Change the state only inside of `with step`",
                *(index - 1, index),
            )

    def close(self) -> None:
        """Leave the job: the others go on without this rank."""
        self.group.close()

    @property
    def fence(self) -> Fence:
        """The token of the present generation of this run, by which writers of checkpoints are ordered."""
        identity = GroupInternals(self.group).identity
        return Fence(identity.run, identity.number)

    def _end(self, index: int) -> None:
        """The body of a step has ended here: take the vote, and let in members that wait."""
        if not GroupInternals(self.group).is_closed:  # else the program has left
            drive(self._protocol.end(index), self._replica.perform)

    def _recover(self, error: Broken) -> None:
        """Go on in the next generation, however often it takes."""
        drive(self._protocol.recover(error), self._replica.perform)


class _Replica:
    """This rank and its state, as the step protocol sees them; performs with the group what the protocol asks for."""

    def __init__(self, state: State, group: Group) -> None:
        self.group = group
        self.recoveries = 0
        self.undoing: list[Callable[[], None]] = []
        self._state = state
        self._broke_at = 0.0

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def generation(self) -> int:
        return self.group.generation

    def digest(self) -> str:
        return self._state.digest()

    def digest_if_readable(self) -> str:
        """Of a state that a step has left in pieces (arrays of JAX that were donated), nothing: so it is not sound."""
        try:
            return self._state.digest()
        except Exception as error:
            log.warning("the state cannot be read any more: %s", error)
            return ""

    def digests(self) -> list[tuple[str, str]]:
        return list(self._state.digests().items())

    def others_wait(self) -> bool:
        return has_joiners(GroupInternals(self.group).news(), self.group.generation)

    def can_recover(self, error: Broken) -> bool:
        if not isinstance(error, (PeerLost, Aborted, Timeout)) or not self.group.capabilities.recovers:
            return False
        internals = GroupInternals(self.group)
        own = isinstance(error, Aborted) and error.culprit == self.rank and not internals.is_left_behind
        return internals.is_broken and not own

    def begun_runs(self, number: int) -> int:
        return _begun_runs(GroupInternals(self.group), number)

    def leave(self) -> None:
        self.group.close()

    # -- requests of the protocol -------------------------------------------------------------------------------------

    def perform(self, request: Request) -> Any:
        group = self.group
        match request:
            case Vote(ballot):
                return group.all_reduce(ballot, op="max")
            case Gather(value, operation):
                return GroupInternals(group).gather(value, operation)
            case GatherDigests(digests):
                return group.all_gather_values(digests)
            case HandOver():
                self._hand_over(request)
            case NextGeneration():
                self.group = group.recover()
            case Pause(seconds):
                time.sleep(seconds)
        return None

    def _hand_over(self, request: HandOver) -> None:
        giver, takers, digest = request.giver, request.takers, request.digest
        nbytes = transfer.hand_over(self.group, self._state, giver, takers, digest, overwrite=request.overwrite)
        if giver != self.rank:
            log.info("rank %d has got the state of step %d (%d bytes)", self.rank, request.step, nbytes)

    # -- reports of the protocol --------------------------------------------------------------------------------------

    def is_short_of_members(self, wanted: int) -> None:
        log.warning("waiting: %d of at least %d members are here", self.size, wanted)

    def begins(self) -> None:
        GroupInternals(self.group).begin_state_agreement()

    def decided(self, settlement: Settlement) -> None:
        """Nothing to do."""

    def holds(self, version: tuple[int, int]) -> None:
        """Nothing to do."""

    def committed(self, version: tuple[int, int]) -> None:
        GroupInternals(self.group).end_state_agreement()

    def diverged(self, error: ReplicasDiverged) -> None:
        log.error("%s", error)

    def broke(self, error: Broken, step: int) -> None:
        self._broke_at = time.monotonic()
        log.warning("generation %d broke after step %d: %s", self.generation, step, error)
        for undo in self.undoing:
            undo()

    def recovered(self) -> None:
        self.recoveries += 1
        took = time.monotonic() - self._broke_at
        log.warning("generation %d of %d members goes on after %.2f s", self.generation, self.size, took)


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
            self.committed = self._run._protocol.counts(self.index, generation)
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
