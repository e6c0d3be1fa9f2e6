"""`gw.elastic`: training that survives lost ranks and admits new ones."""

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
    GroupTimeout,
    InvalidSize,
    PeerLost,
    ReplicasDiverged,
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

CHECKED_STEPS = 3  # before these first steps, the run checks that the state was not changed between two steps
_RUNS: dict[tuple[int, str], int] = {}  # (job, member) → how many elastic runs this member has begun


def elastic(state: Any, *, min_size: int = 1, on_divergence: OnDivergence = "raise") -> Elastic:
    """Start a run of steps that survives the loss of ranks: each step counts on all ranks or on none.

    All ranks start with the state of rank 0. At the end of each step the ranks vote; when the vote returns, the step is
    *committed*. If a rank is lost, the other ranks form the next generation and continue after the last step that one
    of them has completed; an interrupted step is repeated. A rank receives the state from another rank if it is behind,
    has just joined, or was interrupted while it changed its state. While the job has fewer than `min_size` members, the
    run waits.

    A job of fixed size does not form a next generation: there the loss of a rank is raised from `with step`.

    Change the state only inside `with step`.

    Args:
        state: The replicated state: a dict of arrays and plain values, an object with `state_dict` and
            `load_state_dict`, or a dict of such objects. It must hold everything that a rank needs to continue.
        min_size: The smallest number of members to train with.
        on_divergence: The vote compares the digests of all ranks' states. With "raise", a difference raises
            `ReplicasDiverged` on all ranks, and the step is not committed. With "warn", it is logged and the run
            continues; ranks that join receive the state that most ranks hold.

    Returns:
        The run. It uses the group of `gw.init()`, and calls `gw.init()` if the process has no group yet.

    Raises:
        ArrayError: `state` holds a value that cannot be sent to another rank.
        ConfigError: Another argument is invalid (`InvalidSize` for `min_size`).

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
    # Before this rank joins and the others wait for it: reject a state that cannot be sent, and fault its memory in.
    State(state).touch()
    return Elastic(state, process_hooks.current() or init.init(), min_size, on_divergence)


class Elastic:
    """A run of committed steps, made by `gw.elastic`."""

    def __init__(self, state: Any, group: Group, min_size: int, on_divergence: OnDivergence = "raise") -> None:
        if whole("min_size", min_size) < 1:
            raise InvalidSize(f"min_size is {min_size}: it must be at least 1")
        if on_divergence not in get_args(OnDivergence):
            raise ConfigError(f"on_divergence is {on_divergence!r}: it must be {' or '.join(get_args(OnDivergence))}")
        self._state = State(state)
        self._replica = _Replica(self._state, group)
        self._protocol = StepProtocol(self._replica, min_size, on_divergence)
        self._warned = False  # that the state was changed between steps

    @property
    def group(self) -> Group:
        """The group of the current generation. It changes after each recovery, so do not keep a reference to it."""
        return self._replica.group

    @group.setter
    def group(self, group: Group) -> None:
        self._replica.group = group

    @property
    def min_size(self) -> int:
        """The smallest number of members to train with. The run waits while there are fewer."""
        return self._protocol.min_size

    @property
    def on_divergence(self) -> OnDivergence:
        """The reaction when ranks hold different states: "raise" or "warn"."""
        return self._protocol.on_divergence

    @property
    def completed(self) -> int:
        """The index of the last step whose body has ended on this rank; -1 if there is none yet."""
        return self._protocol.completed

    @property
    def committed(self) -> int:
        """The index of the last step that all ranks are known to have completed; -1 if there is none yet."""
        return self._protocol.committed

    @property
    def digest(self) -> str:
        """The digest of the state after the last completed step."""
        return self._protocol.digest

    @property
    def identical(self) -> bool:
        """Whether all ranks held the same state at the last vote."""
        return self._protocol.identical

    @property
    def recoveries(self) -> int:
        """How many times the run has continued in a new generation after a failure."""
        return self._replica.recoveries

    def steps(self, total: SupportsIndex) -> Iterator[Step]:
        """Yield the steps that are still to do, up to step `total - 1`. Wrap each iteration in `with step:`.

        A rank that joins starts with the current step of the run. After a failure, the interrupted step is yielded
        again, unless another rank had completed it. All ranks must pass the same `total`.

        Args:
            total: The number of steps of the whole run, counted from step 0.

        Raises:
            ConfigError: The loop body did not enter `with step`.
            StateLost: Every remaining rank had already changed its state when the step was interrupted, so no intact
                copy is left.
            ReplicasDiverged: The ranks hold different states, and `on_divergence` is "raise".
        """
        last = whole("total", total) - 1
        while True:
            drive(self._protocol.begin(), self._replica.perform)
            GroupInternals(self.group).mark_finished(self.completed >= last)
            if self.completed >= last:
                return
            step = Step(self, self.completed + 1)
            yield step
            if not step.ended:
                raise ConfigError(f"step {step.index} was not entered: wrap the loop body in `with step:`")

    def finish(self) -> None:
        """Declare the work done before the last step, for example to stop early: no more members are admitted.

        All ranks must call it at the same step.
        """
        GroupInternals(self.group).mark_finished(True)

    def when_cut_short(self, undo: Callable[[], None]) -> None:
        """Register a function that runs after a step has failed, before the ranks compare their states.

        Use it to undo changes that the body of a step makes early, such as updates of a model's running means. Then the
        state is again that of the last completed step.

        Args:
            undo: A function without arguments.
        """
        self._replica.undoing.append(undo)

    def _check_between(self, index: int) -> None:
        """Log an error if the state was changed since the last step. Only the first steps are checked.

        A rank that joins between two steps would receive the state without such a change.
        """
        if not self._warned and self.completed == index - 1 < CHECKED_STEPS and self._state.digest() != self.digest:
            self._warned = True
            log.error(
                "the state was changed between steps %d and %d. A rank that joins there receives it without that "
                "change, and after a failure this rank's copy is not used. Change the state only inside `with step`",
                *(index - 1, index),
            )

    def close(self) -> None:
        """Leave the job. The other ranks continue without this one."""
        self.group.close()

    @property
    def fence(self) -> Fence:
        """The fence of this run and its current generation: an ordered token for writing checkpoints."""
        identity = GroupInternals(self.group).identity
        return Fence(identity.run, identity.number)

    def _end(self, index: int) -> None:
        """Vote at the end of a step's body, and admit members that wait to join."""
        if not GroupInternals(self.group).is_closed:  # the body may have closed the group to leave the job
            drive(self._protocol.end(index), self._replica.perform)

    def _recover(self, error: Broken) -> None:
        """Continue in the next generation; repeat if that one fails too."""
        drive(self._protocol.recover(error), self._replica.perform)


