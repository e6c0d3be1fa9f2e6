"""Runs the operations of one group, one at a time, in the group's order.

Every call takes a ticket, in the order of the program. A call on the group runs on the calling thread. A call queued
on a `Stream` runs on the group's progress thread, or on a thread that waits for it.
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
from gradwire.operations.types import result_or_raise
from gradwire.topology import Topology
from gradwire.transports.base import Link

MAX_HOLD_SECONDS = 0.1  # for queued work that is held back until a thread waits for its result
# Seconds that a waiting thread spins, if there is a core for it, before it sleeps. The calling thread can do nothing
# else with the core, and in training it waits about this long for the slowest rank. The progress thread takes the core
# from the program.
CALLER_SPIN_SECONDS, PROGRESS_SPIN_SECONDS = 50e-3, 1e-3


class CollectiveRunner:
    """Runs operations of a group now or later. It owns the order of calls, the queue, the links and the schedules."""

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
        """`links` are links to lower ranks that are already dialled, on this channel."""
        self.generation = generation
        self._failure = generation.failure
        self.calls = CallLog(identity, members)
        self.links = GroupLinks(generation, members, channel, topology, links)
        self.timeout = timeout
        self.fast_path = FastPath(result_layouts())
        self._order = CallOrder()
        self._queue = ProgressQueue(self._order, self._failure)
        self.position = Position(self.links.rank, len(members))
        self._schedules: ScheduleRunner | None = None  # made by the first call
        generation.control.watch(self.calls)
        generation.lifetime.add_group(self)

    def __str__(self) -> str:
        """Return the text that the group's `repr` shows."""
        failure, position = self._failure, self.position
        state = "closed" if self.closed or failure.closed else "open" if failure.control.intact else "broken"
        return f"rank {position.rank} of {position.size}, generation {failure.identity.number}, {state}"

    @property
    def closed(self) -> bool:
        """Whether this group was closed. Its generation may still be open."""
        return self._order.closed

    @property
    def bytes_sent(self) -> int:
        """The number of bytes that this rank has sent in this group's collectives so far."""
        return self._schedules.executor.sent if self._schedules is not None else 0

    def now(self, operation: Operation, timeout: float, site: Site) -> Any:
        """Run an operation on this thread, after all calls that were made before it."""
        self._check_open(operation.name)  # before the lock: in a forked child its holder may not exist
        order = self._order
        with order.changed:
            self._queue.replace_thread()
            ticket = order.turns.take()
            try:
                while order.turns.serving != ticket:
                    self._queue.release_all()
                    order.changed.wait()
            except BaseException as error:  # Ctrl-C: this call is cancelled
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
        """Raise the error of a closed or broken group."""
        if self.closed and not self._failure.closed:
            raise Closed("the group is closed", operation=operation)
        self._failure.check(operation)

    def _check_open(self, operation: str) -> None:
        """Raise if the group is closed.

        Whether it is broken is checked later, when the call is in the call log, so that other ranks can see the call.
        """
        if self.closed or self._failure.closed:
            self.check(operation)

    def _run(self, operation: Operation, timeout: float, site: Site, *, on_progress_thread: bool = False) -> Any:
        """Run an operation whose ticket is served."""
        self._check_open(operation.name)
        transport = self.generation.transport
        transport.touch()
        spin, cores_needed = (PROGRESS_SPIN_SECONDS, 2) if on_progress_thread else (CALLER_SPIN_SECONDS, 1)
        call = Call(operation.name, timeout, site, spin if transport.cores >= cores_needed else 0.0)
        exchange = _CallExchange(self, call)
        try:
            if events.watched():
                with events.operation(operation.name, rank=self.position.rank, group=self.calls.group):
                    return operation.body(exchange)
            return operation.body(exchange)
        except (Broken, Closed):
            raise
        except BaseException as error:
            # This rank stopped in the middle of a call that other ranks still wait for.
            self._failure.interrupt(operation.name, error)
            raise

    # -- schedules ----------------------------------------------------------------------------------------------------

    def schedules(self, call: Call) -> ScheduleRunner:
        """Return the schedule runner, for a call whose ticket is served. The first call waits for all links."""
        if self._schedules is None:
            self.links.accept(self._wait(call.operation, self.calls.sequence + 1, call.timeout))
            self._schedules = ScheduleRunner(self.generation, self.calls, self.links, self.position, self.fast_path)
            if self.links.all_share and self.generation.transport.cores < 2:
                self._queue.hold_back(MAX_HOLD_SECONDS)
            if isinstance(self._schedules.executor, NativeExecutor):
                self._start_fast_path(self._schedules.executor)
        return self._schedules

    def disagree(self, reason: str, call: Call) -> GradwireError:
        """Break the group because the ranks' arguments do not match, and return the error to raise."""
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
                turns=cast(Any, self._order.turns),  # native, like the ring: the core is available here
                calls=cast(Any, self.calls.ring),
                size=self.position.size,
                resume=self._resume,
                complete_gather=self._complete_gather,
                wake=self._order.after_native_call,
                subscribers=events.subscribers,
                library_paths=call_log.inside,
                spin_seconds=CALLER_SPIN_SECONDS if self.generation.transport.cores >= 1 else 0.0,
            )
        )
        self._failure.on_halt(self.fast_path.halt)

    def _resume(self, status: Any, operation: str, sequence: int) -> None:
        """Continue a fast-path call that is not done yet. `status` is the status that the core returned."""
        assert self._schedules is not None
        try:
            self._schedules.finish(status, self._wait(operation, sequence, self.timeout))
        except (Broken, Closed):
            raise
        except BaseException as error:
            self._failure.interrupt(operation, error)
            raise

    def _complete_gather(self, x: Any, rows: list[int], out: Any, sequence: int) -> Any:
        """Exchange the rows of an all_gather, after the fast path has exchanged the numbers of rows."""
        called = self.calls.ring.call(sequence)
        assert called is not None
        return result_or_raise(self._run(all_gather_rows(x, rows, out), self.timeout, called[2:]))

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End this group's links and its progress thread. The generation stays open."""
        if self._failure.inherited:  # a forked child has no links and no thread to end
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
    """The `Exchange` of one operation."""

    __slots__ = ("_call", "_runner", "rank", "size")

    def __init__(self, runner: CollectiveRunner, call: Call) -> None:
        self.rank, self.size = runner.position
        self._runner = runner
        self._call = call

    def __call__(self, shape: Shape, x: Array, out: Array, key: CallKey | None = None) -> None:
        self._runner.schedules(self._call).run(shape, x, out, key, self._call)

    def disagree(self, reason: str) -> GradwireError:
        return self._runner.disagree(reason, self._call)
