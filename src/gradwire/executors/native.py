"""The fast executor: the same plans, carried out by the native core without the interpreter.

Messages go over sockets in the common wire format, so native and pure ranks understand each other.
"""

from __future__ import annotations

import os
from typing import Any, Protocol, runtime_checkable

from gradwire.arrays import Array
from gradwire.collectives.schedule import Copy, Finish, Fold, From, Recv, Send, Slice
from gradwire.executors.core import PURE
from gradwire.executors.plan import Plan
from gradwire.executors.python import Patience, Sheet

try:
    from gradwire import _native
except ImportError:  # installed without a compiler
    _native = None  # type: ignore[assignment]

FIRST_SECONDS = 0.01  # how long the core waits before the deadline begins to count, and Ctrl-C is first looked for

_BUFFERS = {"in": 0, "out": 1, "acc": 2}
_OPS = {"sum": 0, "mean": 0, "min": 1, "max": 2, "prod": 3}
_DONE, _WAITING, _LOST, _MISMATCH, _ALARMED = range(5)


@runtime_checkable
class Descriptor(Protocol):
    """Something the core can poll."""

    def fileno(self) -> int: ...


def available() -> bool:
    """Whether the core is installed and wanted."""
    return _native is not None and os.environ.get(PURE, "") in ("", "0")


class NativeExecutor:
    """Runs one plan at a time over the links of one group."""

    def __init__(self, sheet: Sheet, size: int, alarm: Descriptor, spin: float) -> None:
        self._links = _native.Links(size, spin)
        self._links.alarm(alarm.fileno())
        self._sheet = _native.Sheet(sheet.job, sheet.generation, sheet.group, sheet.rank)
        self._world: dict[int, int] = {}

    def connect(self, rank: int, world: int, link: Descriptor) -> None:
        """Reach a rank of the group, known to others by its world rank, over a socket."""
        self._world[rank] = world
        self._links.socket(rank, link.fileno())

    def run(self, plan: Plan, x: Array, out: Array, sheet: Sheet, patience: Patience) -> None:
        """Carry the plan out: read x, leave the result in out (which may be x)."""
        program = plan.native or lower(plan)
        native = self._sheet
        native.sequence = sheet.sequence
        native.fingerprint = sheet.fingerprint
        run = _native.Run(program, self._links, native, x.ctypes.data, out.ctypes.data)
        status = run.advance(FIRST_SECONDS)
        while status != _DONE:
            if status == _LOST:
                raise patience.lost(self._world[run.culprit])
            if status == _MISMATCH:
                raise patience.mismatch(self._world[run.culprit], run.heard)
            status = run.advance(patience.look())


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
