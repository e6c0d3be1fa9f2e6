"""Runs operations of one group, one at a time, in the group's order.

Every call takes a ticket when it is made; whoever holds the lowest one runs, on the thread that made it or, from a
stream, on the group's progress thread. Each schedule that runs gets the next sequence number.

Where ranks that share memory have no core to spare, a queued operation beside the program only takes turns with it, and
both find their caches full of the other's data. It is held back then, until somebody waits for it, who also does it, or
calls the group; and for a moment only, since others may need it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any, cast

from gradwire import events
from gradwire.arrays import Array
from gradwire.errors import Broken, Closed, GradwireError, InvalidSize, NoConnection
from gradwire.executors import native
from gradwire.executors.fast_path import FastPath
from gradwire.executors.native import Descriptor, NativeExecutor
from gradwire.executors.python import CallHeader, PythonExecutor
from gradwire.generation.generation import Generation
from gradwire.generation.waiting import OperationWait
from gradwire.group.plan_cache import PlanCache
from gradwire.group.work import Work
from gradwire.host import native_core
from gradwire.liveness import call_log
from gradwire.liveness.call_log import CallLog
from gradwire.liveness.verdict import disagreement
from gradwire.operations import CallKey, Operation, Shape
from gradwire.operations.registry import result_layouts
from gradwire.operations.split_join import all_gather_rows
from gradwire.operations.types import settled
from gradwire.topology import Topology
from gradwire.transports.base import Link

Site = tuple[CodeType, int]
NO_FAST_PATH = FastPath(result_layouts())
HELD_BACK = 0.1  # seconds at most
# Seconds in which whoever waits, and has a core for that, keeps it busy: a program that could do nothing else with it
# (ranks that train wait so long for the slowest in each step); and a thread beside the program, which may yet want it.
AWAKE, AWAKE_BESIDE = 50e-3, 1e-3


class Turns:
    """Whose turn it is: what the core's class of this name does, without it. Used with the runner's lock held."""

    def __init__(self) -> None:
        self.issued = self.serving = 0

    def take(self) -> int:
        self.issued += 1
        return self.issued - 1

    def pass_on(self) -> int:
        self.serving += 1
        return self.serving


@dataclass(frozen=True)
class _Queued:
    ticket: int
    work: Work
    body: Callable[..., Any]
    due: float  # when it runs beside the program, if nobody has waited for it before


class CollectiveRunner:
    """The engine room of a group."""

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
        self.members = tuple(members)  # world ranks, by rank in the group
        self.rank = self.members.index(generation.identity.rank)
        self.size = len(self.members)
        self.calls = CallLog(identity, self.members)
        self.closed = False
        self.timeout = timeout
        self.fast_path = NO_FAST_PATH
        self._channel = channel
        self._topology = topology
        self._links = {self.members.index(link.peer): link for link in links}
        self._call = CallHeader(generation.identity.job, generation.identity.number, identity, self.rank)
        self._executor: PythonExecutor | NativeExecutor = PythonExecutor(self._links.__getitem__)
        self._connected = self.size == 1
        self._plans = PlanCache(generation, topology, self.rank, self.size)
        self._turn = threading.Condition(threading.Lock())
        self._turns = native_core.native.Turns() if native_core.available() else Turns()
        self._skipped: set[int] = set()
        self._queue: deque[_Queued] = deque()
        self._wanted = 0  # tickets below this one are waited for
        self._held_back = 0.0
        self._progress: threading.Thread | None = None
        self._failed = False
        self._awake_for = 0.0
        generation.control.watch(self.calls)
        generation.lifetime.add_group(self)

    def __str__(self) -> str:
        """The group as its `repr` shows it."""
        failure = self._failure
        state = "closed" if self.closed or failure.closed else "open" if failure.control.sound else "broken"
        return f"rank {self.rank} of {self.size}, generation {failure.identity.number}, {state}"

    @property
    def is_native(self) -> bool:
        """Whether the native core carries out this group's schedules. It does not speak TLS."""
        plain = not self._speaks_tls
        return self.size > 1 and plain and native_core.available() and isinstance(self._failure.alarm, Descriptor)

    @property
    def _speaks_tls(self) -> bool:
        """Whether messages of this group are encrypted: not if all of them go through memory. Alike on all ranks."""
        in_memory = len(self._topology.hosts) == 1 and self.generation.shares(self.members[0])
        return self.generation.transport.encrypted and not in_memory

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent in this group's collectives so far."""
        return self._executor.sent

    @property
    def shares_memory(self) -> bool:
        """Whether some of this group's messages to this rank go through memory."""
        shared = self.generation.shared
        return shared is not None and self.is_native and any(world in shared.peers for world in self.members)

    # -- links --------------------------------------------------------------------------------------------------------

    def dial(self, deadline: float) -> None:
        """Open the links to the lower ranks; those of the higher ones come by themselves."""
        below = self.members[: self.rank]
        self.generation.connection.connect_all(below, self._channel, deadline, "subgroup", self._add_link)

    def _add_link(self, link: Link) -> None:
        self._links[self.members.index(link.peer)] = link

    def _await_links(self, watch: OperationWait) -> None:
        for rank in range(self.rank + 1, self.size):
            while rank not in self._links:
                try:
                    soon = time.monotonic() + 0.1
                    self._links[rank] = self.generation.transport.accept(self.members[rank], self._channel, soon)
                except NoConnection:
                    if self.generation.control.has_left(self.members[rank]):
                        raise watch.lost(self.members[rank]) from None
                    watch.wait((), ())

    def _connect(self, watch: OperationWait) -> None:
        """Complete the links, at the first call; with the core, hand them to it, and use memory that is shared."""
        self._await_links(watch)
        self._connected = True
        # All ranks must see this alike; they do, since they have agreed on who shares memory.
        families = [ranks for ranks in self._topology.hosts if len(ranks) > 1]
        shares = [self.generation.shares(self.members[rank]) for ranks in families for rank in ranks]
        self._plans.hosts_share = bool(shares) and all(shares) and not self._speaks_tls
        if self._plans.hosts_share and len(self._topology.hosts) == 1:
            self._plans.tile_bytes = native.SHARED_TILE_BYTES
            self._held_back = HELD_BACK if self.generation.transport.cores < 2 else 0.0
        generation, shared = self.generation, self.generation.shared
        if not self.is_native:
            return
        executor = NativeExecutor(self._call, self.size, cast(Descriptor, generation.failure.alarm))
        for rank, link in self._links.items():
            executor.connect(rank, self.members[rank], link)  # type: ignore[arg-type]
        if shared is not None and self.shares_memory:
            arenas = {rank: shared.peers[world] for rank, world in enumerate(self.members) if world in shared.peers}
            executor.share(shared.own, arenas)
        self._executor = executor
        awake_for = AWAKE if generation.transport.cores >= 1 else 0.0
        turns, ring = cast(Any, self._turns), cast(Any, self.calls.ring)  # the core's, since it is available
        self.fast_path = FastPath(
            result_layouts(),
            native_core.native.FastPath(
                engine=executor.engine,
                turns=turns,
                calls=ring,
                size=self.size,
                resume=self._resume,
                complete_gather=self._complete_gather,
                wake=self._wake,
                subscribers=events.subscribers,
                library_paths=call_log.inside,
                spin_seconds=awake_for,
            ),
        )
        generation.failure.on_halt(self.fast_path.halt)

    # -- order --------------------------------------------------------------------------------------------------------

    def now(self, operation: Operation, timeout: float, site: Site) -> Any:
        """Run an operation on this thread, after everything that was called before it."""
        self._check_open(operation.name)  # before the lock: in a forked child nobody may be there to release it
        with self._turn:
            self._step_aside()
            ticket = self._turns.take()
            try:
                while self._turns.serving != ticket:
                    self._begin_all()
                    self._turn.wait()
            except BaseException as error:  # Ctrl-C: this call will not be made, but others may already wait for it
                self._skipped.add(ticket)
                self._pass_skipped()
                self._failure.interrupt(operation.name, error)
                raise
        try:
            return self._run(operation, timeout, site)
        finally:
            self._next()

    def later(self, operation: Operation, timeout: float, site: Site) -> Work:
        """Queue an operation for the progress thread."""
        self.check(operation.name)
        work = Work(operation.name, self._hurry)
        with self._turn:
            self._step_aside()
            body, due = partial(self._run, operation, timeout, site), time.monotonic() + self._held_back
            self._queue.append(_Queued(self._turns.take(), work, body, due))
            self._have_progress()
            if not self._held_back or len(self._queue) == 1:  # else it will look when the first of them is due
                self._turn.notify_all()
        return work

    def _have_progress(self) -> None:
        if self._progress is None:
            self._progress = threading.Thread(target=self._work, name="gradwire-progress", daemon=True)
            self._progress.start()

    def _step_aside(self) -> None:
        """If this is the progress thread, a callback makes a call, or waits for one: another has to take over."""
        if self._progress is not None and self._progress is threading.current_thread():
            self._progress = None
            if self._queue:
                self._have_progress()

    def _work(self) -> None:
        own = threading.current_thread()
        while True:
            with self._turn:
                while self._progress is own and (pause := self._pause()) != 0:
                    if self.closed and not self._queue:
                        return
                    self._turn.wait(pause)
                if self._progress is not own:
                    return
                queued = self._queue.popleft()
            self._do(queued.work, partial(queued.body, beside=True))
            del queued  # the last reference may be ours: an error that nobody waits for is logged now

    def _pause(self) -> float | None:
        """Seconds until the progress thread has something to do; None: until it is told."""
        if not self._is_next_queued():
            return None
        first = self._queue[0]
        held_back = self._held_back and not self.closed and first.ticket >= self._wanted
        return max(0.0, first.due - time.monotonic()) if held_back else 0.0

    def _is_next_queued(self) -> bool:
        return bool(self._queue) and self._turns.serving == self._queue[0].ticket

    def _begin_all(self) -> None:
        """With the lock held: hold back nothing of what is queued by now."""
        if self._queue and self._wanted < self._turns.issued:
            self._wanted = self._turns.issued
            self._turn.notify_all()

    def _hurry(self, work: Work, here: bool) -> None:
        """Somebody waits for this work. What is queued up to it is done here, where nobody has begun it: to wake
        another thread takes longer than most calls. Otherwise it is no longer held back."""
        if self._failure.inherited:  # nobody may be there to release the lock
            self._failure.check(work.operation)
        with self._turn:
            self._step_aside()
        while here and not work.done and (queued := self._next_queued()) is not None:
            self._do(queued.work, queued.body)
            error = queued.work._error
            if error is not None and not isinstance(error, Exception):  # Ctrl-C, meant for this thread
                queued.work.heed()
                raise error
        if not work.done:
            with self._turn:
                self._begin_all()

    def _next_queued(self) -> _Queued | None:
        with self._turn:
            return self._queue.popleft() if self._is_next_queued() else None

    def _do(self, work: Work, body: Callable[[], Any]) -> None:
        went_well = work.run(body, first_error=not self._failed)
        self._failed = self._failed or not went_well
        self._next()
        work.call_back()

    def _next(self) -> None:
        with self._turn:
            self._turns.pass_on()
            self._pass_skipped()

    def _wake(self) -> None:
        """The core has passed a turn on."""
        with self._turn:
            self._pass_skipped()

    def _pass_skipped(self) -> None:
        turns = self._turns
        while turns.serving in self._skipped:
            self._skipped.remove(turns.serving)
            turns.pass_on()
        if turns.issued != turns.serving or self.closed:
            self._turn.notify_all()

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
        self.generation.transport.touch()
        cores = self.generation.transport.cores
        self._awake_for = (AWAKE_BESIDE if cores >= 2 else 0.0) if beside else (AWAKE if cores >= 1 else 0.0)
        step = _Step(self, operation.name, timeout, site)
        try:
            if events.watched():
                with events.operation(operation.name, rank=self.rank, group=self.calls.group):
                    return operation.body(step)
            return operation.body(step)
        except (Broken, Closed):
            raise
        except BaseException as error:
            # Whatever it was, this rank stopped in the middle of something that others still wait for.
            self._failure.interrupt(operation.name, error)
            raise

    # -- one schedule -------------------------------------------------------------------------------------------------

    def exchange(
        self, shape: Shape, x: Array, out: Array, form: CallKey | None, name: str, timeout: float, site: Site
    ) -> None:
        if not self._connected:
            self._connect(OperationWait(self._failure, self.calls, name, self.calls.sequence + 1, timeout))
        known = self._plans.find(shape)
        plan = known or self._plans.make(shape)
        if x.size < plan.in_count or out.size < plan.out_count:  # the core would read and write beyond their ends
            raise InvalidSize(
                f"{name} of {x.size} elements into {out.size}: {plan.in_count} and {plan.out_count} needed"
            )
        sequence = self.calls.record(plan.description, site)
        if not self.generation.control.sound:
            self.generation.control.called(time.monotonic())
            self.check(name)
        call = self._call
        call.sequence = sequence
        call.fingerprint = plan.description.fingerprint
        waits = partial(OperationWait, self._failure, self.calls, name, sequence, timeout)
        self._executor.run(plan, x, out, call, waits, self._awake_for)
        self.calls.finished = sequence
        if known is None and form is not None:
            self.fast_path.add_plan(*form, plan)

    def _resume(self, status: Any, operation: str, sequence: int) -> None:
        """Continue a call of the fast path that is not done yet; `status` is the core's."""
        assert isinstance(self._executor, NativeExecutor)
        try:
            self._executor.finish(status, OperationWait(self._failure, self.calls, operation, sequence, self.timeout))
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

    def disagree(self, name: str, timeout: float, reason: str) -> GradwireError:
        sequence = self.calls.sequence
        self.generation.control.report(disagreement(self.calls, sequence, reason), time.monotonic())
        self.generation.service.wake()
        return OperationWait(self._failure, self.calls, name, sequence, timeout).broken()

    def close(self) -> None:
        """End this group's links and thread; the generation goes on."""
        if self._failure.inherited:  # a forked child has neither, and nobody may be there to release the lock
            self.closed = self.calls.closed = True
            return
        with self._turn:
            if self.closed:
                return
            self.closed = self.calls.closed = True
            self._turn.notify_all()
        self.generation.control.unwatch(self.calls)
        for link in list(self._links.values()):
            link.close()
        self.fast_path.halt()
        self._failure.forget_halt(self.fast_path.halt)
        self.fast_path = NO_FAST_PATH  # it refers to this runner
        if isinstance(self._executor, NativeExecutor):
            self._executor.close(lambda: self._turns.issued == self._turns.serving)
        # Those of higher ranks that nobody has taken yet, or that come later, must see the end too.
        self.generation.transport.adopt(self._channel, lambda link: link.close())


class _Step:
    """The `Exchange` that one operation runs with."""

    __slots__ = ("_name", "_runner", "_site", "_timeout", "rank", "size")

    def __init__(self, runner: CollectiveRunner, name: str, timeout: float, site: Site) -> None:
        self.rank = runner.rank
        self.size = runner.size
        self._runner = runner
        self._name = name
        self._timeout = timeout
        self._site = site

    def __call__(self, shape: Shape, x: Array, out: Array, form: CallKey | None = None) -> None:
        self._runner.exchange(shape, x, out, form, self._name, self._timeout, self._site)

    def disagree(self, reason: str) -> GradwireError:
        return self._runner.disagree(self._name, self._timeout, reason)
