"""`gw.elastic`: training that survives lost ranks and admits new ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, SupportsIndex, get_args

from gradwire.drive import drive
from gradwire.errors import Broken, ConfigError, GradwireError, InvalidSize
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.job import init, process_hooks, stop_signals
from gradwire.training.checkpoint_protocol import CheckpointProtocol
from gradwire.training.checkpoint_saver import CheckpointSaver, fence_of
from gradwire.training.checkpoints.folder import CheckpointFolder
from gradwire.training.commit_rules import REQUESTED
from gradwire.training.companions import Companion
from gradwire.training.fence import Fence
from gradwire.training.replica import GroupReplica
from gradwire.training.sampler import whole
from gradwire.training.state import State
from gradwire.training.step_protocol import OnDivergence, StepProtocol

log = logging.getLogger("gradwire.training")

CHECKED_STEPS = 3  # before these first steps, the run checks that the state was not changed between two steps
KEEP = 3  # complete checkpoints


def elastic(
    state: Any,
    *,
    min_size: int = 1,
    on_divergence: OnDivergence = "raise",
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = KEEP,
) -> Elastic:
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
        checkpoint: A folder for checkpoints, which all hosts share. The run continues from the newest complete one that
            it finds there. It writes one at its end, when it is stopped, and when a rank calls `run.checkpoint()`.
            Threads write the files while training continues; the loop stops only to copy the state.
        checkpoint_every: Also write a checkpoint after every so many steps. All ranks must pass the same values.
        keep: How many complete checkpoints to keep. Older ones are removed.

    Returns:
        The run. It uses the group of `gw.init()`, and calls `gw.init()` if the process has no group yet.

    Raises:
        ArrayError: `state` holds a value that cannot be sent to another rank.
        ConfigError: Another argument is invalid (`InvalidSize` for `min_size`), or the state is sharded (see
            `ShardedOptimizer`) and the number of ranks can change.

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
    saving = Saving.of(checkpoint, checkpoint_every, keep)
    return Elastic(state, process_hooks.current() or init.init(), min_size, on_divergence, saving)


@dataclass(frozen=True)
class Saving:
    """Where and how often a run writes checkpoints."""

    folder: CheckpointFolder
    settings: str  # as text, to be compared between ranks
    every: int | None = None

    @classmethod
    def of(cls, folder: str | os.PathLike[str] | None, every: int | None, keep: int) -> Saving | None:
        """Return the settings of the arguments of `gw.elastic`; None without a folder. Raise `ConfigError` if wrong."""
        if every is not None and whole("checkpoint_every", every) < 1:
            raise ConfigError(f"checkpoint_every is {every}: it must be at least 1")
        if folder is None:
            if every is not None:
                raise ConfigError("checkpoint_every needs a folder: pass checkpoint=")
            return None
        try:
            path = os.path.abspath(folder)  # the program may change its current folder later
        except TypeError:
            raise ConfigError(f"checkpoint is {folder!r}: it must be the path of a folder") from None
        return cls(CheckpointFolder(path, whole("keep", keep)), f"folder {os.fspath(folder)}, keep {keep}", every)


class Elastic:
    """A run of committed steps, made by `gw.elastic`."""

    def __init__(
        self,
        state: Any,
        group: Group,
        min_size: int,
        on_divergence: OnDivergence = "raise",
        saving: Saving | None = None,
    ) -> None:
        if whole("min_size", min_size) < 1:
            raise InvalidSize(f"min_size is {min_size}: it must be at least 1")
        if on_divergence not in get_args(OnDivergence):
            raise ConfigError(f"on_divergence is {on_divergence!r}: it must be {' or '.join(get_args(OnDivergence))}")
        self._state = State(state)
        if self._state.is_sharded and group.capabilities.recovers:
            raise ConfigError(
                "a part of this state is spread over the ranks, without copies: if a rank is lost, its part is lost. A "
                "job whose number of ranks can change needs a state that every rank holds as a whole"
            )
        self._saver: CheckpointSaver | None = None
        checkpoints: CheckpointProtocol | None = None
        if saving is not None:
            self._state.take_shard_apart()  # raises now, not at the first checkpoint, if a part cannot be saved
            self._saver = CheckpointSaver(saving.folder, saving.settings, self._state, lambda: self.group)
            checkpoints = CheckpointProtocol(self._saver, saving.every)
        self._signals = stop_signals.StopSignals(lambda: False)
        self._stop_requested = False
        self._replica = GroupReplica(self._state, group, self._saver, self._stop_wanted)
        self._protocol = StepProtocol(self._replica, min_size, on_divergence, checkpoints)
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

    def begin(self) -> None:
        """Agree with all ranks on the state to continue from, and load it from a checkpoint if there is one.

        The first step does this if it has not been done. Call it earlier, on all ranks, to read the loaded state before
        the first step, for example `completed`.
        """
        drive(self._protocol.begin(), self._replica.perform)

    def steps(self, total: SupportsIndex) -> Iterator[Step]:
        """Yield the steps that are still to do, up to step `total - 1`. Wrap each iteration in `with step:`.

        A rank that joins starts with the current step of the run. After a failure, the interrupted step is yielded
        again, unless another rank had completed it. All ranks must pass the same `total`.

        SIGTERM or SIGUSR2 to any rank stops the run: after the same step, all ranks write a checkpoint if one is
        configured, and raise `SystemExit` with code 128 + signal. After `request_stop()` the iteration just ends.

        Args:
            total: The number of steps of the whole run, counted from step 0.

        Raises:
            ConfigError: The loop body did not enter `with step`.
            StateLost: Every remaining rank had already changed its state when the step was interrupted, so no intact
                copy is left.
            ReplicasDiverged: The ranks hold different states, and `on_divergence` is "raise".
            CheckpointError: The checkpoint to continue from cannot be loaded.
        """
        last = whole("total", total) - 1
        with stop_signals.watched(self._can_stop) as self._signals:
            while True:
                self.begin()
                stop = self._protocol.stop
                finished = self.completed >= last or stop == REQUESTED
                GroupInternals(self.group).mark_finished(finished)  # not after a signal: the job can be started again
                if finished or stop:
                    if self._finished():
                        break
                    continue  # a rank was lost meanwhile
                step = Step(self, self.completed + 1)
                yield step
                if not step.ended:
                    raise ConfigError(f"step {step.index} was not entered: wrap the loop body in `with step:`")
        if self._protocol.stop > REQUESTED:
            raise SystemExit(128 + self._protocol.stop)

    def _finished(self) -> bool:
        """Complete the last checkpoint; return False if a failure interrupted that."""
        if self._protocol.stop > REQUESTED:
            self._signals.agreed(self._protocol.stop)
        drive(self._protocol.finish(), self._replica.perform)
        return self._protocol.finished

    def _can_stop(self) -> bool:
        """Return whether the run can leave after the current step: not if its group is broken for good."""
        return self.group.capabilities.recovers or not GroupInternals(self.group).is_broken

    def _stop_wanted(self) -> int:
        return max(self._signals.received, REQUESTED if self._stop_requested else 0)

    def checkpoint(self) -> None:
        """Ask for a checkpoint of the current step. Any rank may call it; all ranks then write one after the same step.

        The call returns at once. Threads write the files while training continues. `last_checkpoint` shows when the
        checkpoint is complete.

        Raises:
            ConfigError: `gw.elastic` was called without `checkpoint=`.
        """
        if self._saver is None:
            raise ConfigError("this run has no folder for checkpoints: pass checkpoint= to gw.elastic")
        self._saver.request()

    @property
    def last_checkpoint(self) -> str | None:
        """The path of the last complete checkpoint that this rank knows of, or None."""
        return self._saver.last or None if self._saver is not None else None

    def request_stop(self) -> None:
        """Ask all ranks to leave after the same step, this or the next one. Any rank, thread or handler may call it.

        The ranks write a checkpoint if one is configured. Then the iteration over `steps` ends on all of them.
        """
        self._stop_requested = True

    @property
    def stopping(self) -> bool:
        """Whether a signal or `request_stop` asks this run to stop, as far as this rank knows."""
        return bool(self._protocol.stop or self._stop_wanted())

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

    def attach(self, companion: Companion) -> None:
        """Make the values of an object part of the replicated state: transferred, compared and saved with it.

        `gw.Sampler(run=run)` calls it for its position. All ranks attach the same objects in the same order.

        Args:
            companion: An object with `state_dict`, `load_state_dict`, `step_ended` and `step_failed`. If its values
                have been received or loaded already, it gets them in this call.
        """
        self._state.companions.attach(companion, begun=bool(self.digest))

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
        return fence_of(self.group)

    def _end(self, index: int) -> None:
        """Vote at the end of a step's body, and admit members that wait to join."""
        if not GroupInternals(self.group).is_closed:  # the body may have closed the group to leave the job
            self._state.companions.step_ended()
            drive(self._protocol.end(index), self._replica.perform)

    def _recover(self, error: Broken) -> None:
        """Continue in the next generation; repeat if that one fails too."""
        drive(self._protocol.recover(error), self._replica.perform)


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
        self._run._state.companions.step_failed()
        if isinstance(error, Broken):
            try:
                self._run._recover(error)
            except GradwireError as final:
                if final is error:
                    return False
                raise
            return True
        return False
