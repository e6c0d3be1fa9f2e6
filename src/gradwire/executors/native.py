"""Implements the native executor, which runs plans in the C++ core without the interpreter.

Messages over sockets have the common wire format, so ranks with and without the core can work together. Ranks that
share memory exchange messages through lanes and staging (native/memory.hpp), in one region per rank and group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from gradwire.arrays import Array
from gradwire.collectives.schedule import Copy, Finish, Fold, From, Recv, Send, Slice
from gradwire.errors import InvalidSize
from gradwire.executors.plan import IN_FLIGHT, SMALLEST_TILE, TILE_BYTES, Plan
from gradwire.executors.python import CallHeader, WaitStrategy
from gradwire.host.native_core import native as _native
from gradwire.transports.shm.arena import Arena, OwnArena
from gradwire.wire import Kind

SHARED_TILE_BYTES = 256 << 10  # if all ranks share memory; chosen to fit the cache
FIRST_SECONDS = 0.01  # the core's first wait, without a deadline; Python then starts one and checks for Ctrl-C

_BUFFERS = {"in": "INPUT", "out": "OUTPUT", "acc": "ACCUMULATOR"}  # from the schedule's name to the core's


@runtime_checkable
class Descriptor(Protocol):
    """An object with a file descriptor that the core can poll."""

    def fileno(self) -> int: ...


class NativeExecutor:
    """Runs one plan at a time over the links of one group."""

    def __init__(self, call: CallHeader, size: int, alarm: Descriptor) -> None:
        self.engine = _native.Engine(
            message_kind=Kind.COLLECTIVE,
            job=call.job,
            generation=call.generation,
            group=call.group,
            rank=call.rank,
            size=size,
            alarm=alarm.fileno(),
        )
        self._size = size
        self._world: dict[int, int] = {}
        self._own: OwnArena | None = None
        self._region = (0, 0)
        self._program: _native.Program | None = None  # kept alive here: the engine refers to it without owning it

    def connect(self, rank: int, world: int, link: Descriptor) -> None:
        """Exchange messages with a rank of the group over a socket. Its world rank is `world`."""
        self._world[rank] = world
        self.engine.connect(rank, link.fileno())

    def share(self, own: OwnArena, arenas: dict[int, Arena]) -> None:
        """Exchange messages with these ranks through shared memory. Each rank writes to its own arena."""
        own.sweep()
        self._own = own
        staging = staging_bytes(self._size, SHARED_TILE_BYTES if len(arenas) + 1 == self._size else TILE_BYTES)
        nbytes = _native.Engine.region_bytes(self._size, staging)
        self._region = own.allocate(nbytes), nbytes
        if not self.engine.open(arena=own.address, nbytes=own.nbytes, region=self._region[0], staging=staging):
            raise InvalidSize("too many groups share memory: close some of them")
        for rank, arena in arenas.items():
            self.engine.map(rank, arena.address, arena.nbytes)

    @property
    def sent(self) -> int:
        """Bytes sent to peers so far."""
        return self.engine.sent

    def close(self, idle: Callable[[], bool]) -> None:
        """Free the region as soon as `idle()` is true and all peers have read their messages."""
        if self._own is not None:
            self._own.retire(*self._region, lambda: idle() and self.engine.withdraw())
            self._own = None

    def run(
        self,
        plan: Plan,
        x: Array,
        out: Array,
        call: CallHeader,
        wait_strategy: Callable[[], WaitStrategy],
        spin_seconds: float,
    ) -> None:
        """Run the plan: read x and write the result to out, which may be x."""
        self._program = program = plan.native or lower(plan)
        status = self.engine.run(program, x, out, call.sequence, call.fingerprint, spin_seconds, FIRST_SECONDS)
        if status is not _native.Status.DONE:
            self.finish(status, wait_strategy())

    def finish(self, status: _native.Status, waits: WaitStrategy) -> None:
        """Continue a plan that the core has begun, until it is done."""
        while status is not _native.Status.DONE:
            if status is _native.Status.LOST:
                raise waits.lost(self._world[self.engine.culprit])
            if status is _native.Status.MISMATCH:
                raise waits.mismatch(self._world[self.engine.culprit], self.engine.received_header)
            status = self.engine.advance(waits.poll())


def staging_bytes(size: int, tile_bytes: int) -> int:
    """Return the size of the staging memory. It must hold all messages of one wave, otherwise ranks would deadlock.

    The factor 2 is for partial results of 16-bit floats, which take twice the bytes of a tile.
    """
    return 2 * IN_FLIGHT * max(tile_bytes, size * SMALLEST_TILE)


def lower(plan: Plan) -> _native.Program:
    """Return the plan as a program of the core, and cache it in the plan."""
    segments = range(plan.schedule.segments)
    plan.native = program = _native.Program(
        rounds=[[_operation(operation) for operation in one] for one in plan.program],
        segments=_native.Segments(
            lengths=plan.lengths,
            in_offset=[plan.in_offset.get(segment, -1) for segment in segments],
            out_offset=[plan.out_offset.get(segment, -1) for segment in segments],
            scratch_index=[plan.scratch.get(segment, -1) for segment in segments],
        ),
        tiling=_native.Tiling(tile=plan.tile, tiles=plan.tiles, stride=plan.stride, in_flight=plan.in_flight),
        reduction=_reduction(plan),
        itemsize=plan.dtype.itemsize,
        out_count=plan.out_count,
        folds_last=plan.folds_last,
        one_shot=plan.schedule.one_shot and plan.tiles == 1 and plan.out_count > 0,
        mirrored=plan.schedule.mirrored,
    )
    return program


def _reduction(plan: Plan) -> _native.Reduction | None:
    """Return the reduction of a plan; None if it does not reduce. A mean is a sum that is divided at the end."""
    if plan.op is None:
        return None
    op = _native.ReduceOp["sum" if plan.op == "mean" else plan.op]
    return _native.Reduction(dtype=_native.DType[plan.dtype.name], op=op, divisor=plan.divisor or 0)


def _slice(part: Slice) -> _native.Slice:
    return _native.Slice(_native.Buffer[_BUFFERS[part.buffer]], part.first, part.count)


def _operation(operation: object) -> _native.Operation:
    match operation:
        case Send(part, to):
            return _native.Operation.send(_slice(part), to)
        case Recv(part, source):
            return _native.Operation.recv(_slice(part), source)
        case Fold(dst, terms):
            return _native.Operation.fold(_slice(dst), [_term(term) for term in terms])
        case Finish(dst, src):
            return _native.Operation.finish(_slice(dst), _slice(src))
        case Copy(dst, src):
            return _native.Operation.copy(_slice(dst), _slice(src))
    raise TypeError(f"{operation!r} is not an operation of a schedule")


def _term(term: Slice | From) -> _native.FoldTerm:
    if isinstance(term, From):
        return _native.FoldTerm.received(term.rank, term.partial)
    return _native.FoldTerm.local(_slice(term))
