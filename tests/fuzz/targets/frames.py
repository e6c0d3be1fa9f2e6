"""Fuzzes headers and frames, which every link parses first."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from fuzz.target import Target
from gradwire.liveness.call_log import CallDescription, CallLog, call_site
from gradwire.liveness.control import Control, ControlSink
from gradwire.liveness.heartbeat_messages import HeartbeatSink
from gradwire.liveness.lifeline import READ_AHEAD
from gradwire.liveness.verdict import CALLS_SECONDS
from gradwire.transports.base import Buffer, Link, LinkClosed
from gradwire.transports.frames import FrameReader
from gradwire.wire import HEADER_BYTES, Header, Kind, WireError, parse

JOB, GENERATION, GROUP = 0x1122334455667788, 1, 7
SIZE = 3  # ranks; this process is rank 0
CALLS = (
    CallDescription("all_reduce", "all_reduce(float32[4], op='sum')", 0xAB),
    CallDescription("broadcast", "broadcast(float32[4], root=0)", 0xCD, ("w: float32[4]", "b: float32[1]")),
)


class Stream:
    """A link with received bytes, on which no more arrive."""

    channel = 1

    def __init__(self, data: bytes, piece: int = 1 << 20, peer: int = 1) -> None:
        self.peer = peer
        self._rest = memoryview(data)
        self._piece = piece

    def send(self, buffers: Sequence[Buffer]) -> int:
        return sum(map(len, buffers))

    def receive(self, buffers: Sequence[memoryview]) -> int:
        if not self._rest:
            raise LinkClosed
        part = min(len(self._rest), len(buffers[0]), self._piece)
        buffers[0][:part] = self._rest[:part]
        self._rest = self._rest[part:]
        return part

    def close(self) -> None: ...


class Bystander:
    """A rank's side of the control protocol with some calls in its log. It counts the bytes that it sends."""

    def __init__(self) -> None:
        self.sent = 0
        self.control = Control(0, [f"rank {n}" for n in range(SIZE)], GENERATION, self._post, lambda: None)
        self.calls = CallLog(GROUP, range(SIZE))
        self.control.watch(self.calls)
        for meaning in CALLS:
            self.calls.record(meaning, call_site())
        self._began = time.monotonic()

    def _post(self, peer: int, payload: bytes) -> None:
        assert 0 <= peer < SIZE
        assert peer != self.control.rank
        self.sent += len(payload)

    def settle(self, received: int) -> None:
        """Check that there is a printable verdict or no failure at all, after any `received` bytes."""
        for seconds in (0, 1, 2, 2 * CALLS_SECONDS):
            assert self.control.tick(self._began + seconds) >= 0
        assert self.control.intact or self.control.decided
        if self.control.decided:
            text = str(self.control.error("all_reduce", " during all_reduce #1"))
            assert len(text) <= 20_000 + 8 * received, "the error is too long"
        assert self.sent <= 20_000 + 16 * received, "too many bytes were sent in reply"


def check(header: Header) -> None:
    if (header.job, header.generation) != (JOB, GENERATION):
        raise WireError("a header of another job")


def header(kind: int, nbytes: int = 0, **fields: int) -> bytes:
    known = {"group": GROUP, "sequence": 1, "fingerprint": 0, "tile": 0, "round": 0, "source": 1}
    return Header(kind=kind, job=JOB, generation=GENERATION, nbytes=nbytes, **(known | fields)).pack()


def read_header(data: bytes) -> bool:
    try:
        found = parse(data)
    except WireError:
        return False
    assert parse(found.pack()) == found
    assert found.pack()[:5] == data[:5]
    assert found.pack()[8:] == data[8:]
    return True


def read_control_stream(data: bytes) -> bool:
    """Read a control link on which bytes arrive in pieces of a size that the first byte gives."""
    bystander = Bystander()
    link: Link = Stream(data[1:], piece=data[0] + 1 if data else 1)
    reader = FrameReader(link, ControlSink(bystander.control, check), threading.Lock(), 4096)
    valid = True
    try:
        while reader.pump():
            pass
    except LinkClosed:
        pass
    except ValueError:  # includes WireError
        valid = False
    bystander.settle(len(data))
    return valid


def read_beats(data: bytes) -> bool:
    """Read the heartbeats on a lifeline."""
    sink = HeartbeatSink(check)
    sink.detector.watch(1, 0.0, 0.2)
    reader = FrameReader(Stream(data), sink, threading.Lock(), READ_AHEAD)
    try:
        while reader.pump():
            sink.now += 0.05
    except LinkClosed:
        pass
    except WireError:
        return False
    assert sink.detector.silence(1, sink.now) is not None
    return True


def _frame(payload: bytes) -> bytes:
    return header(Kind.CONTROL, len(payload)) + payload


_FRAMES = (b'{"t":"bye"}', b'{"t":"where","g":7}', b'{"t":"at","g":7,"s":1,"c":5}')
TARGETS = (
    Target("header", read_header, tuple(header(kind, 8) for kind in Kind)),
    Target(
        "control stream",
        read_control_stream,
        (bytes([HEADER_BYTES]) + _frame(_FRAMES[0]), b"\xff" + b"".join(map(_frame, _FRAMES))),
    ),
    Target("heartbeats", read_beats, (header(Kind.BEAT), header(Kind.BEAT) * 3)),
)
