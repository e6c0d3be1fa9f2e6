"""Fuzzes collectives: any bytes on a peer's socket, for both executors, and any entries in a neighbour's memory."""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fuzz.target import Target
from gradwire import arrays
from gradwire.collectives import build
from gradwire.executors.plan import Plan, even_bounds
from gradwire.executors.python import CallHeader, PythonExecutor
from gradwire.host import native_core
from gradwire.liveness.call_log import CallDescription
from gradwire.topology import Topology
from gradwire.transports.base import Buffer, Link, LinkClosed
from gradwire.transports.shm.arena import RESERVED, OwnArena

JOB, GENERATION, GROUP, SEQUENCE, FINGERPRINT = 0x1122, 1, 7, 3, 0xAB
COUNT = 300
TILE = 1024  # bytes; small, so that a collective has several tiles
SECONDS = 0.0005  # to wait for entries in memory that never come


class Lost(Exception):
    """The peer closed its link."""


class Mismatch(Exception):
    """The peer's header is of another call."""


class NoWaiting:
    """Never waits, because all input is there from the beginning."""

    def wait(self, reads: Iterable[Link], writes: Iterable[Link]) -> None:
        raise AssertionError("there is nothing to wait for")

    def poll(self) -> float:
        raise AssertionError("there is nothing to wait for")

    def lost(self, peer: int) -> BaseException:
        return Lost()

    def mismatch(self, peer: int, header: bytes) -> BaseException:
        return Mismatch(bytes(header))


class Line:
    """A link over a socket."""

    channel = 3

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.peer = peer
        self.sock = sock

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, buffers: Sequence[Buffer]) -> int:
        try:
            return self.sock.sendmsg(buffers[:100])
        except BlockingIOError:
            return 0
        except OSError:
            raise LinkClosed from None

    def receive(self, buffers: Sequence[memoryview]) -> int:
        try:
            got = self.sock.recvmsg_into(buffers[:100])[0]
        except BlockingIOError:
            return 0
        if not got:
            raise LinkClosed
        return got

    def close(self) -> None: ...


def call_header(rank: int) -> CallHeader:
    one = CallHeader(JOB, GENERATION, GROUP, rank)
    one.sequence, one.fingerprint = SEQUENCE, FINGERPRINT
    return one


def plan(rank: int, algorithm: str, count: int = COUNT, tile: int = TILE) -> Plan:
    schedule = build("all_reduce", algorithm, 2, topology=Topology.single(2), root=0)
    dtype = arrays.parse_dtype("int64")
    bounds = even_bounds(count, schedule.segments, dtype.itemsize)
    return Plan(schedule, rank, dtype, "sum", bounds, CallDescription("all_reduce", "all_reduce()", FINGERPRINT), tile)


def executed(kind: str, algorithm: str, data: bytes) -> tuple[str, bytes]:
    """Run a collective whose other rank sends `data` and nothing more.

    Return how it ends, and its result or the header of a mismatch.
    """
    mine, peer = socket.socketpair()
    alarm, wakeup = socket.socketpair()
    with mine, peer, alarm, wakeup:
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        mine.setblocking(False)
        line = Line(mine, 1)
        executor: Any = PythonExecutor({1: line}.__getitem__)
        if kind == "native":
            from gradwire.executors.native import NativeExecutor

            executor = NativeExecutor(call_header(0), 2, alarm)
            executor.connect(1, 1, line)
        x, out = np.arange(COUNT), np.zeros(COUNT, np.int64)
        try:
            executor.run(plan(0, algorithm), x, out, call_header(0), NoWaiting, False)
        except Lost:
            return "lost", b""
        except Mismatch as error:
            return "mismatch", error.args[0]
        return "done", out.tobytes()


def run_collective(data: bytes) -> bool:
    """The first byte selects the algorithm. The rest comes from the peer."""
    algorithm = ALGORITHMS[data[0] % len(ALGORITHMS)] if data else ALGORITHMS[0]
    outcome = executed("python", algorithm, data[1:])
    if native_core.available():
        assert executed("native", algorithm, data[1:]) == outcome
    return outcome[0] == "done"


def recorded(algorithm: str) -> bytes:
    """Return the bytes that rank 1 sends in a collective that succeeds."""
    mine, peer = socket.socketpair()
    record = bytearray()

    class Recorded(Line):
        def send(self, buffers: Sequence[Buffer]) -> int:
            sent = super().send(buffers)
            record.extend(b"".join(map(bytes, buffers))[:sent])
            return sent

    class Waiting(NoWaiting):
        def wait(self, reads: Iterable[Link], writes: Iterable[Link]) -> None: ...

    def run(rank: int, line: Line) -> None:
        executor = PythonExecutor({1 - rank: line}.__getitem__)
        executor.run(
            plan(rank, algorithm), np.arange(COUNT), np.zeros(COUNT, np.int64), call_header(rank), Waiting, False
        )

    with mine, peer:
        mine.setblocking(False)
        peer.setblocking(False)
        other = threading.Thread(target=run, args=(1, Recorded(peer, 0)))
        other.start()
        run(0, Line(mine, 1))
        other.join()
    return bytes(record)


