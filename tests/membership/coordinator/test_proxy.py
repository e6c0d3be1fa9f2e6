"""Tests of the coordinator's proxy over real sockets: unauthenticated clients cannot exhaust what members need."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import select
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from gradwire.errors import TransportError
from gradwire.membership import Assembly, Member
from gradwire.membership.client.grpc_socket import CallFailed, Connection
from gradwire.membership.client.launcher_heartbeats import Heartbeats
from gradwire.membership.client.requests import heartbeat, register, serving, unregister
from gradwire.membership.coordinator.connection_limits import Limits
from gradwire.membership.coordinator.proxy import ConnectionProxy
from gradwire.membership.coordinator.proxy_sockets import DescriptorLimit
from gradwire.membership.coordinator.service import Coordinator
from gradwire.membership.endpoints import Endpoint, split
from gradwire.membership.sealing import WorkerSeal
from gradwire.membership.types import News
from gradwire.membership.v1 import gradwire_pb2 as pb
from support import tls_files
from support.captured_log import CapturedLog
from support.membership_claims import SECRET
from support.membership_strangers import Attack, begin_calls, closed, connect

Serve = Callable[..., Coordinator]


def member(name: str) -> Member:
    return Member(name, None, "machine", "host", os.getpid(), "127.0.0.1:1")


def assemble(address: str, names: Sequence[str], generation: int = 0, run_id: bytes = b"") -> list[Assembly]:
    """Register these members at the same time."""

    def one(name: str) -> Assembly:
        options = {"generation": generation, "run": run_id}
        return register(address, member(name), size=None, secret=SECRET, job=None, timeout=60.0, **options)  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(one, names))


@pytest.fixture
def launcher() -> Iterator[Callable[..., queue.SimpleQueue[News]]]:
    """Starts heartbeats of hosts, and returns a queue of the news that they receive."""
    with contextlib.ExitStack() as ending:

        def start(address: str, names: str) -> queue.SimpleQueue[News]:
            news: queue.SimpleQueue[News] = queue.SimpleQueue()
            beats = Heartbeats(address, names, secret=SECRET, on_news=news.put, interval=0.02)
            beats.start()
            ending.callback(beats.close)
            return news

        yield start


def hello(sock: socket.socket) -> tuple[Connection, WorkerSeal]:
    """Complete a first call on this connection."""
    connection, seal = Connection(sock, "x", 1000), WorkerSeal(SECRET)
    seal.accept_hello(pb.HelloReply.FromString(connection.call("Hello", seal.hello().SerializeToString(), 30.0)))
    return connection, seal


def readable(sock: socket.socket, seconds: float = 0.0) -> bool:
    """Return whether there are bytes to read, or the connection has ended."""
    return bool(select.select([sock], [], [], seconds)[0])


# -- unauthenticated clients


def test_coordinator_attacked_by_calls_without_a_body_serves_its_members(
    serve: Serve, launcher: Callable[..., queue.SimpleQueue[News]], captured: CapturedLog
) -> None:
    coordinator = serve(3, minimum=1, maximum=3)
    before = launcher(coordinator.address, "")
    before.get(timeout=30)
    with Attack(coordinator.address, connections=170, calls=8):
        first = assemble(coordinator.address, "abc")
        assert [found.generation for found in first] == [1, 1, 1]
        during = launcher(coordinator.address, "abc")
        assert during.get(timeout=30).generation == 1
        assert unregister(coordinator.address, first[0].members[0], secret=SECRET, timeout=30.0)
        others = [one.id for one in first[0].members[1:]]
        second = assemble(coordinator.address, others, 1, coordinator.run)
        assert [found.generation for found in second] == [2, 2]
        assert heartbeat(coordinator.address, others, secret=SECRET, timeout=30.0).evicted == ()
        assert serving(coordinator.address, secret=SECRET, timeout=30.0)
        while during.get(timeout=30).generation < 2:
            pass
        while before.get(timeout=30).generation < 2:
            pass
    assert captured.count("heartbeats of this host do not reach the coordinator") == 0


def test_calls_without_a_body_end_with_their_connection(serve: Serve, captured: CapturedLog) -> None:
    coordinator = serve(1, limits=Limits(seconds_to_prove=0.1))
    with begin_calls(coordinator.address, 8) as client:
        assert closed(client)
    captured.wait_for("closed connections to the coordinator: 1 did not prove the job's secret in time")


def test_unproven_silent_connection_is_closed(serve: Serve, captured: CapturedLog) -> None:
    coordinator = serve(1, limits=Limits(seconds_to_prove=0.1))
    with connect(coordinator.address) as client:
        assert closed(client)
    captured.wait_for("1 did not prove the job's secret in time; 1 of them came from 127.0.0.1")


def test_tls_handshake_that_does_not_end_is_closed(serve: Serve, captured: CapturedLog) -> None:
    coordinator = serve(1, credentials=tls_files.credentials("m0"), limits=Limits(seconds_to_prove=0.1))
    with connect(coordinator.address) as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")  # the beginning of a ClientHello
        assert closed(client)
    captured.wait_for("1 did not prove the job's secret in time")


def test_connection_with_a_recorded_hello_is_closed(serve: Serve, captured: CapturedLog) -> None:
    """A hello can be recorded and sent again, so it does not make a connection proven."""
    coordinator = serve(1, limits=Limits(seconds_to_prove=0.3))
    with connect(coordinator.address) as client:
        hello(client)
        assert closed(client)
    captured.wait_for("1 did not prove the job's secret in time")


def test_connection_beyond_the_limit_of_its_source_replaces_the_oldest(serve: Serve) -> None:
    coordinator = serve(1, limits=Limits(unauthenticated_per_source=2, seconds_to_prove=60.0))
    with connect(coordinator.address) as first, connect(coordinator.address) as second:
        hello(second)  # so that both have been accepted
        with connect(coordinator.address) as third:
            assert closed(first)
            hello(third)
            assert not readable(second)


def test_more_callers_than_the_limit_of_unproven_ones_are_served_in_turn(serve: Serve) -> None:
    limits = Limits(unproven=1, seconds_to_prove=60.0, seconds_to_prove_when_full=60.0)
    coordinator = serve(12, minimum=1, maximum=12, limits=limits)
    assert {found.generation for found in assemble(coordinator.address, "abcdefghijkl")} == {1}


def test_unproven_connection_loses_its_place_at_the_server_when_others_wait(
    serve: Serve, captured: CapturedLog
) -> None:
    limits = Limits(unproven=1, seconds_to_prove=60.0, seconds_to_prove_when_full=0.01)
    coordinator = serve(1, limits=limits)
    with begin_calls(coordinator.address, 8) as client:
        assert client.recv(1), "it is connected to the server"
        with connect(coordinator.address) as member:
            hello(member)
        client.close()  # it is parked, but its end must be noticed
    assert serving(coordinator.address, secret=SECRET)


def test_proven_connection_without_further_proofs_is_closed(serve: Serve, captured: CapturedLog) -> None:
    coordinator = serve(1, limits=Limits(seconds_to_prove=60.0, seconds_between_proofs=0.1))
    with connect(coordinator.address) as member:
        connection, seal = hello(member)
        connection.call("Heartbeat", seal.seal("Heartbeat", b"").SerializeToString(), 30.0)
        assert closed(member)
    assert captured.count("closed connections") == 0


# -- what the proxy must not change


def test_log_names_the_address_of_the_client(serve: Serve, captured: CapturedLog) -> None:
    coordinator = serve(1)
    with connect(coordinator.address) as sock:
        with pytest.raises(CallFailed, match="UNAUTHENTICATED"):
            Connection(sock, "x", 1000).call("Heartbeat", pb.Sealed(body=b"x").SerializeToString(), 30.0)
        host, port = sock.getsockname()
    captured.wait_for(f"refused a call from {host}:{port}: the caller does not hold this job's secret")


def test_log_names_the_address_of_a_client_by_ipv6(serve: Serve, captured: CapturedLog) -> None:
    try:
        coordinator = serve(1, host="::1")
    except TransportError:
        pytest.skip("this machine has no IPv6")
    with connect(coordinator.address) as sock:
        with pytest.raises(CallFailed, match="UNAUTHENTICATED"):
            Connection(sock, "x", 1000).call("Heartbeat", pb.Sealed(body=b"x").SerializeToString(), 30.0)
        port = sock.getsockname()[1]
    captured.wait_for(rf"refused a call from \[::1\]:{port}: ")


def test_coordinator_leaves_no_file_while_it_serves(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("long-" * 30)  # longer than the path of a Unix socket may be
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    coordinator = serve(1)
    assert list(deep.iterdir()) == []
    assert serving(coordinator.address, secret=SECRET)


def test_coordinator_without_a_folder_for_temporary_files_raises(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(TransportError, match="needs a folder for temporary files"):
        serve(1)


def test_stopped_coordinator_closes_its_connections_although_a_forked_child_lives(serve: Serve) -> None:
    coordinator = serve(1)
    with connect(coordinator.address) as client:
        hello(client)
        theirs, ours = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            os.read(theirs, 1)
            os._exit(0)
        os.close(theirs)
        try:
            coordinator.stop(grace=0.0)
            assert closed(client)
            with socket.create_server(split(coordinator.address)):
                pass
        finally:
            os.close(ours)
            os.waitpid(child, 0)


MANY = bytes(range(256)) * (32 << 10)  # 8 MiB: more than all socket buffers between the two ends


@pytest.fixture
def passage() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two sockets, the client's and the server's, with a proxy between them."""
    front = ConnectionProxy(Endpoint("127.0.0.1", 0), Limits())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(front.inner.removeprefix("unix:"))
        listener.listen()
        front.start()
        with socket.create_connection(("127.0.0.1", front.port), timeout=30.0) as client:
            server, _ = listener.accept()
            with server:
                server.settimeout(30.0)
                yield client, server
    front.close()


