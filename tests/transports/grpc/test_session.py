"""An HTTP/2 session with its gRPC streams, without sockets: limits of what a peer may send, and valid ends."""

from __future__ import annotations

import struct

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ResponseReceived, StreamEnded

from gradwire.transports.grpc.session import MESSAGE_BYTES, PATH, STREAM_WINDOW, Session, SessionError, StreamState

GOAWAY = 7


def exchange(one: Session, two: Session) -> list[StreamState]:
    """Pass all bytes between two sessions, and return the streams that were opened."""
    opened: list[StreamState] = []
    while True:
        sent = one.output(), two.output()
        if not any(sent):
            return opened
        opened += two.receive(sent[0])
        opened += one.receive(sent[1])


def connected() -> tuple[Session, StreamState, Session, StreamState]:
    client, server = Session(client=True), Session(client=False)
    mine = client.open("host:1", "http")
    (theirs,) = exchange(client, server)
    return client, mine, server, theirs


def test_session_streams_carry_bytes_both_ways_and_end() -> None:
    client, mine, server, theirs = connected()
    client.send(mine, b"hello")
    client.send(mine, b"")
    server.send(theirs, bytes(MESSAGE_BYTES))
    exchange(client, server)
    assert theirs.arrived == b"hello"
    assert mine.arrived == bytes(MESSAGE_BYTES)
    client.end(mine)
    exchange(client, server)
    assert theirs.received_end
    assert not mine.received_end
    server.end(theirs)
    exchange(client, server)
    assert mine.received_end
    assert mine.reason is None
    assert not client.streams
    assert not server.streams


def test_session_end_of_the_server_ends_both_sides() -> None:
    client, mine, server, theirs = connected()
    server.send(theirs, b"last words")
    server.end(theirs)
    exchange(client, server)
    assert (bytes(mine.arrived), mine.received_end, mine.reason) == (b"last words", True, None)
    client.end(mine)  # no error
    assert not client.streams


def test_session_room_ends_while_the_reader_consumes_nothing_and_returns_when_it_does() -> None:
    client, mine, server, theirs = connected()
    sent = 0
    while room := client.room(mine):
        client.send(mine, bytes(room))
        sent += room
        exchange(client, server)
        assert sent <= STREAM_WINDOW
    assert len(theirs.arrived) == sent
    server.consumed(theirs, sent)
    exchange(client, server)
    assert client.room(mine) == MESSAGE_BYTES


def test_session_full_stream_leaves_room_on_other_streams() -> None:
    client, first, server, _ = connected()
    for _ in range(20):  # together more than the window of the connection
        second = client.open("host:1", "http")
        exchange(client, server)
        while room := client.room(second):
            client.send(second, bytes(room))
            exchange(client, server)
    assert client.room(first) == MESSAGE_BYTES


def other_client(path: str) -> H2Connection:
    """Return a client that has called a method."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    names = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "host:1")]
    client.send_headers(1, [*names, ("content-type", "application/grpc")])
    return client


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        (struct.pack(">BI", 0, MESSAGE_BYTES + 1), "a message of 262145 bytes, and at most 262144 are allowed"),
        (struct.pack(">BI", 1, 5), "a compressed message"),
    ],
)
def test_session_message_that_is_too_large_or_compressed_is_refused_before_its_payload(
    prefix: bytes, reason: str
) -> None:
    server, client = Session(client=False), other_client(PATH)
    client.send_data(1, prefix)
    with pytest.raises(SessionError, match=reason):
        server.receive(client.data_to_send())


def test_session_answers_other_methods_with_unimplemented() -> None:
    server, client = Session(client=False), other_client("/other/Method")
    assert server.receive(client.data_to_send()) == []
    events = client.receive_data(server.output())
    (response,) = [event for event in events if isinstance(event, ResponseReceived)]
    assert (b"grpc-status", b"12") in (response.headers or [])
    assert any(isinstance(event, StreamEnded) for event in events)
    assert not server.streams


def goaway(last: int, code: int, text: bytes = b"") -> bytes:
    body = struct.pack(">II", last, code) + text
    return len(body).to_bytes(3, "big") + bytes([GOAWAY, 0]) + bytes(4) + body


def test_session_of_a_proxy_that_restarts_continues_its_streams() -> None:
    client, mine, server, theirs = connected()
    assert client.receive(goaway(mine.number, 0)) == []
    server.send(theirs, b"still here")
    exchange(client, server)
    assert mine.arrived == b"still here"


@pytest.mark.parametrize(("last", "code", "final"), [(0, 0, False), (1, 2, False), (1, 12, True)])
def test_session_ended_by_the_peer_raises_its_reason(last: int, code: int, final: bool) -> None:
    client, _, _, _ = connected()
    with pytest.raises(SessionError, match=r"no \N{REPLACEMENT CHARACTER} room \(reply not authenticated\)") as caught:
        client.receive(goaway(last, code, b"no \x1b room"))
    assert caught.value.final is final


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x16\x03\x01\x02\x00", "not HTTP/2 but TLS: this rank was given no certificates"),
        (b"GET / HTTP/1.1\r\n", "the received bytes are not HTTP/2$"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 9, "a frame of 16777215 bytes"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), r"does not use valid HTTP/2"),
    ],
)
def test_session_invalid_bytes_are_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(SessionError, match=reason):
        Session(client=False).receive(data)


def test_session_of_a_proxy_without_a_target_reports_its_status() -> None:
    client, server = Session(client=True), H2Connection(H2Configuration(client_side=False))
    mine = client.open("host:1", "http")
    server.initiate_connection()
    server.receive_data(client.output())
    server.send_headers(mine.number, [(":status", "503"), ("content-type", "text/plain")], end_stream=True)
    client.receive(server.data_to_send())
    assert mine.received_end
    assert mine.reason == "HTTP status 503"
