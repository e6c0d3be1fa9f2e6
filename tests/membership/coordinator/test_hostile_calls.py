"""Tests of hostile clients of a coordinator, and of other programs in place of a coordinator."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire.errors import NoConnection, Refused
from gradwire.membership import Member
from gradwire.membership.client.requests import register
from gradwire.membership.closed_listener import closing_reason_at
from gradwire.membership.coordinator import servicer
from gradwire.membership.coordinator.connection_limits import Limits
from gradwire.membership.coordinator.service import Coordinator
from gradwire.membership.endpoints import Endpoint
from gradwire.membership.sealing import CoordinatorSeal, WorkerSeal
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.membership.v1 import gradwire_pb2_grpc as rpc
from support.captured_log import CapturedLog
from support.membership_claims import SECRET

Serve = Callable[..., Coordinator]
ME = Member("me", 0, "machine", "host", 1, "127.0.0.1:1")


def join(address: str, timeout: float = 10.0) -> int:
    return register(address, ME, size=1, secret=SECRET, job=None, timeout=timeout).rank


@pytest.fixture
def stub(serve: Serve) -> Iterator[Any]:
    """A bare gRPC stub for a coordinator of one rank."""
    with grpc.insecure_channel(serve(1).address) as channel:
        yield rpc.MembershipStub(channel)  # type: ignore[no-untyped-call]


def status(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    code = caught.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


def test_call_without_proof_is_refused_and_logged(stub: Any, captured: CapturedLog) -> None:
    unproven = pb.HelloRequest(worker_nonce=bytes(32), proof=bytes(32))
    assert status(lambda: stub.Hello(unproven)) == grpc.StatusCode.UNAUTHENTICATED
    assert status(lambda: stub.RegisterWorker(pb.Sealed(body=b"x"))) == grpc.StatusCode.UNAUTHENTICATED
    assert status(lambda: stub.UnregisterWorker(pb.Sealed(body=b"x"))) == grpc.StatusCode.UNAUTHENTICATED
    captured.wait_for(r"refused a call from 127\.0\.0\.1:[0-9]+: the caller does not hold this job's secret", times=3)


def test_recorded_request_is_refused(stub: Any) -> None:
    seal = WorkerSeal(SECRET)
    seal.accept_hello(stub.Hello(seal.hello()))
    sealed = seal.seal("UnregisterWorker", b"")
    stub.UnregisterWorker(sealed)
    assert status(lambda: stub.UnregisterWorker(sealed)) == grpc.StatusCode.UNAUTHENTICATED


def test_request_to_an_earlier_coordinator_fails_precondition(stub: Any) -> None:
    seal = WorkerSeal(SECRET)
    seal.accept_hello(CoordinatorSeal(SECRET).answer_hello(seal.hello()))
    assert status(lambda: stub.RegisterWorker(seal.seal("RegisterWorker", b""))) == grpc.StatusCode.FAILED_PRECONDITION


def test_malformed_body_from_a_holder_of_the_secret_is_refused(stub: Any) -> None:
    seal = WorkerSeal(SECRET)
    seal.accept_hello(stub.Hello(seal.hello()))
    sealed = seal.seal("RegisterWorker", b"\xff\xff\xff")
    assert status(lambda: stub.RegisterWorker(sealed)) == grpc.StatusCode.INVALID_ARGUMENT


UNARY = ["RegisterWorker", "UnregisterWorker", "Heartbeat", "StartCheckpoint", "EndCheckpoint"]


@pytest.mark.parametrize("method", UNARY)
def test_call_is_accepted_only_if_proven_fresh_and_well_formed(method: str, stub: Any) -> None:
    call = getattr(stub, method)
    assert status(lambda: call(pb.Sealed(body=b"x"))) == grpc.StatusCode.UNAUTHENTICATED
    seal = WorkerSeal(SECRET)
    seal.accept_hello(stub.Hello(seal.hello()))
    for_another_method = seal.seal(next(other for other in UNARY if other != method), b"")
    assert status(lambda: call(for_another_method)) == grpc.StatusCode.UNAUTHENTICATED
    nonsense = seal.seal(method, b"\xff\xff\xff")
    assert status(lambda: call(nonsense)) == grpc.StatusCode.INVALID_ARGUMENT
    assert status(lambda: call(nonsense)) == grpc.StatusCode.UNAUTHENTICATED, "a request that was already received"
    forged = seal.seal(method, b"")
    forged.sequence += 1
    assert status(lambda: call(forged)) == grpc.StatusCode.UNAUTHENTICATED


def test_heartbeats_stream_proves_each_message(stub: Any) -> None:
    seal = WorkerSeal(SECRET)
    seal.accept_hello(stub.Hello(seal.hello()))
    first = seal.seal("Heartbeats", b"")
    replies = stub.Heartbeats(iter([first, first]))
    assert seal.open("Heartbeats", first, next(replies)) != b"", "no news in the reply"
    assert status(lambda: next(replies)) == grpc.StatusCode.UNAUTHENTICATED
    assert status(lambda: next(stub.Heartbeats(iter([pb.Sealed(body=b"x")])))) == grpc.StatusCode.UNAUTHENTICATED
    unary = seal.seal("Heartbeat", b"")
    assert status(lambda: next(stub.Heartbeats(iter([unary])))) == grpc.StatusCode.UNAUTHENTICATED


def test_heartbeats_stream_without_a_heartbeat_is_ended(serve: Serve) -> None:
    coordinator = serve(1, limits=Limits(seconds_between_heartbeats=0.0))
    never: queue.SimpleQueue[pb.Sealed | None] = queue.SimpleQueue()
    with grpc.insecure_channel(coordinator.address) as channel:
        stub = rpc.MembershipStub(channel)  # type: ignore[no-untyped-call]
        assert status(lambda: next(stub.Heartbeats(iter(never.get, None)))) == grpc.StatusCode.CANCELLED
        never.put(None)


def test_streams_without_proof_leave_room_for_workers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MOST_UNPROVEN_STREAMS", 2)
    coordinator = serve(1)
    never: queue.SimpleQueue[pb.Sealed | None] = queue.SimpleQueue()
    with grpc.insecure_channel(coordinator.address) as channel:
        stub = rpc.MembershipStub(channel)  # type: ignore[no-untyped-call]
        streams = [stub.Heartbeats(iter(never.get, None)) for _ in range(3)]
        codes: queue.SimpleQueue[grpc.StatusCode] = queue.SimpleQueue()
        for stream in streams:
            stream.add_done_callback(lambda call: codes.put(call.code()))
        assert codes.get(timeout=60) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert join(coordinator.address) == 0
        for stream in streams:
            stream.cancel()
            never.put(None)


def test_session_of_another_length_is_refused(stub: Any) -> None:
    seal = WorkerSeal(SECRET)
    seal.accept_hello(stub.Hello(seal.hello()))
    request = pb.RegisterWorkerRequest(session=b"short")
    sealed = seal.seal("RegisterWorker", request.SerializeToString())
    assert status(lambda: stub.RegisterWorker(sealed)) == grpc.StatusCode.INVALID_ARGUMENT


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.sampled_from(UNARY), body=st.binary(max_size=200))
def test_any_body_from_a_holder_of_the_secret_is_answered_or_refused(method: str, body: bytes, stub: Any) -> None:
    seal = WorkerSeal(SECRET)
    seal.accept_hello(stub.Hello(seal.hello()))
    sealed = seal.seal(method, body)
    codes = set()
    try:
        seal.open(method, sealed, getattr(stub, method)(sealed))
    except grpc.RpcError as error:
        codes.add(error.code())
    assert codes <= {grpc.StatusCode.INVALID_ARGUMENT}


def test_oversized_request_is_refused(stub: Any) -> None:
    assert status(lambda: stub.RegisterWorker(pb.Sealed(body=bytes(1 << 20)))) == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_random_bytes_on_the_port_do_not_affect_workers(serve: Serve) -> None:
    coordinator = serve(1)
    host, _, port = coordinator.address.rpartition(":")
    noise = [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + secrets.token_bytes(500),
        bytes(5000),
    ]
    sockets = []
    for data in noise * 5:
        sockets.append(socket.create_connection((host, int(port))))
        sockets[-1].sendall(data)
    assert join(coordinator.address) == 0
    for connection in sockets:
        connection.close()


class Impostor(rpc.MembershipServicer):
    """Serves in place of a coordinator, with or without the secret, and violates the protocol."""

    def __init__(self, hello: Callable[[pb.HelloRequest], pb.HelloReply]) -> None:
        self._hello = hello
        self.told: list[pb.Sealed] = []

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:  # noqa: N802
        return self._hello(request)

    def RegisterWorker(self, request: pb.Sealed, context: Any) -> pb.Sealed:  # noqa: N802
        self.told.append(request)
        return pb.Sealed(
            worker_nonce=request.worker_nonce,
            coordinator_nonce=request.coordinator_nonce,
            sequence=request.sequence,
            proof=request.proof,
        )


@pytest.fixture
def impose() -> Iterator[Callable[[Impostor | None], str]]:
    servers = []

    def start(impostor: Impostor | None) -> str:
        server = grpc.server(ThreadPoolExecutor(2))
        servers.append(server)
        if impostor is not None:
            rpc.add_MembershipServicer_to_server(impostor, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


def test_register_at_an_impostor_without_the_secret_reveals_nothing(impose: Callable[[Impostor | None], str]) -> None:
    impostor = Impostor(lambda request: pb.HelloReply(coordinator_nonce=bytes(32), proof=request.proof))
    with pytest.raises(Refused, match="does not hold this job's secret: check GRADWIRE_TOKEN"):
        join(impose(impostor))
    assert impostor.told == []


def test_register_with_a_forged_reply_is_refused(impose: Callable[[Impostor | None], str]) -> None:
    impostor = Impostor(CoordinatorSeal(SECRET).answer_hello)
    with pytest.raises(Refused, match="its reply is not authenticated"):
        join(impose(impostor))
    assert len(impostor.told) == 1


def test_register_at_another_grpc_service_raises_refused(impose: Callable[[Impostor | None], str]) -> None:
    with pytest.raises(Refused, match="is not a gradwire coordinator"):
        join(impose(None))


def test_register_at_a_program_without_grpc_raises_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_at_once() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=close_at_once, daemon=True).start()
        with pytest.raises(NoConnection, match="a program listens there, but"):
            join(f"127.0.0.1:{listener.getsockname()[1]}", timeout=0.5)
        listener.shutdown(socket.SHUT_RDWR)


def test_closing_reason_at_a_slow_sender_returns_in_time() -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as sock:
                for byte in b"gradwire: the rendezvous is over: " + b"x" * 200:
                    if over.wait(0.1):
                        break
                    sock.send(bytes([byte]))

        speaker = threading.Thread(target=drip)
        speaker.start()
        assert closing_reason_at(Endpoint("127.0.0.1", listener.getsockname()[1]), 0.3) is None
        assert speaker.is_alive(), "all bytes of the slow sender were read"
        over.set()
        speaker.join()
