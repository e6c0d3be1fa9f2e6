"""Run collectives of simulated ranks: real schedules, plans and the reference executor, over simulated links."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from gradwire.arrays import Array, DType, dtype_of
from gradwire.collectives import build
from gradwire.executors.plan import Plan, even_bounds, ragged_bounds
from gradwire.executors.python import CallHeader, PythonExecutor
from gradwire.generation.failure_path import ANSWER_SECONDS
from gradwire.group import WORLD
from gradwire.liveness.call_log import CallDescription, CallLog, call_site
from gradwire.liveness.control_protocol import ControlProtocol, Event, Found, Lost, Missed, Tick, Watched
from gradwire.liveness.verdict import disagreement
from gradwire.membership import Assembly
from gradwire.simulate.network import End
from gradwire.simulate.process import Process, Program
from gradwire.topology import Topology
from gradwire.wire import WireError, fingerprint, parse

JOB = 4711
SITE = call_site()


class LinkEnded(Exception):
    """A data link ended while this rank waited for data from it; `peer` is the rank at its other end."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.peer = peer


class Disagreed(Exception):
    """A rank sent a message that belongs to another call."""


class Collectives:
    """The collectives of one rank in one generation. It is also the wait strategy of its executor."""

    def __init__(
        self,
        process: Process,
        control: ControlProtocol,
        handle: Callable[[Event], None],
        assembly: Assembly,
        links: Mapping[int, End],
    ) -> None:
        """`handle` passes an event to the control protocol, and performs the instructions that it returns."""
        self._process = process
        self._control = control
        self._handle = handle
        self._rank = assembly.rank
        self._topology = Topology.of([member.host for member in assembly.members])
        self._calls = CallLog(WORLD, range(len(assembly.members)))
        self._executor = PythonExecutor(links.__getitem__)
        self._call = CallHeader(JOB, assembly.generation, WORLD, assembly.rank)
        handle(Watched(self._calls))

    def run(self, collective: str, algorithm: str, x: Array, out: Array, op: str | None = None) -> Program:
        """Run a collective. Raises the same errors as a real group, after the verdict has settled."""
        yield from self.check(collective)
        plan = _plan(collective, algorithm, self._rank, self._topology, dtype_of(x), op, x.size)
        sequence = self._calls.record(plan.description, SITE)
        self._call.sequence, self._call.fingerprint = sequence, plan.description.fingerprint
        try:
            broken = False
            for _ in self._executor.steps(plan, x, out, self._call, self):
                if broken:
                    yield from self.check(collective)
                broken = not self._control.intact  # one more step first: data that has already arrived is still used
                if not broken:
                    yield None
        except LinkEnded as ended:
            yield from self.find_out(ended.peer, collective)
        except Disagreed:
            yield from self.check(collective)
        self._calls.finished = sequence

    def check(self, operation: str) -> Program:
        """Raise the error of a broken generation, after its verdict is decided. Do nothing if it is not broken."""
        if self._control.intact:
            return
        while not self._control.decided:
            self._handle(Tick())
            yield 0.01
        raise self._control.error(operation, f" during {operation}")

    def find_out(self, peer: int, operation: str) -> Program:
        """Raise the error behind an ended link: wait for the peer's control link to explain it, else report it lost."""
        deadline = self._process.now + ANSWER_SECONDS
        while self._control.intact and not self._control.has_left(peer) and self._process.now < deadline:
            yield 0.01
        if self._control.intact:
            self._handle(Missed(peer))
            self._handle(Lost(peer))
        yield from self.check(operation)

    # -- called by the executor ---------------------------------------------------------------------------------------

    def lost(self, peer: int) -> BaseException:
        return LinkEnded(peer)

    def mismatch(self, peer: int, header: bytes) -> BaseException:
        try:
            sequence = min(self._call.sequence, max(1, parse(header).sequence))
            self._handle(Found(disagreement(self._calls, sequence)))
        except WireError:
            self._handle(Lost(peer, "sent invalid data"))
        return Disagreed()

    def wait(self, reads: object, writes: object) -> None:
        raise NotImplementedError("a simulated rank waits by yielding")

    def poll(self) -> float:
        raise NotImplementedError("a simulated rank waits by yielding")


@lru_cache(maxsize=4096)
def _plan(
    collective: str, algorithm: str, rank: int, topology: Topology, dtype: DType, op: str | None, count: int
) -> Plan:
    schedule = build(collective, algorithm, topology.size, topology=topology)
    if collective == "all_gather":
        bounds = ragged_bounds([count] * topology.size)
    else:
        bounds = even_bounds(count, schedule.segments, dtype.itemsize)
    what = f"{collective}({dtype.name}[{count}], op={op!r}, algorithm={algorithm!r})"
    return Plan(schedule, rank, dtype, op, bounds, CallDescription(collective, what, fingerprint(what)))
