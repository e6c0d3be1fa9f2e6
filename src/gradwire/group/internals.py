"""What gradwire's own packages need of a group beyond its public calls: `GroupInternals`, the one way in.

Training code, the adapters for torch and JAX, job set-up and the simulator use this and no private attribute of
`Group`. What a user's program can call is on `Group` itself, and these packages call it there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gradwire.arrays import Array
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
from gradwire.operations.types import settled


class GroupParts(NamedTuple):
    """The objects that a group is made of: for tests, which look at them or make them fail."""

    generation: Generation
    runner: CollectiveRunner


def parts_of(group: Group) -> GroupParts:
    """The objects behind a group. The packages themselves use `GroupInternals` instead."""
    return GroupParts(group._generation, group._runner)


def queue_on(stream: Stream, operation: Operation, timeout: float | None = None) -> Work:
    """Queue an operation on a stream, whose `synchronize` then waits for it too."""
    return stream._queue(operation, timeout)


class GroupInternals:
    """One group, seen by gradwire's own packages."""

    __slots__ = ("_generation", "_group", "_runner")

    def __init__(self, group: Group) -> None:
        self._group = group
        self._generation, self._runner = parts_of(group)

    # -- operations in the group's order ------------------------------------------------------------------------------

    def run(self, operation: Operation, timeout: float | None = None, site: Site | None = None) -> Any:
        """Run an operation on this thread, as the group's next call. `site` is the user's line, unless it is above."""
        runner = self._runner
        return settled(runner.now(operation, bounded(timeout) or runner.timeout, site or call_site()))

    def queue(self, operation: Operation, timeout: float | None = None) -> Work:
        """Queue an operation for the group's progress thread. Unlike a stream, nothing here waits for it later."""
        runner = self._runner
        return runner.later(operation, bounded(timeout) or runner.timeout, call_site())

    @property
    def position(self) -> Position:
        """What the builders of collectives need to know of the group."""
        return self._runner.position

    def check(self, operation: str | None = None) -> None:
        """Raise the group's error if it is broken or closed."""
        self._runner.check(operation)

    @property
    def calls_made(self) -> int:
        """How many collectives of this group have begun; the same on all ranks that have come as far."""
        return self._runner.calls.sequence

    @property
    def timeout(self) -> float:
        """Seconds that a call may take if it names no timeout of its own."""
        return self._runner.timeout

    def set_timeout(self, seconds: float) -> None:
        """Change that, for calls from now on."""
        self._runner.timeout = seconds

    # -- its links and memory -----------------------------------------------------------------------------------------

    @property
    def point_to_point(self) -> PointToPoint:
        """Messages in halves: begin to send or receive here, and finish later."""
        return self._group._point_to_point

    def form(self, ranks: Sequence[int], instance: int, timeout: float | None = None) -> Group:
        """A group of these ranks, in this order; only they call it, with an instance number that is not used twice."""
        return self._group._form(ranks, instance, timeout or self.timeout)

    def is_shared(self, array: Array) -> bool:
        """Whether an array lies in memory that this rank shares with others."""
        shared = self._generation.shared
        return shared is not None and shared.own.offset_of(array.ctypes.data, array.nbytes) is not None

    # -- the generation that it belongs to ----------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether the group, or its generation, was closed here."""
        return self._group._closed

    @property
    def is_broken(self) -> bool:
        """Whether the generation has broken."""
        return not self._generation.control.sound

    @property
    def is_left_behind(self) -> bool:
        """Whether the generation broke because the others gave this rank up, and go on without it."""
        return self._generation.control.given_up

    @property
    def identity(self) -> Identity:
        """Job, run, generation number and this rank's number in the world."""
        return self._generation.identity

    @property
    def member_id(self) -> str:
        """The id of this member of the job; in a job without ids, what the rank is called."""
        identity = self._generation.identity
        return (self._generation.member_ids or identity.names)[identity.rank]

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Every rank's small JSON-like value, over the control links; all ranks of the world call it together.

        It needs none of the group's own links. `purpose` is what errors call it.
        """
        return self._generation.control_gather.tell_all(value, purpose, self.timeout)

    @property
    def gathers(self) -> int:
        """How many `gather` calls have begun in this generation; the same on all ranks that have come as far."""
        return self._generation.control_gather.rounds

    # -- elastic membership -------------------------------------------------------------------------------------------

    def news(self) -> Any:
        """What the coordinator reported last, for example that members wait to join; None if there is none."""
        membership = self._generation.membership
        return membership.news() if membership is not None else None

    def begin_settling(self) -> None:
        """The members are about to agree on a step to go on from; one that has joined needs its state first."""
        if (membership := self._generation.membership) is not None:
            membership.mark_without_state(membership.joined)

    def settled(self) -> None:
        """This member has the state that all agreed on."""
        if (membership := self._generation.membership) is not None:
            membership.mark_without_state(False)

    def mark_finished(self, finished: bool) -> None:
        """Note whether the work of the job is done: a member that joined then would begin it anew."""
        if (membership := self._generation.membership) is not None:
            membership.mark_finished(finished)
