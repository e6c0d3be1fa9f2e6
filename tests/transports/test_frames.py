"""Frames: any cut of a stream gives the same messages, and random bytes give an error, never a wrong message."""

from __future__ import annotations

import itertools
import threading
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.transports.base import Buffer, Link, LinkClosed
from gradwire.transports.frames import FrameReader, Outbox
from gradwire.wire import HEADER_BYTES, Header, Kind, WireError

LIMIT = 5000


class Wire:
    """A link that delivers bytes in given pieces, and accepts a given number of bytes in each send."""

    peer, channel = 1, 2

    def __init__(self, pieces: Sequence[bytes] = (), room: Sequence[int] = ()) -> None:
        self.incoming = [memoryview(piece) for piece in pieces if piece]
        self.room = list(room)
        self.taken = bytearray()
        self.closed = False

    def send(self, buffers: Sequence[Buffer]) -> int:
        if self.closed:
            raise LinkClosed
        data = b"".join(bytes(buffer) for buffer in buffers)
        allowed = self.room.pop(0) if self.room else len(data)
        self.taken += data[:allowed]
        return min(allowed, len(data))

    def receive(self, buffers: Sequence[memoryview]) -> int:
        if not self.incoming:
            if self.closed:
                raise LinkClosed
            return 0
        piece, (buffer, *_) = self.incoming[0], buffers
        part = min(len(piece), len(buffer))
        buffer[:part] = piece[:part]
        self.incoming[0] = piece[part:]
        if not self.incoming[0]:
            self.incoming.pop(0)
        return part

    def close(self) -> None:
        self.closed = True


