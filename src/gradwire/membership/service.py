"""The coordinator: the rendezvous behind gRPC, embedded in rank 0 or in a launcher.

A worker's RegisterWorker call is held back until there is news or its patience ends, and the worker asks again. A held
call occupies a thread, so only `_HELD` of them are; further workers are told when to ask again instead. That way a job
of any size needs a bounded number of threads, and a usual one hears of the last arrival at once.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NoReturn, Self
from urllib.parse import unquote

from gradwire.errors import ConfigError, TransportError
from gradwire.membership.addresses import Endpoint, join, resolve
from gradwire.membership.members import Member
from gradwire.membership.messages import Malformed, member_from_wire, outcome_to_wire, parse
from gradwire.membership.quiet import grpc
from gradwire.membership.sealing import CoordinatorSeal, Stale, Unproven
from gradwire.membership.state import Claim, Outcome, Refusal, Rendezvous, Waiting
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.membership.v1 import gradwire_pb2_grpc as rpc
from gradwire.security.admission import NO_SECRET

log = logging.getLogger("gradwire.membership")

_HELD = 64  # calls held back at a time, each by a thread
_THREADS = _HELD + 16
_LONGEST_HOLD = 1.0  # seconds
_PAUSE_PER_WAITING = 0.002  # seconds between two questions of a worker that is not held, times those that wait
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a busy port is an error, not a port shared with somebody else's job
    ("grpc.max_receive_message_length", 16 * 1024),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.server_handshake_timeout_ms", 10_000),
]


class Coordinator:
    """Serves the rendezvous of one job of `size` at `host`:`port`; port 0 takes a free one."""

    def __init__(
        self, host: str, port: int, *, size: int, secret: bytes, job: str | None = None, insecure: bool = False
    ) -> None:
        self._host, self._port = host, port
        self._insecure = insecure
        self._desk = _Desk(
            Rendezvous(size, job or secrets.token_hex(8), secrets.token_bytes(16)), CoordinatorSeal(secret)
        )
        self._server: Any = None
        self._pid = 0

    @property
    def address(self) -> str:
        """Where it can be reached: "host:port", or "[host]:port" for an IPv6 address."""
        return join(self._host, self._port)

    @property
    def job(self) -> str:
        """The job's name, made up if none was given."""
        return self._desk.rendezvous.job

    def start(self) -> None:
        """Listen; returns when workers can register."""
        endpoint = resolve(self._host, self._port)[0]
        if not endpoint.loopback and not self._insecure:
            raise ConfigError(
                f"a coordinator at {self.address} could be reached from other machines, and it does not encrypt: "
                "listen on 127.0.0.1, or pass insecure=True (GRADWIRE_INSECURE=1) in a network that you trust"
            )
        _check_free(endpoint, self.address)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="gradwire-coordinator")
        server = grpc.server(self._pool, options=_OPTIONS, maximum_concurrent_rpcs=1024)
        rpc.add_MembershipServicer_to_server(self._desk, server)  # type: ignore[no-untyped-call]
        try:
            self._port = server.add_insecure_port(str(endpoint))
        except RuntimeError as error:
            raise TransportError(f"cannot listen at {self.address}: {error}") from error
        server.start()
        self._server, self._pid = server, os.getpid()

    def stop(self, grace: float = 5.0) -> None:
        """Stop listening, when all who wait have been told how it ended (at most `grace` seconds). Idempotent."""
        server, self._server = self._server, None
        if server is None or self._pid != os.getpid():  # a forked child must not touch its parent's server
            return
        self._desk.close(grace)
        server.stop(grace=1.0).wait()
        self._pool.shutdown()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Desk(rpc.MembershipServicer):
    """Answers the calls; each method runs in a thread of the server's pool."""

    def __init__(self, rendezvous: Rendezvous, seal: CoordinatorSeal) -> None:
        self.rendezvous = rendezvous
        self._seal = seal
        self._lock = threading.Lock()
        self._told = threading.Condition(self._lock)
        self._held: set[_Held] = set()

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:  # noqa: N802
        try:
            return self._seal.meet(request)
        except Unproven:
            _abort(context, grpc.StatusCode.UNAUTHENTICATED, f"the caller {NO_SECRET}")

    def RegisterWorker(self, request: pb.Sealed, context: Any) -> pb.Sealed:  # noqa: N802
        body = self._open("RegisterWorker", pb.RegisterWorkerRequest, request, context)
        member = member_from_wire(body.member)
        claim = Claim(member, body.size, body.job or None, request.worker_nonce, request.sequence)
        outcome, again_after = self._answer(claim, body.patience_ms / 1000, context)
        if isinstance(outcome, Refusal):
            log.warning("refused %s at %s: %s", member, _peer(context), outcome.reason)
        reply = outcome_to_wire(outcome, again_after)
        return self._seal.seal("RegisterWorker", request, reply.SerializeToString())

    def UnregisterWorker(self, request: pb.Sealed, context: Any) -> pb.Sealed:  # noqa: N802
        body = self._open("UnregisterWorker", pb.UnregisterWorkerRequest, request, context)
        with self._lock:
            known = self.rendezvous.unregister(member_from_wire(body.member))
            self._told.notify_all()
        reply = pb.UnregisterWorkerReply(known=known)
        return self._seal.seal("UnregisterWorker", request, reply.SerializeToString())

    def close(self, grace: float) -> None:
        """Refuse whoever still waits, and return when all have been told, or after `grace` seconds."""
        deadline = time.monotonic() + grace
        with self._lock:
            self.rendezvous.stop("the coordinator was stopped before all ranks had come")
            self._wake()
            while (left := deadline - time.monotonic()) > 0 and self.rendezvous.uninformed(time.monotonic()):
                self._told.wait(min(left, 0.1))

    def _open(self, method: str, kind: Any, request: pb.Sealed, context: Any) -> Any:
        try:
            with self._lock:
                body = self._seal.open(method, request)
            return parse(kind, body)
        except Unproven:
            _abort(context, grpc.StatusCode.UNAUTHENTICATED, f"the caller {NO_SECRET}")
        except Stale:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, "the coordinator was started anew; say hello again")
        except Malformed as error:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _answer(self, claim: Claim, patience: float, context: Any) -> tuple[Outcome, float]:
        """The answer to a claim, held back while it is only `Waiting`, and after which time to ask again."""
        held = _Held()
        with self._lock:
            outcome = self._claim(claim, context)
            if not isinstance(outcome, Waiting):
                self._told.notify_all()
                return outcome, 0.0
            if len(self._held) >= _HELD:
                arrived = self.rendezvous.size - len(outcome.missing)
                return outcome, min(1.0, _PAUSE_PER_WAITING * arrived)
            self._held.add(held)
        if not context.add_callback(held.cut_off):
            held.cut_off()
        held.wait(min(patience, _LONGEST_HOLD))
        with self._lock:
            self._held.discard(held)
            if held.gone:
                self._withdraw(claim, context)
            outcome = self.rendezvous.outcome(claim)
            self._told.notify_all()
        return outcome, 0.0

    def _claim(self, claim: Claim, context: Any) -> Outcome:
        known, before = self.rendezvous.knows(claim.member), self.rendezvous.assembled
        outcome = self.rendezvous.claim(claim, time.monotonic())
        if not known and isinstance(outcome, Waiting):
            log.info("%s has come from %s; %d more to come", claim.member, _peer(context), len(outcome.missing))
        if self.rendezvous.assembled and not before:
            log.info("all %d ranks of job %s have come", self.rendezvous.size, self.rendezvous.job)
            self._wake()
        return outcome

    def _withdraw(self, claim: Claim, context: Any) -> None:
        member: Member | None = self.rendezvous.withdraw(claim)
        if member is not None:
            log.warning("%s at %s went away while it waited for the others", member, _peer(context))

    def _wake(self) -> None:
        for held in self._held:
            held.news()


