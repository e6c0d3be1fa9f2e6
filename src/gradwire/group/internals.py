"""`GroupInternals`: the only access of gradwire's other packages to a group beyond its public methods.

The training code, the torch and JAX adapters, job set-up and the simulator use this class and no private attribute of
`Group`. For everything that a user's program can call, they use `Group` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradwire.arrays import Array, DType
from gradwire.generation.generation import Generation
from gradwire.group.group import Group
from gradwire.group.point_to_point import PointToPoint
from gradwire.group.runner import CollectiveRunner
from gradwire.group.schedule_runner import Site
from gradwire.group.stream import Stream
from gradwire.group.work import Work, bounded
from gradwire.identity import Identity
from gradwire.liveness.call_log import call_site
from gradwire.operations import Operation, Position
from gradwire.operations.types import result_or_raise


class GroupParts(NamedTuple):
    """The objects that a group consists of, for tests that inspect them or make them fail."""

    generation: Generation
    runner: CollectiveRunner


def parts_of(group: Group) -> GroupParts:
    """Return the objects behind a group, for tests. Other packages use `GroupInternals`."""
    return GroupParts(group._generation, group._runner)


def queue_on(stream: Stream, operation: Operation, timeout: float | None = None) -> Work:
    """Queue an operation on a stream. The stream's `synchronize` waits for it too."""
    return stream._queue(operation, timeout)


class GroupInternals:
    """Access to one group for gradwire's own packages."""

    __slots__ = ("_generation", "_group", "_runner")

    def __init__(self, group: Group) -> None:
        self._group = group
        self._generation, self._runner = parts_of(group)

    # -- members ------------------------------------------------------------------------------------------------------

    def unreachable_members(self) -> tuple[str, ...]:
        """Return the ids of the members that this rank itself could not reach."""
        ids = self._generation.member_ids
        return tuple(ids[rank] for rank in sorted(self._generation.failure.unreachable()))

    # -- operations in the group's order ------------------------------------------------------------------------------

    def run(self, operation: Operation, timeout: float | None = None, site: Site | None = None) -> Any:
        """Run an operation on this thread, as the group's next call, and return its result.

        `site` is the user's line that errors show. None means the innermost frame outside of gradwire.
        """
        runner = self._runner
        return result_or_raise(runner.now(operation, bounded(timeout) or runner.timeout, site or call_site()))

    def queue(self, operation: Operation, timeout: float | None = None) -> Work:
        """Queue an operation for the group's progress thread. It belongs to no stream."""
        runner = self._runner
        return runner.later(operation, bounded(timeout) or runner.timeout, call_site())

    @property
    def position(self) -> Position:
        """This rank's number and the size of the group, as the builders of operations need them."""
        return self._runner.position

    def check(self, operation: str | None = None) -> None:
        """Raise the group's error if it is broken or closed."""
        self._runner.check(operation)

    @property
    def calls_made(self) -> int:
        """The number of collectives of this group that have begun. Ranks at the same call have the same number."""
        return self._runner.calls.sequence

    @property
    def timeout(self) -> float:
        """The timeout, in seconds, of calls that pass no timeout."""
        return self._runner.timeout

    def set_timeout(self, seconds: float) -> None:
        """Change the timeout of later calls that pass no timeout."""
        self._runner.timeout = seconds

    # -- its links and memory -----------------------------------------------------------------------------------------

    @property
    def point_to_point(self) -> PointToPoint:
        """The point-to-point layer, with calls that begin to send or receive and calls that finish it."""
        return self._group._point_to_point

    def form(self, ranks: Sequence[int], instance: int, timeout: float | None = None) -> Group:
        """Return a group of these ranks, in this order. Only these ranks call it.

        All of them pass the same `instance`, a number that was not used before for the same ranks.
        """
        return self._group._form(ranks, instance, timeout or self.timeout)

    def is_shared(self, array: Array) -> bool:
        """Whether an array lies in memory that this rank shares with other ranks."""
        shared = self._generation.shared
        return shared is not None and shared.own.offset_of(array.ctypes.data, array.nbytes) is not None

    def zeros(self, count: int, dtype: DType) -> Array:
        """Allocate zeros. New shared memory of the group is already zero, and uses no physical memory until written."""
        flat = self._group.empty(count, dtype.storage)
        return flat if self.is_shared(flat) else np.zeros(count, dtype.storage)

    # -- the group's generation ---------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether this process closed the group or its generation."""
        return self._group._closed

    def set_step(self, index: int | None) -> None:
        """Set the step of an elastic run that the generation's errors name; None outside of steps."""
        self._generation.failure.step = index

    @property
    def is_broken(self) -> bool:
        """Whether the generation is broken."""
        return not self._generation.control.intact

    @property
    def is_left_behind(self) -> bool:
        """Whether the generation broke because the other ranks declared this rank lost and continue without it."""
        return self._generation.control.declared_lost

    @property
    def identity(self) -> Identity:
        """The run, the generation number and this rank's number in the world."""
        return self._generation.identity

    @property
    def member_id(self) -> str:
        """The id of this member of the job, or the name of the rank in a job without member ids."""
        identity = self._generation.identity
        return (self._generation.member_ids or identity.names)[identity.rank]

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Return every rank's small JSON-like value, in rank order. All ranks of the world call it together.

        The values travel over the control links, not over the group's own links. `purpose` is the name of this call in
        errors.
        """
        return self._generation.control_gather.gather(value, purpose, self.timeout)

    @property
    def gathers(self) -> int:
        """The number of `gather` calls begun in this generation. Ranks at the same call have the same number."""
        return self._generation.control_gather.rounds

    # -- elastic membership -------------------------------------------------------------------------------------------

    def news(self) -> Any:
        """Return the coordinator's latest report (for example that members wait to join), or None."""
        membership = self._generation.membership
        return membership.news() if membership is not None else None

    def report_checkpoint(self, epoch: int) -> None:
        """Report to the coordinator that the checkpoint is complete for which it has asked. Blocks for the reply."""
        if (membership := self._generation.membership) is not None:
            membership.checkpoint_written(epoch)

    def begin_state_agreement(self) -> None:
        """Note that the members are about to agree on a step and its state. A member that just joined has no state."""
        if (membership := self._generation.membership) is not None:
            membership.mark_without_state(membership.joined)

    def end_state_agreement(self) -> None:
        """Note that this member has the state that all members agreed on."""
        if (membership := self._generation.membership) is not None:
            membership.mark_without_state(False)

    def mark_finished(self, finished: bool) -> None:
        """Note whether the work of the job is done. A member that joined after that would start the work again."""
        if (membership := self._generation.membership) is not None:
            membership.mark_finished(finished)
