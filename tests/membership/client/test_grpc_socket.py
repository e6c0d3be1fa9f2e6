"""Tests of gRPC calls on a plain socket: with gRPC's server, with other programs, and with forks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.membership.client.grpc_socket import CallFailed, Connection
from gradwire.membership.coordinator.service import Coordinator
from support.membership_claims import SECRET

LARGEST = 1 << 22


def same(request: bytes, context: Any) -> bytes:
    return request


def refused(request: bytes, context: Any) -> bytes:
    context.abort(grpc.StatusCode.PERMISSION_DENIED, "naïve, 100 %\n" + "x" * 5000)
    raise AssertionError("abort raises")


def never(request: bytes, context: Any) -> bytes:
    over = threading.Event()
    context.add_callback(over.set)
    over.wait(60)
    return b""


def one_by_one(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    for request in requests:
        if request == b"end":
            return
        if request == b"fail":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no more")
        yield request * 2


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[str, int]]:
    """A server made with gRPC, with methods for these tests."""
    methods = {
        "Same": grpc.unary_unary_rpc_method_handler(same),
        "Refused": grpc.unary_unary_rpc_method_handler(refused),
        "Never": grpc.unary_unary_rpc_method_handler(never),
        "OneByOne": grpc.stream_stream_rpc_method_handler(one_by_one),
    }
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", LARGEST)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield "127.0.0.1", port
    server.stop(None).wait()


@pytest.fixture
def connection(place: tuple[str, int]) -> Iterator[Connection]:
    made = Connection(socket.create_connection(place), "test", LARGEST)
    yield made
    made.close()


def code(call: Callable[[], object]) -> str:
    with pytest.raises(CallFailed) as caught:
        call()
    return caught.value.code


@pytest.mark.parametrize("size", [0, 1, 16384, 65535, 65536, 3_000_000])
def test_call_messages_of_any_size_arrive(size: int, connection: Connection) -> None:
    message = os.urandom(size)
    for _ in range(3):
        assert connection.call("Same", message, 30, service="test") == message


def test_call_failures_have_code_and_details(connection: Connection) -> None:
    with pytest.raises(CallFailed) as caught:
        connection.call("Refused", b"", 30, service="test")
    assert caught.value.code == "PERMISSION_DENIED"
    assert caught.value.details.startswith("naïve, 100 %\N{REPLACEMENT CHARACTER}xxx")
    assert len(caught.value.details) == 1000
    assert code(lambda: connection.call("Other", b"", 30, service="test")) == "UNIMPLEMENTED"
    assert connection.call("Same", b"still there", 30, service="test") == b"still there"
    assert code(lambda: connection.call("Never", b"", 0.1, service="test")) == "DEADLINE_EXCEEDED"


def test_call_with_a_reply_over_the_limit_fails(place: tuple[str, int]) -> None:
    connection = Connection(socket.create_connection(place), "test", 1000)
    assert code(lambda: connection.call("Same", bytes(2000), 30, service="test")) == "RESOURCE_EXHAUSTED"
    connection.close()


def test_stream_exchanges_messages_in_turn(connection: Connection) -> None:
    connection.begin_stream("OneByOne", service="test")
    for message in (b"a", b"", b"b" * 100_000):
        assert connection.ask(message, 30) == message * 2
    assert code(lambda: connection.ask(b"fail", 30)) == "UNAUTHENTICATED"
    connection.begin_stream("OneByOne", service="test")
    assert connection.ask(b"c", 30) == b"cc"
    assert code(lambda: connection.ask(b"end", 30)) == "UNAVAILABLE"


def test_call_in_progress_is_answered_while_the_server_stops() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(request: bytes, context: Any) -> bytes:
        begun.set()
        go_on.wait(30)
        return b"answered"

    server = grpc.server(ThreadPoolExecutor(2))
    handlers = {"Slow": grpc.unary_unary_rpc_method_handler(slow)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    connection = Connection(socket.create_connection(("127.0.0.1", port)), "test", LARGEST)

    def stop() -> None:
        begun.wait(30)
        stopped = server.stop(30)
        go_on.set()
        stopped.wait()

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert connection.call("Slow", b"", 30, service="test") == b"answered"
    assert code(lambda: connection.call("Slow", b"", 30, service="test")) == "UNAVAILABLE"
    connection.close()
    stopping.join()


def heard(data: bytes) -> str:
    """Return the error code of a call whose peer sends `data` and closes the connection."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        connection = Connection(ours, "test", 1000)
        try:
            return code(lambda: connection.call("Same", b"x", 30, service="test"))
        finally:
            connection.close()


@pytest.mark.parametrize(
    "data", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x46", b"\xff" * 50]
)
def test_connection_to_something_other_than_http2_fails(data: bytes) -> None:
    assert heard(data) == "UNAVAILABLE"


def answer(parts: list[tuple[str, bytes]]) -> bytes:
    """Return the bytes of a server that sends valid frames in any order, and invalid ones."""
    server = H2Connection(H2Configuration(client_side=False, validate_outbound_headers=False))
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "x")])
    server.initiate_connection()
    server.receive_data(client.data_to_send())
    sent = bytearray()
    for kind, data in parts:
        try:
            if kind == "headers":
                server.send_headers(1, [(":status", "200"), ("grpc-message", data.decode("latin-1"))])
            elif kind == "trailers":
                server.send_headers(1, [("grpc-status", data.decode("latin-1"))], end_stream=True)
            elif kind == "data":
                server.send_data(1, data)
            elif kind == "ping":
                server.ping(data[:8].ljust(8))
        except Exception:
            continue  # h2 refuses to send this frame
        sent += server.data_to_send()
        if kind == "noise":
            sent += data
    return bytes(sent)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_connection_any_bytes_raise_only_call_failed(data: bytes) -> None:
    heard(data)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["headers", "headers", "data", "trailers", "ping", "noise"]),
            st.one_of(
                st.binary(max_size=60), st.sampled_from([b"0", b"7", b"99", b"\0\0\0\0\1x", b"\0\xff\xff\xff\xff"])
            ),
        ),
        max_size=8,
    )
)
def test_connection_any_answer_returns_or_raises_call_failed(parts: list[tuple[str, bytes]]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(answer(parts))
        theirs.shutdown(socket.SHUT_WR)
        connection = Connection(ours, "test", 1000)
        try:
            assert len(connection.call("Same", b"x", 30, service="test")) <= 1000
        except CallFailed:
            pass
        finally:
            connection.close()


FORKS = """
import os, sys
from gradwire.membership import Member
from gradwire.membership.client.requests import register
from gradwire.membership.client.worker_lease import Lease
address, secret = sys.argv[1], sys.argv[2].encode()
me = Member("me", None, "machine", "host", os.getpid(), "127.0.0.1:1")
register(address, me, size=None, secret=secret, job=None, timeout=60)
assert "grpc" not in sys.modules
lease = Lease(address, "me", secret=secret, interval=0.0)
lease.start()
while lease.news is None:
    assert not lease.failure, lease.failure
for child in range(20):
    pid = os.fork()
    if pid == 0:
        lease.abandon()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
lease.close()
assert not lease.failure, lease.failure
"""


def test_fork_in_the_middle_of_calls_prints_nothing(serve: Callable[..., Coordinator]) -> None:
    coordinator = serve(1, minimum=1, maximum=1)
    done = subprocess.run(
        [sys.executable, "-c", FORKS, coordinator.address, SECRET.decode()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