class _Held:
    """A call that is held back until there is news, its time is up, or its caller is gone."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._over = False
        self.gone = False

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)
        self._over = True

    def news(self) -> None:
        self._event.set()

    def cut_off(self) -> None:
        """gRPC's word that the call has ended; while it is held, that means that the caller is gone."""
        if not self._over:
            self.gone = True
            self._event.set()


def _check_free(endpoint: Endpoint, address: str) -> None:
    """Fail with the system's own reason if the port cannot be had; gRPC would bury it in a log."""
    with socket.socket(endpoint.family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(endpoint.sockaddr)
            probe.listen(1)
        except OSError as error:
            hint = {
                errno.EADDRINUSE: "another process, perhaps an earlier run of this job, listens there",
                errno.EADDRNOTAVAIL: "this machine does not have that address",
                errno.EACCES: "ports below 1024 need privileges",
            }.get(error.errno or 0, "")
            why = f"{error.strerror}; {hint}" if hint else error.strerror
            raise TransportError(f"the coordinator cannot listen at {address}: {why}") from error


def _peer(context: Any) -> str:
    """The caller's address, as people write it: gRPC says "ipv6:%5B::1%5D:4711"."""
    return unquote(context.peer()).removeprefix("ipv4:").removeprefix("ipv6:")


def _abort(context: Any, code: grpc.StatusCode, reason: str) -> NoReturn:
    log.warning("refused a call from %s: %s", _peer(context), reason)
    context.abort(code, reason)
    raise AssertionError("abort raises")