def test_bytes_for_a_slow_server_all_arrive(passage: tuple[socket.socket, socket.socket]) -> None:
    client, server = passage
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client.sendall, MANY)
        assert not wait([sending], timeout=0.1).done, "the proxy buffers only a few bytes"
        assert received(server, len(MANY)) == MANY
        sending.result(30)


def test_bytes_for_a_slow_client_all_arrive_although_the_server_has_ended(
    passage: tuple[socket.socket, socket.socket],
) -> None:
    client, server = passage
    sent = 0
    while select.select([], [server], [], 0.1)[1]:
        sent += server.send(MANY[sent : sent + 4096])
    server.close()
    assert 0 < sent < len(MANY), "the proxy buffers only a few bytes"
    assert received(client, len(MANY)) == MANY[:sent]


def test_server_connection_ends_when_its_client_disconnects(passage: tuple[socket.socket, socket.socket]) -> None:
    client, server = passage
    client.sendall(b"last words")
    client.close()
    assert received(server, 100) == b"last words"


def received(sock: socket.socket, most: int) -> bytes:
    """Receive up to `most` bytes, until the connection ends."""
    data = bytearray()
    while len(data) < most and (part := sock.recv(1 << 16)):
        data += part
    return bytes(data)


def test_proxy_without_descriptors_pauses_and_continues(captured: CapturedLog) -> None:
    front = ConnectionProxy(Endpoint("127.0.0.1", 0), Limits())
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as ending:
        listener.bind(front.inner.removeprefix("unix:"))
        listener.listen()
        front.start()
        ending.callback(front.close)
        client = ending.enter_context(socket.socket())
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            client.connect(("127.0.0.1", front.port))
            captured.wait_for("the coordinator cannot accept connections for now: Too many open files")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        server = ending.enter_context(listener.accept()[0])
        client.sendall(b"x")
        assert server.recv(1) == b"x"


def test_few_descriptors_lower_the_limits_until_close() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        room = DescriptorLimit(Limits())
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limits = room.limits
        room.close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1000, hard)
        assert raised > 1000 or hard == 1000
        assert limits.unauthenticated + 3 * (limits.unproven + limits.proven) <= max(raised, 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
