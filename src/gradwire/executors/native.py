"""The fast executor: the same plans, carried out by the native core without the interpreter.

Messages go over sockets in the common wire format, so native and pure ranks understand each other; between ranks that
share memory they go through lanes and staging (native/memory.hpp), one region for each rank of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from gradwire.arrays import Array
from gradwire.collectives.schedule import Copy, Finish, Fold, From, Recv, Send, Slice
from gradwire.errors import InvalidSize
from gradwire.executors.plan import IN_FLIGHT, SMALLEST_TILE, TILE_BYTES, Plan
from gradwire.executors.python import CallHeader, Patience
from gradwire.host.native_core import native as _native
from gradwire.transports.shm.arena import Arena, OwnArena

SHARED_TILE_BYTES = 256 << 10  # where all ranks share memory: small enough to stay in the cache
FIRST_SECONDS = 0.01  # how long the core waits before the deadline begins to count, and Ctrl-C is first looked for

_BUFFERS = {"in": 0, "out": 1, "acc": 2}
_OPS = {"sum": 0, "mean": 0, "min": 1, "max": 2, "prod": 3}
_DONE, _WAITING, _LOST, _MISMATCH, _ALARMED = range(5)


@runtime_checkable
class Descriptor(Protocol):
    """Something the core can poll."""

    def fileno(self) -> int: ...


class NativeExecutor:
    """Runs one plan at a time over the links of one group."""

    def __init__(self, sheet: CallHeader, size: int, alarm: Descriptor) -> None:
        self.engine = _native.Engine(sheet.job, sheet.generation, sheet.group, sheet.rank, size, alarm.fileno())
        self._size = size
        self._world: dict[int, int] = {}
        self._own: OwnArena | None = None
        self._region = (0, 0)
        self._program: Any = None  # the core points at it

    def connect(self, rank: int, world: int, link: Descriptor) -> None:
        """Reach a rank of the group, known to others by its world rank, over a socket."""
        self._world[rank] = world
        self.engine.connect(rank, link.fileno())

    def share(self, own: OwnArena, arenas: dict[int, Arena]) -> None:
        """Reach these ranks through memory: this rank writes into its own arena, they into theirs."""
        own.sweep()
        self._own = own
        staging = staging_bytes(self._size, SHARED_TILE_BYTES if len(arenas) + 1 == self._size else TILE_BYTES)
        nbytes = _native.Engine.region_bytes(self._size, staging)
        self._region = own.carve(nbytes), nbytes
        if not self.engine.open(own.address, own.nbytes, self._region[0], staging):
            raise InvalidSize("too many groups share memory: close some of them")
        for rank, arena in arenas.items():
            self.engine.map(rank, arena.address, arena.nbytes)

    @property
    def sent(self) -> int:
        """Bytes that went to peers so far."""
        return self.engine.sent

    def close(self, idle: Callable[[], bool]) -> None:
        """Give memory back, once nothing runs here any more and all peers have read what is there for them."""
        if self._own is not None:
            self._own.retire(*self._region, lambda: idle() and self.engine.withdraw())
            self._own = None

    def run(
        self, plan: Plan, x: Array, out: Array, sheet: CallHeader, patience: Callable[[], Patience], awake_for: float
    ) -> None:
        """Carry the plan out: read x, leave the result in out (which may be x)."""
        self._program = plan.native or lower(plan)
        status = self.engine.run(self._program, x, out, sheet.sequence, sheet.fingerprint, awake_for, FIRST_SECONDS)
        if status != _DONE:
            self.finish(status, patience())

    def finish(self, status: int, patience: Patience) -> None:
        """Go on with a plan that the core has begun, until it is done."""
        while status != _DONE:
            if status == _LOST:
                raise patience.lost(self._world[self.engine.culprit])
            if status == _MISMATCH:
                raise patience.mismatch(self._world[self.engine.culprit], self.engine.heard)
            status = self.engine.advance(patience.look())


def staging_bytes(size: int, tile_bytes: int) -> int:
    """What the messages of one wave take, with room to spare, since they lie in one piece each; else ranks would wait
    for each other for ever. Partial results of half types take twice a tile's bytes."""
    return 2 * IN_FLIGHT * max(tile_bytes, size * SMALLEST_TILE)


def lower(plan: Plan) -> Any:
    """The plan in the core's terms; kept with it."""
    segments = range(plan.schedule.segments)
    plan.native = _native.Program(
        [tuple(_row(operation) for operation in one) for one in plan.program],
        list(plan.lengths),
        [plan.in_home.get(segment, -1) for segment in segments],
        [plan.out_home.get(segment, -1) for segment in segments],
        [plan.scratch.get(segment, -1) for segment in segments],
        plan.tile,
        plan.tiles,
        plan.stride,
        plan.in_flight,
        len(plan.scratch),
        plan.dtype.code,
        _OPS[plan.op] if plan.op else -1,
        plan.divisor or 0,
        plan.folds_last,
        plan.dtype.itemsize,
        plan.out_count,
        plan.schedule.one_shot and plan.tiles == 1 and plan.out_count > 0,
        plan.schedule.mirrored,
    )
    return plan.native


def _slice(part: Slice) -> tuple[int, int, int]:
    return _BUFFERS[part.buffer], part.first, part.count


def _row(operation: object) -> tuple[Any, ...]:
    match operation:
        case Send(part, to):
            return 0, _slice(part), None, list(to), ()
        case Recv(part, source):
            return 1, _slice(part), None, [source], ()
        case Fold(dst, terms):
            bound = tuple((term.rank, term.partial) if isinstance(term, From) else _slice(term) for term in terms)
            return 2, _slice(dst), None, [], bound
        case Finish(dst, src):
            return 3, _slice(dst), _slice(src), [], ()
        case Copy(dst, src):
            return 4, _slice(dst), _slice(src), [], ()
    raise TypeError(f"{operation!r} is no operation of a schedule")
