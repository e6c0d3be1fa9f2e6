"""Runs the schedules of a group's calls over its links, one at a time, each with the next sequence number."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

from gradwire.arrays import Array
from gradwire.errors import InvalidSize
from gradwire.executors.fast_path import FastPath
from gradwire.executors.native import SHARED_TILE_BYTES, NativeExecutor
from gradwire.executors.python import CallHeader
from gradwire.generation.generation import Generation
from gradwire.generation.waiting import OperationWait
from gradwire.group.group_links import GroupLinks
from gradwire.group.plan_cache import PlanCache
from gradwire.liveness.call_log import CallLog
from gradwire.operations import CallKey, Position, Shape

Site = tuple[CodeType, int]
"""A place in the user's program: a code object and an instruction of it."""


class Call(NamedTuple):
    """The facts that all schedules of one call share."""

    operation: str
    timeout: float
    site: Site
    spin_seconds: float  # a waiting thread spins this long before it sleeps


class ScheduleRunner:
    """Runs one schedule at a time, in a group that has all of its links."""

    def __init__(
        self, generation: Generation, calls: CallLog, links: GroupLinks, at: Position, fast_path: FastPath
    ) -> None:
        identity = generation.identity
        self._control = generation.control
        self._failure = generation.failure
        self._calls = calls
        self._fast_path = fast_path
        self._header = CallHeader(identity.job, identity.number, calls.group, at.rank)
        self.executor = links.executor(self._header)
        tile_bytes = SHARED_TILE_BYTES if links.all_share else None
        self._plans = PlanCache(generation, links.topology, at, links.hosts_share, tile_bytes)

    def run(self, shape: Shape, x: Array, out: Array, key: CallKey | None, call: Call) -> None:
        """Run the schedule of this shape. Later calls with the same key, if there is one, take the fast path."""
        name = call.operation
        known = self._plans.find(shape)
        plan = known or self._plans.make(shape)
        if x.size < plan.in_count or out.size < plan.out_count:  # the core would read or write out of bounds
            raise InvalidSize(
                f"{name} of {x.size} elements into {out.size}: {plan.in_count} and {plan.out_count} needed"
            )
        sequence = self._calls.record(plan.description, call.site)
        if not self._control.intact:
            self._control.called(time.monotonic())
            self._failure.check(name)
        header = self._header
        header.sequence = sequence
        header.fingerprint = plan.description.fingerprint
        waits = partial(OperationWait, self._failure, self._calls, name, sequence, call.timeout)
        self.executor.run(plan, x, out, header, waits, call.spin_seconds)
        self._calls.finished = sequence
        if known is None and key is not None:
            self._fast_path.add_plan(*key, plan)

    def finish(self, status: Any, wait: OperationWait) -> None:
        """Continue a fast-path call that is not done yet. `status` is the status that the core returned."""
        assert isinstance(self.executor, NativeExecutor)
        self.executor.finish(status, wait)

    def close(self, idle: Callable[[], bool]) -> None:
        """Free the message memory as soon as `idle()` is true."""
        if isinstance(self.executor, NativeExecutor):
            self.executor.close(idle)
