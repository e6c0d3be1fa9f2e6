"""Runs the operations of one group, one at a time, in the group's order.

Every call draws a ticket in the order of the program. A call on the group runs on the calling thread, a call queued
on a `Stream` on the group's progress thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

from gradwire import events
from gradwire.arrays import Array
from gradwire.errors import Broken, Closed, GradwireError
from gradwire.executors.fast_path import FastPath
from gradwire.executors.native import NativeExecutor
from gradwire.generation.generation import Generation
from gradwire.generation.waiting import OperationWait
from gradwire.group.call_order import CallOrder
from gradwire.group.group_links import GroupLinks
from gradwire.group.progress_queue import ProgressQueue
from gradwire.group.schedule_runner import Call, ScheduleRunner, Site
from gradwire.group.work import Work
from gradwire.host import native_core
from gradwire.liveness import call_log
from gradwire.liveness.call_log import CallLog
from gradwire.liveness.verdict import disagreement
from gradwire.operations import CallKey, Operation, Position, Shape
from gradwire.operations.registry import result_layouts
from gradwire.operations.split_join import all_gather_rows
from gradwire.operations.types import settled
from gradwire.topology import Topology
from gradwire.transports.base import Link

HELD_BACK = 0.1  # seconds at most that queued work is held back until a thread waits for its result
# Seconds that a waiting thread spins, if there is a core for it, before it sleeps. The calling thread can do nothing
# else with the core, and in training it waits about so long for the slowest rank. The progress thread takes the core
# from the program.
AWAKE, AWAKE_BESIDE = 50e-3, 1e-3


class CollectiveRunner:
    """Runs operations of a group at once or later: the order of calls, the queue, the links and the schedules."""

    def __init__(
        self,
        generation: Generation,
        identity: int,
        channel: int,
        members: Sequence[int],
        topology: Topology,
        timeout: float,
        links: Iterable[Link] = (),
    ) -> None:
        """`links` to lower ranks were dialled already, on this channel."""
        self.generation = generation
        self._failure = generation.failure
        self.calls = CallLog(identity, members)
        self.links = GroupLinks(generation, members, channel, topology, links)
        self.timeout = timeout
        self.fast_path = FastPath(result_layouts())
        self._order = CallOrder()
        self._queue = ProgressQueue(self._order, self._failure)
        self.position = Position(self.links.rank, len(members))
        self._schedules: ScheduleRunner | None = None  # from the first call on
        generation.control.watch(self.calls)
        generation.lifetime.add_group(self)

    def __str__(self) -> str:
        """The group as its `repr` shows it."""
        failure, position = self._failure, self.position
        state = "closed" if self.closed or failure.closed else "open" if failure.control.sound else "broken"
        return f"rank {position.rank} of {position.size}, generation {failure.identity.number}, {state}"

    @property
    def closed(self) -> bool:
        """Whether this group was closed; its generation may go on."""
        return self._order.closed

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent in this group's collectives so far."""
        return self._schedules.executor.sent if self._schedules is not None else 0

    def now(self, operation: Operation, timeout: float, site: Site) -> Any:
        """Run an operation on this thread, after everything that was called before it."""
        self._check_open(operation.name)  # before the lock: in a forked child nobody may be there to release it
        order = self._order
        with order.changed:
            self._queue.step_aside()
            ticket = order.turns.take()
            try:
                while order.turns.serving != ticket:
                    self._queue.begin_all()
                    order.changed.wait()
            except BaseException as error:  # Ctrl-C: this call will not be made
                order.skip(ticket)
                self._failure.interrupt(operation.name, error)
                raise
        try:
            return self._run(operation, timeout, site)
        finally:
            order.pass_on()

    def later(self, operation: Operation, timeout: float, site: Site) -> Work:
        """Queue an operation for the progress thread."""
        self.check(operation.name)
        return self._queue.add(operation.name, partial(self._run, operation, timeout, site), owner=self)

    def check(self, operation: str | None = None) -> None:
        """Raise if nothing can be called on this group any more."""
        if self.closed and not self._failure.closed:
            raise Closed("the group is closed", operation=operation)
        self._failure.check(operation)

    def _check_open(self, operation: str) -> None:
        """Raise if the group is closed; whether it is broken is asked when the call is on record, for others to see."""
        if self.closed or self._failure.closed:
            self.check(operation)

    def _run(self, operation: Operation, timeout: float, site: Site, *, beside: bool = False) -> Any:
        """Run an operation whose turn has come; `beside` the program, on the progress thread."""
        self._check_open(operation.name)
        transport = self.generation.transport
        transport.touch()
        awake, needed = (AWAKE_BESIDE, 2) if beside else (AWAKE, 1)
        call = Call(operation.name, timeout, site, awake if transport.cores >= needed else 0.0)
        exchange = _CallExchange(self, call)
        try:
            if events.watched():
                with events.operation(operation.name, rank=self.position.rank, group=self.calls.group):
                    return operation.body(exchange)
            return operation.body(exchange)
        except (Broken, Closed):
            raise
        except BaseException as error:
            # Whatever it was, this rank stopped in the middle of something that others still wait for.
            self._failure.interrupt(operation.name, error)
            raise

    # -- schedules ----------------------------------------------------------------------------------------------------

    def schedules(self, call: Call) -> ScheduleRunner:
        """For a call whose turn has come; the first one waits until all links are there."""
        if self._schedules is None:
            self.links.accept(self._wait(call.operation, self.calls.sequence + 1, call.timeout))
            self._schedules = ScheduleRunner(self.generation, self.calls, self.links, self.position, self.fast_path)
            if self.links.all_share and self.generation.transport.cores < 2:
                self._queue.hold_back(HELD_BACK)
            if isinstance(self._schedules.executor, NativeExecutor):
                self._start_fast_path(self._schedules.executor)
        return self._schedules

    def disagree(self, reason: str, call: Call) -> GradwireError:
        """Ranks turn out to have meant different things: break the group, and the error to raise."""
        sequence = self.calls.sequence
        self.generation.control.report(disagreement(self.calls, sequence, reason), time.monotonic())
        self.generation.service.wake()
        return self._wait(call.operation, sequence, call.timeout).broken()

    def _wait(self, operation: str, sequence: int, timeout: float) -> OperationWait:
        return OperationWait(self._failure, self.calls, operation, sequence, timeout)

    # -- the fast path ------------------------------------------------------------------------------------------------

    def _start_fast_path(self, executor: NativeExecutor) -> None:
        self.fast_path.start(
            native_core.native.FastPath(
                engine=executor.engine,
                turns=cast(Any, self._order.turns),  # the core's, as the ring is, since it is available
                calls=cast(Any, self.calls.ring),
                size=self.position.size,
                resume=self._resume,
                complete_gather=self._complete_gather,
                wake=self._order.passed_on,
                subscribers=events.subscribers,
                library_paths=call_log.inside,
                spin_seconds=AWAKE if self.generation.transport.cores >= 1 else 0.0,
            )
        )
        self._failure.on_halt(self.fast_path.halt)

    def _resume(self, status: Any, operation: str, sequence: int) -> None:
        """Continue a call of the fast path that is not done yet; `status` is the core's."""
        assert self._schedules is not None
        try:
            self._schedules.finish(status, self._wait(operation, sequence, self.timeout))
        except (Broken, Closed):
            raise
        except BaseException as error:
            self._failure.interrupt(operation, error)
            raise

    def _complete_gather(self, x: Any, rows: list[int], out: Any, sequence: int) -> Any:
        """Exchange the rows of an all_gather whose first half, the numbers of rows, ran on the fast path."""
        called = self.calls.ring.call(sequence)
        assert called is not None
        return settled(self._run(all_gather_rows(x, rows, out), self.timeout, called[2:]))

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End this group's links and thread; the generation goes on."""
        if self._failure.inherited:  # a forked child has neither
            self._order.abandon()
            self.calls.closed = True
            return
        if not self._order.close():
            return
        self.calls.closed = True
        self.generation.control.unwatch(self.calls)
        self.links.close()
        self.fast_path.end()
        self._failure.forget_halt(self.fast_path.halt)
        if self._schedules is not None:
            self._schedules.close(lambda: self._order.is_idle)


class _CallExchange:
    """The `Exchange` that one operation runs with."""

    __slots__ = ("_call", "_runner", "rank", "size")

    def __init__(self, runner: CollectiveRunner, call: Call) -> None:
        self.rank, self.size = runner.position
        self._runner = runner
        self._call = call

    def __call__(self, shape: Shape, x: Array, out: Array, key: CallKey | None = None) -> None:
        self._runner.schedules(self._call).run(shape, x, out, key, self._call)

    def disagree(self, reason: str) -> GradwireError:
        return self._runner.disagree(reason, self._call)