class BoundedSink:
    """A sink that accepts payloads up to a limit."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, bytes]] = []

    def begin(self, link: Link, header: Header) -> memoryview:
        if header.nbytes > LIMIT:
            raise WireError(f"{header.nbytes} bytes")
        return memoryview(bytearray(header.nbytes)) if header.nbytes else memoryview(b"")

    def finish(self, link: Link, header: Header, payload: memoryview) -> None:
        self.messages.append((header.sequence, bytes(payload)))


def frame(sequence: int, payload: bytes) -> bytes:
    return Header(Kind.EAGER, 1, 1, 0, 1, sequence, 0, 0, 0, len(payload)).pack() + payload


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def read(pieces: Sequence[bytes], ahead: int = 256) -> list[tuple[int, bytes]]:
    taker = BoundedSink()
    reader = FrameReader(Wire(pieces), taker, threading.Lock(), ahead)
    while reader.pump():
        pass
    return taker.messages


@given(
    st.lists(st.binary(max_size=700), max_size=6),
    st.lists(st.integers(0, 10_000), max_size=30),
    st.sampled_from([HEADER_BYTES, 100, 4096]),
)
def test_frame_reader_reads_the_same_frames_however_the_stream_is_cut(
    payloads: list[bytes], places: list[int], ahead: int
) -> None:
    stream = b"".join(frame(number, payload) for number, payload in enumerate(payloads))
    assert read(cut(stream, places), ahead) == list(enumerate(payloads))


@given(st.lists(st.binary(max_size=700), min_size=1, max_size=6), st.sampled_from([HEADER_BYTES, 100, 4096]))
def test_frame_reader_more_is_false_only_when_all_was_read(payloads: list[bytes], ahead: int) -> None:
    """The wire delivers as much as there is room for in one read, like a socket."""
    stream = b"".join(frame(number, payload) for number, payload in enumerate(payloads))
    taker = BoundedSink()
    reader = FrameReader(Wire([stream]), taker, threading.Lock(), ahead)
    while reader.pump() and reader.more:
        pass
    assert taker.messages == list(enumerate(payloads))


@given(st.binary(min_size=HEADER_BYTES, max_size=400), st.lists(st.integers(0, 400), max_size=10))
def test_frame_reader_random_bytes_raise_an_error(noise: bytes, places: list[int]) -> None:
    with pytest.raises(WireError):
        read(cut(noise, places))


@given(st.binary(max_size=100), st.binary(min_size=HEADER_BYTES, max_size=300), st.lists(st.integers(0, 500)))
def test_frame_reader_invalid_bytes_after_a_message_do_not_affect_it(
    payload: bytes, noise: bytes, places: list[int]
) -> None:
    taker = BoundedSink()
    reader = FrameReader(Wire(cut(frame(1, payload) + noise, places)), taker, threading.Lock())
    with pytest.raises(WireError):
        while reader.pump():
            pass
    assert taker.messages == [(1, payload)]


def test_frame_reader_claim_of_8_gib_allocates_nothing() -> None:
    claim = Header(Kind.EAGER, 1, 1, 0, 1, 1, 0, 0, 0, 8 << 30).pack()
    tracemalloc.start()
    with pytest.raises(WireError):
        read([claim])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_frame_reader_reports_the_end_of_the_link_after_earlier_frames() -> None:
    taker, wire = BoundedSink(), Wire([frame(1, b"last words")])
    wire.close()
    reader = FrameReader(wire, taker, threading.Lock())
    with pytest.raises(LinkClosed):
        while True:
            reader.pump()
    assert taker.messages == [(1, b"last words")]


@pytest.mark.parametrize("filled", [0, 1, 1000, 4999])
def test_redirect_payload_arrives_in_the_new_memory(filled: int) -> None:
    old, new = memoryview(bytearray(LIMIT)), memoryview(bytearray(LIMIT))
    payload = bytes(range(250)) * 20

    class Redirected(BoundedSink):
        def begin(self, link: Link, header: Header) -> memoryview:
            return old

    taker, data = Redirected(), frame(1, payload)
    wire = Wire([data[: HEADER_BYTES + filled]])
    reader = FrameReader(wire, taker, threading.Lock(), 128)
    while reader.pump():
        pass
    reader.redirect(memoryview(bytearray(3)), memoryview(bytearray(3)))  # the memory of another message: no effect
    reader.redirect(old, new)
    left_behind = bytes(old)
    wire.incoming = [memoryview(data[HEADER_BYTES + filled :])]
    while reader.pump():
        pass
    assert taker.messages == [(1, payload)]
    assert bytes(new) == payload
    assert bytes(old) == left_behind


# -- going out --------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=10), st.lists(st.integers(0, 40), max_size=40))
def test_outbox_with_any_room_sends_messages_complete_and_in_order(messages: list[bytes], room: list[int]) -> None:
    wire = Wire(room=room)
    outbox = Outbox(wire)
    for message in messages:
        assert outbox.post(message) == outbox.waiting
    while not outbox.flush():
        assert outbox.waiting
    assert bytes(wire.taken) == b"".join(messages)
    assert not outbox.waiting
    assert not outbox.full


def test_outbox_held_link_is_not_written_to_by_others() -> None:
    wire = Wire()
    outbox = Outbox(wire)
    assert outbox.hold()
    assert not outbox.hold()
    assert outbox.post(b"later")
    assert not outbox.waiting, "nothing may be flushed while the link is held"
    assert not outbox.flush()
    assert not wire.taken
    outbox.release()
    assert outbox.waiting
    assert outbox.flush()
    assert bytes(wire.taken) == b"later"


def test_outbox_hold_waits_for_a_half_sent_message() -> None:
    wire = Wire(room=[3, 0])
    outbox = Outbox(wire)
    assert outbox.post(b"message")
    assert not outbox.hold(), "holding the link now would split the message"
    assert outbox.hold()
    assert bytes(wire.taken) == b"message"


def test_outbox_with_too_many_waiting_bytes_is_full() -> None:
    outbox = Outbox(Wire(room=[0] * 1000))
    outbox.post(bytes(Outbox.MAX_WAITING))
    assert not outbox.full
    outbox.post(b"!")
    assert outbox.full
