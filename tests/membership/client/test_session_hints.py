"""Tests of other programs at the port of a stopped coordinator.

Members to which the coordinator has proved the secret wait for it. Newcomers get an error.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import gradwire as gw
from gradwire.errors import NoConnection, Refused
from gradwire.membership import Member
from gradwire.membership.client.launcher_heartbeats import Heartbeats
from gradwire.membership.client.requests import register, start_checkpoint
from gradwire.membership.client.worker_lease import Lease
from gradwire.membership.coordinator.service import Coordinator
from gradwire.membership.sealing import CoordinatorSeal, WorkerSeal
from gradwire.membership.types import News
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.membership.v1 import gradwire_pb2_grpc as rpc
from gradwire.security import tokens
from support import tls_files
from support.captured_log import CapturedLog
from support.membership_claims import SECRET

Serve = Callable[..., Coordinator]
LONG = 30.0
ME = Member("me", None, "machine", "host", os.getpid(), "127.0.0.1:1")


class Speaker:
    """Sends a line to each client, at once or after the client has sent something, and closes the connection."""

    def __init__(self, port: int, line: bytes, *, unasked: bool = False) -> None:
        self.served = threading.Semaphore(0)
        self._line, self._unasked = line, unasked
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                sock.settimeout(LONG)
                if not self._unasked:
                    sock.recv(1 << 16)
                sock.sendall(self._line)
            self.served.release()


class Statuses(rpc.MembershipServicer):
    """Another gRPC server, which ends every call with the same status."""

    def __init__(self, port: int, code: grpc.StatusCode, *, hello: Callable[[Any], Any] | None = None) -> None:
        self.served = threading.Semaphore(0)
        self._code, self._hello = code, hello
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        rpc.add_MembershipServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()

    def Hello(self, request: pb.HelloRequest, context: Any) -> Any:  # noqa: N802
        return self._hello(request) if self._hello is not None else self._end(context)

    def RegisterWorker(self, request: pb.Sealed, context: Any) -> Any:  # noqa: N802
        self._end(context)

    StartCheckpoint = Heartbeat = RegisterWorker

    def Heartbeats(self, requests: Iterator[pb.Sealed], context: Any) -> Any:  # noqa: N802
        next(requests)
        self._end(context)
        yield

    def _end(self, context: Any) -> None:
        self.served.release()
        context.abort(self._code, "go away")


TLS_ALERT = bytes.fromhex("15030100020228")
HTTP_ERROR = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
IMPOSTORS: dict[str, Callable[[int], Any]] = {
    "closed_listener": lambda port: Speaker(port, b"gradwire: the rendezvous is over: all have come\n", unasked=True),
    "alert": lambda port: Speaker(port, TLS_ALERT),
    "http": lambda port: Speaker(port, HTTP_ERROR),
    "unauthenticated": lambda port: Statuses(port, grpc.StatusCode.UNAUTHENTICATED),
    "denied": lambda port: Statuses(port, grpc.StatusCode.PERMISSION_DENIED),
    "unimplemented": lambda port: Statuses(port, grpc.StatusCode.UNIMPLEMENTED),
    "invalid": lambda port: Statuses(port, grpc.StatusCode.INVALID_ARGUMENT),
    "unproven": lambda port: Statuses(
        port, grpc.StatusCode.INTERNAL, hello=lambda request: pb.HelloReply(coordinator_nonce=bytes(32))
    ),
}


@pytest.fixture(params=list(IMPOSTORS))
def impostor(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Any]]:
    """Starts another program at a port."""
    with contextlib.ExitStack() as stack:

        def start(port: int) -> Any:
            made = IMPOSTORS[request.param](port)
            stack.callback(made.close)
            return made

        yield start


def port_of(coordinator: Coordinator) -> int:
    return int(coordinator.address.rpartition(":")[2])


def asking(address: str, seal: WorkerSeal, generation: int, timeout: float = LONG, **options: Any) -> Future[int]:
    """Register in a thread, and return the next generation as a future."""
    result: Future[int] = Future()

    def run() -> None:
        try:
            found = register(
                address,
                ME,
                size=None,
                job=None,
                timeout=timeout,
                generation=generation,
                seal=seal,
                **{"secret": SECRET, **options},
            )
            result.set_result(found.generation)
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def test_member_meeting_an_impostor_waits_for_its_coordinator(
    impostor: Callable[[int], Any], serve: Serve, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"minimum": 1, "maximum": 2, "journal": tmp_path / "journal"}
    first = serve(1, **options)
    seal, port = WorkerSeal(SECRET), port_of(first)
    assert asking(first.address, seal, 0).result(LONG) == 1
    first.stop(grace=0.0)
    other = impostor(port)
    again = asking(first.address, seal, 1, run=first.run)
    for _ in range(2):
        assert other.served.acquire(timeout=LONG)
    assert not again.done(), again.exception(0)
    other.close()
    serve(1, port=port, **options)
    assert again.result(LONG) == 2


@pytest.mark.parametrize("impostor", ["closed_listener", "unauthenticated", "denied"], indirect=True)
def test_newcomer_waiting_for_the_first_generation_ignores_an_impostor(
    impostor: Callable[[int], Any], serve: Serve, captured: CapturedLog
) -> None:
    """The coordinator has proved the secret to it with its first reply."""
    first = serve(2, minimum=1, maximum=2)
    waiting = asking(first.address, WorkerSeal(SECRET), 0)
    captured.wait_for("has registered")
    port = port_of(first)
    first.cut_off()
    other = impostor(port)
    for _ in range(2):
        assert other.served.acquire(timeout=LONG)
    assert not waiting.done(), waiting.exception(0)
    other.close()
    serve(1, port=port, minimum=1, maximum=2)
    assert waiting.result(LONG) == 1


def test_member_at_its_deadline_quotes_the_impostors_answer() -> None:
    seal = WorkerSeal(SECRET)
    seal.accept_hello(CoordinatorSeal(SECRET).answer_hello(seal.hello()))
    speaker = Speaker(0, b"")
    address = f"127.0.0.1:{speaker.port}"
    speaker.close()
    denying = Statuses(speaker.port, grpc.StatusCode.PERMISSION_DENIED)
    try:
        with pytest.raises(
            NoConnection, match=r"an unauthenticated answer from there: .* refused this worker: go away"
        ) as caught:
            asking(address, seal, 1, timeout=0.5).result(LONG)
        assert not isinstance(caught.value, Refused)
    finally:
        denying.close()


@pytest.mark.parametrize("impostor", ["closed_listener", "unauthenticated", "denied", "unproven"], indirect=True)
def test_newcomer_at_an_impostor_is_refused_at_once(impostor: Callable[[int], Any], serve: Serve) -> None:
    coordinator = serve(1)
    coordinator.stop(grace=0.0)
    impostor(port_of(coordinator))
    with pytest.raises(Refused):
        asking(coordinator.address, WorkerSeal(SECRET), 0).result(LONG)


def test_member_accepts_a_refusal_over_a_proven_connection(serve: Serve, captured: CapturedLog) -> None:
    """Its first call is refused without a proof, so it sends Hello and asks again."""
    coordinator = serve(1, minimum=1, maximum=2, job="mine")
    invitation = tokens.read(tokens.make(SECRET, job="mine", expires_in=60, uses=0))
    seal = WorkerSeal(invitation)
    assert asking(coordinator.address, seal, 0, secret=invitation).result(LONG) == 1
    with pytest.raises(Refused, match="somebody did not join with the caller's join token"):
        start_checkpoint(coordinator.address, "somebody", 1, secret=invitation, seal=seal, timeout=LONG)
    assert captured.count("somebody did not join with the caller's join token") == 2


def test_member_under_tls_waits_for_its_coordinator(serve: Serve, tmp_path: Path) -> None:
    """It ignores another program, and another member's process, at the coordinator's port."""
    options: dict[str, Any] = {"minimum": 1, "maximum": 2, "journal": tmp_path / "journal"}
    mine = tls_files.credentials("m1")
    seal, member = WorkerSeal(SECRET), Member("m1", None, "machine", "host", os.getpid(), "127.0.0.1:1")
    first = serve(1, credentials=tls_files.credentials("m0"), **options)
    facts: dict[str, Any] = {"size": None, "job": None, "timeout": LONG, "seal": seal, "credentials": mine}
    assert register(first.address, member, secret=SECRET, **facts).generation == 1
    port = port_of(first)
    first.stop(grace=0.0)
    speaker = Speaker(port, HTTP_ERROR)
    result: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            result.put(register(first.address, member, secret=SECRET, generation=1, run=first.run, **facts).generation)
        except BaseException as error:
            result.put(error)

    threading.Thread(target=ask, daemon=True).start()
    for _ in range(2):
        assert speaker.served.acquire(timeout=LONG)
    speaker.close()
    thief = serve(1, port=port, credentials=tls_files.credentials("m3"))
    with pytest.raises(queue.Empty):
        result.get(timeout=0.2)
    thief.stop(grace=0.0)
    serve(1, port=port, credentials=tls_files.credentials("m0"), **options)
    assert result.get(timeout=LONG) == 2


@pytest.mark.parametrize("impostor", ["closed_listener", "denied"], indirect=True)
def test_worker_node_at_an_impostor_waits_for_its_coordinator(
    impostor: Callable[[int], Any], serve: Serve, tmp_path: Path
) -> None:
    """The node registers again and takes part in a checkpoint."""
    options: dict[str, Any] = {"minimum": 1, "maximum": 2, "journal": tmp_path / "journal"}
    coordinator = serve(1, **options)
    port = port_of(coordinator)
    with gw.WorkerNode(coordinator.address, "me", secret=SECRET, timeout=LONG) as node:
        node.start_checkpoint(1)
        for act in (node.rejoin, lambda: node.end_checkpoint(1)):
            coordinator.stop(grace=0.0)
            other = impostor(port)
            with ThreadPoolExecutor(1) as pool:
                acting = pool.submit(act)
                for _ in range(2):
                    assert other.served.acquire(timeout=LONG)
                other.close()
                coordinator = serve(1, port=port, **options)
                acting.result(LONG)
        assert node.generation == 2


@pytest.mark.parametrize("impostor", ["closed_listener", "http", "denied", "unproven"], indirect=True)
@pytest.mark.parametrize("kind", [Heartbeats, Lease])
def test_heartbeats_at_an_impostor_continue(
    kind: type[Heartbeats] | type[Lease], impostor: Callable[[int], Any], serve: Serve, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"minimum": 1, "maximum": 2, "journal": tmp_path / "journal"}
    first = serve(1, **options)
    assert asking(first.address, WorkerSeal(SECRET), 0).result(LONG) == 1
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    facts: dict[str, Any] = {"secret": SECRET, "on_news": told.put, "interval": 0.01}
    beats = Heartbeats(first.address, ["me"], **facts) if kind is Heartbeats else Lease(first.address, "me", **facts)
    beats.start()
    try:
        assert told.get(timeout=LONG).generation == 1
        port = port_of(first)
        first.stop(grace=0.0)
        other = impostor(port)
        for _ in range(3):
            assert other.served.acquire(timeout=LONG)
        other.close()
        while not told.empty():
            told.get()
        serve(1, port=port, **options)
        assert told.get(timeout=LONG).evicted == ()
    finally:
        beats.close()


def test_host_that_does_not_answer_is_reported_as_timed_out() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)),  # the queue is full: the kernel ignores the next one
            pytest.raises(NoConnection, match=r"connecting to 127\.0\.0\.1:[0-9]+: timed out"),
        ):
            register(f"127.0.0.1:{port}", ME, size=1, secret=SECRET, job=None, timeout=1.0)