class _Replica:
    """Connects the step protocol to this rank's group and state: performs its requests, and logs its reports."""

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
        """Return the digest, or "" if the state cannot be read: a step may have donated some of its JAX arrays.

        An empty digest marks the state as not intact.
        """
        try:
            return self._state.digest()
        except Exception as error:
            log.warning("the state on this rank can no longer be read: %s", error)
            return ""

    def digests(self) -> list[tuple[str, str]]:
        return list(self._state.digests().items())

    def others_wait(self) -> bool:
        return has_joiners(GroupInternals(self.group).news(), self.group.generation)

    def can_recover(self, error: Broken) -> bool:
        if not isinstance(error, (PeerLost, Aborted, GroupTimeout)) or not self.group.capabilities.recovers:
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
            log.info("rank %d received the state of step %d (%d bytes)", self.rank, request.step, nbytes)

    # -- reports of the protocol --------------------------------------------------------------------------------------

    def is_short_of_members(self, wanted: int) -> None:
        log.warning("waiting for members: the job has %d and needs at least %d", self.size, wanted)

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
        level = _level_on(0 if error.culprit != 0 else 1, self.rank)
        log.log(level, "generation %d broke after step %d: %s", self.generation, step, error)
        for undo in self.undoing:
            undo()

    def recovered(self) -> None:
        self.recoveries += 1
        took = time.monotonic() - self._broke_at
        level = _level_on(0, self.rank)
        log.log(level, "recovered in %.2f s: generation %d has %d members", took, self.generation, self.size)


def _level_on(reporter: int, rank: int) -> int:
    """Return the level of a message that all ranks log: a warning on one rank, so that it is shown once."""
    return logging.WARNING if rank == reporter else logging.INFO


def _begun_runs(internals: GroupInternals, number: int) -> int:
    """Return how many elastic runs this member has begun, including the current one.

    `number` is 0 at first. Later it is the result of the first call, which is then returned again.
    """
    member = internals.identity.job, internals.member_id
    _RUNS[member] = max(_RUNS.get(member, 0), number) if number else _RUNS.get(member, 0) + 1
    return number or _RUNS[member]


class Step:
    """One training step; wrap the loop body in `with step:`.

    Leaving `with step` takes the vote. If the group breaks inside the body or the vote, the run recovers and the error
    is suppressed; other errors are raised.

    Attributes:
        index: The number of the step, from 0. A step can also be used as an integer, for example as a list index.
        committed: After the body, whether this pass through the body counted: all ranks completed the step, and this
            rank's state is the one after it. It is False after a failure. Then the step is repeated, unless another
            rank had completed it.
        ended: Whether the body has ended.
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
        GroupInternals(self._run.group).set_step(self.index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.ended = True
        try:
            return self._ended(error)
        finally:
            GroupInternals(self._run.group).set_step(None)

    def _ended(self, error: BaseException | None) -> bool:
        """Vote, or recover if the group broke. Return whether the error is handled."""
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