# --- through memory

ENTRY = struct.Struct("<IHHIIQQQQ16s")  # native/memory.hpp: turn, round, place, tile, nbytes, sequence, …
LANE_ENTRIES = 128
LANE_BYTES = 64 + LANE_ENTRIES * ENTRY.size
SLOTS = 2048


def read_memory(data: bytes) -> bool:
    """Run a collective with a neighbour whose shared memory has any content.

    The first byte selects the collective. Two numbers of eight bytes follow: the claimed offset of the neighbour's
    region, and how much it claims to have read. The rest are entries of its lane, 64 bytes each.
    """
    from gradwire.executors.native import NativeExecutor

    own, neighbour = OwnArena(), OwnArena()
    mine, wire = socket.socketpair()
    alarm, wakeup = socket.socketpair()
    with mine, wire, alarm, wakeup:
        algorithm, count, inside = SHAPES[data[0] % len(SHAPES)] if data else SHAPES[0]
        region = int.from_bytes(data[1:9], "little") or RESERVED
        _write(neighbour, 16 * (GROUP % SLOTS), struct.pack("<QQ", GROUP, region))
        _write(neighbour, RESERVED + 64, data[17 : 17 + LANE_BYTES - 64])
        executor = NativeExecutor(call_header(0), 2, alarm)
        executor.connect(1, 1, mine)
        executor.share(own, {1: neighbour})
        _write(own, RESERVED + LANE_BYTES, data[9:17])
        guard = np.full(count + 2 * 64, 0x77, np.int64)
        x, out = np.zeros(count, np.int64), guard[64:-64]
        if inside:
            x, out = (own.array(count * 8).view(np.int64) for _ in range(2))
        x += 1
        program = _lowered(algorithm, count)
        status = executor.engine.run(program, x, out, SEQUENCE, FINGERPRINT, False, SECONDS)
        assert (guard[:64] == 0x77).all()
        assert (guard[-64:] == 0x77).all()
        assert (x == 1).all()
        return status.name == "DONE"


def _lowered(algorithm: str, count: int) -> Any:
    from gradwire.executors.native import SHARED_TILE_BYTES, lower

    return lower(plan(0, algorithm, count, SHARED_TILE_BYTES))


def _write(arena: OwnArena, offset: int, data: bytes) -> None:
    ctypes.memmove(arena.address + offset, data, len(data))


def entry(
    turn: int, nbytes: int, *, tile: int = 0, round: int = 0, place: int = 1, at: int = 0, result: int = 0
) -> bytes:
    offset = at or RESERVED + 2 * LANE_BYTES
    return ENTRY.pack(turn, round, place, tile, nbytes, SEQUENCE, FINGERPRINT, offset, result, bytes(16))


ALGORITHMS = ("star", "ring", "direct", "oneshot")
SHAPES = (
    ("oneshot", 1, False),
    ("oneshot", 100, False),
    ("oneshot", 4000, True),
    ("direct", 300, False),
    ("direct", 2000, True),
)
_PLACES = st.one_of(st.integers(0, 3), st.integers(0, 0xFFFF))
_WIDE = st.one_of(
    st.just(0),
    st.sampled_from((RESERVED, RESERVED + 1, (64 << 30) - 8, 64 << 30, (1 << 64) - 1, (1 << 63))),
    st.integers(0, (1 << 64) - 1),
)
_ENTRIES = st.builds(
    entry,
    st.integers(0, 4),
    st.sampled_from((8, 8, 800, 1024, 600, 0, 16, 32000, (1 << 32) - 1)),
    tile=st.integers(0, 2),
    round=st.integers(0, 2),
    place=_PLACES,
    at=_WIDE,
    result=_WIDE,
)
_MEMORIES = st.builds(
    lambda shape, words, entries: bytes([shape]) + struct.pack("<QQ", *words) + b"".join(entries),
    st.integers(0, len(SHAPES) - 1),
    st.tuples(st.just(0) | _WIDE, st.integers(0, 5) | _WIDE),
    st.lists(_ENTRIES, max_size=5),
)
_HEAD = struct.pack("<QQ", 0, 1)
_IN_MEMORY = (
    Target(
        "memory of a neighbour",
        read_memory,
        (
            b"\0" + _HEAD + entry(1, 8, place=0),
            b"\1" + _HEAD + entry(1, 800),
            b"\2" + _HEAD + entry(1, 32000),
        ),
        inputs=_MEMORIES,
        examples=60,
    ),
)
_RECORDED = tuple(bytes([number]) + recorded(algorithm) for number, algorithm in enumerate(ALGORITHMS))
TARGETS = (
    Target(
        "socket of a peer",
        run_collective,
        _RECORDED,
        examples=60,
    ),
    *(_IN_MEMORY if native_core.available() else ()),
)
