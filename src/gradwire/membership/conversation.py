"""A proven conversation with a coordinator: short unary calls, and no gRPC thread left when they are over."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from gradwire.errors import ConfigError, NoConnection, Refused
from gradwire.membership.addresses import Endpoint, Unresolved, resolve, split
from gradwire.membership.doorkeeper import told_at
from gradwire.membership.health import check
from gradwire.membership.quiet import grpc
from gradwire.membership.sealing import Unproven, WorkerSeal
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.membership.v1 import gradwire_pb2_grpc as rpc
from gradwire.security.admission import NO_SECRET, printable
from gradwire.security.certificates import coordinator_name
from gradwire.security.tls import CA, CERT, KEY, Credentials, explain

PATIENCE = 1.0  # seconds that a call may be held back by the coordinator
BYTES_PER_MEMBER = 4096
_SLACK = 5.0  # seconds beyond that in which an answer must come
_LAST_WORD = 1.0  # seconds beyond the deadline in which the coordinator can still say who is missing
_ONE_TRY = 5.0  # seconds for a connection to be made
_NAME_GRACE = 5.0  # seconds in which a name server may recover
# What a call can end with while a coordinator starts, stops, is overloaded or is cut off.
_TRY_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


class Conversation:
    """A proven conversation with the coordinator at an address, begun again as often as it breaks until time is up."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        timeout: float,
        *,
        credentials: Credentials | None = None,
        largest_reply: int = 64 * BYTES_PER_MEMBER,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._host, self._port = split(address)
        self._deadline = time.monotonic() + timeout
        self.seal = WorkerSeal(secret)
        self._credentials = credentials
        self._largest_reply = largest_reply
        self._channel: Any = None
        self._stub: Any = None
        self._met = False  # at least once
        self._last = "nothing listens there"
        self._endpoint: Endpoint | None = None

    @property
    def left(self) -> float:
        return self._deadline - time.monotonic()

    def hurry(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def ask(self, method: str, body: bytes) -> bytes:
        """The proven answer to a request; tries again on a new connection until the deadline."""
        pauses = pauses_between_tries()
        while True:
            try:
                self.connect()
                return self._call(method, body)
            except grpc.RpcError as error:
                self.disconnect()
                self.judge(error)
            if self.left <= 0:
                raise self._nobody()
            time.sleep(min(next(pauses), max(0.0, self.left)))

    def serving(self) -> bool:
        """What the standard health check says."""
        try:
            self.connect()
            return check(self._channel, timeout=max(0.1, min(self.left, _SLACK)))
        except grpc.RpcError as error:
            self.judge(error)
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()

    def _call(self, method: str, body: bytes) -> bytes:
        request = self.seal.seal(method, body)
        timeout = min(PATIENCE + _SLACK, max(0.0, self.left) + _LAST_WORD)
        return self.open(method, request, getattr(self._stub, method)(request, timeout=timeout))

    def open(self, method: str, request: pb.Sealed, reply: pb.Sealed) -> bytes:
        """The body of a reply, proven to be the answer to this request."""
        try:
            return self.seal.open(method, request, reply)
        except Unproven as error:
            raise Refused(f"what answers at {self.address} {NO_SECRET}: its reply is not authenticated") from error

    def connect(self) -> Any:
        """Reach the coordinator and have it prove the secret, before it is told anything of use; the stub for calls."""
        if self._stub is not None:
            return self._stub
        endpoint = self._endpoint = self._reach()
        family = "ipv6" if endpoint.family == socket.AF_INET6 else "ipv4"
        target = f"{family}:{endpoint}".replace("%", "%25")  # a zone, in a URL
        self._channel = self._open_channel(target)
        stub = rpc.MembershipStub(self._channel)  # type: ignore[no-untyped-call]
        reply = stub.Hello(self.seal.hello(), timeout=max(0.1, min(self.left, _SLACK)), wait_for_ready=False)
        try:
            self.seal.meet(reply)
        except Unproven as error:
            raise Refused(f"what answers at {self.address} {NO_SECRET}: check GRADWIRE_TOKEN on both sides") from error
        self._met = True
        self._stub = stub
        return stub

    def _open_channel(self, target: str) -> Any:
        options: list[tuple[str, Any]] = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),  # a new try must not inherit the last one's back-off
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.keepalive_time_ms", 5000),  # a stream to a machine that fell silent ends
            ("grpc.keepalive_timeout_ms", 3000),
            ("grpc.max_receive_message_length", self._largest_reply),
        ]
        if self._credentials is None:
            return grpc.insecure_channel(target, options=options)
        options += self._credentials.grpc_options()
        return grpc.secure_channel(target, self._credentials.grpc_channel(), options=options)

    def disconnect(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()

    def judge(self, error: Any) -> None:
        """Return if another try makes sense, else raise what the failed call means."""
        code, details = error.code(), printable(error.details() or "")
        if code == grpc.StatusCode.PERMISSION_DENIED:
            raise Refused(f"the coordinator at {self.address} refused this worker: {details}") from error
        if code == grpc.StatusCode.UNAUTHENTICATED:
            raise Refused(
                f"the coordinator at {self.address} refused this worker: it {NO_SECRET}; "
                "check that GRADWIRE_TOKEN is the same on both sides"
            ) from error
        if code not in (*_TRY_AGAIN, grpc.StatusCode.FAILED_PRECONDITION):
            raise Refused(f"what answers at {self.address} is no gradwire coordinator: {details or code}") from error
        over = told_at(self._endpoint, min(1.0, max(0.1, self.left))) if self._endpoint else None
        if over is not None:
            raise Refused(
                f"the rendezvous at {self.address} is over: {over}. If this process is not one too many, "
                "another job has this address: choose another port"
            ) from error
        if code == grpc.StatusCode.UNAVAILABLE and self._endpoint is not None:
            trouble = tls_trouble(self._endpoint, self._credentials, min(_ONE_TRY, max(0.1, self.left)))
            if trouble is not None:
                raise Refused(f"no conversation with the coordinator at {self.address}: {trouble}") from error
        if code != grpc.StatusCode.FAILED_PRECONDITION:
            self._last = f"something listens there, but: {details or code}"

    def _reach(self) -> Endpoint:
        """Find the address that accepts a connection. Plain sockets tell more, and sooner, than gRPC's own retries."""
        endpoints = self._resolved()
        pauses = pauses_between_tries()
        while True:
            for endpoint in endpoints:
                trouble = _try(endpoint, max(0.1, min(self.left, _ONE_TRY)))
                if trouble is None:
                    return endpoint
                self._last = trouble
            if self.left <= 0:
                raise self._nobody()
            time.sleep(min(next(pauses), max(0.0, self.left)))

    def _resolved(self) -> list[Endpoint]:
        if self._port == 0:
            raise ConfigError(f"the coordinator's address {self.address} needs a port")
        until = time.monotonic() + min(_NAME_GRACE, self.left)
        while True:
            try:
                return resolve(self._host, self._port)
            except Unresolved as error:
                if not error.passing or time.monotonic() >= until:
                    raise
            time.sleep(0.2)

    def _nobody(self) -> NoConnection:
        if self._met:
            how = f"the coordinator at {self.address} answered at first and then went away"
        else:
            how = f"no coordinator answered at {self.address}: check that rank 0 or the launcher runs, and its address"
        return NoConnection(
            f"{how} (waited {self.timeout:g} s; {self._last})", operation="rendezvous", seconds=self.timeout
        )


def pauses_between_tries() -> Iterator[float]:
    """Seconds between tries: quick at first, as the coordinator usually starts together with its workers."""
    pause = 0.01
    while True:
        yield pause
        pause = min(pause * 1.5, 0.1 if pause < 0.1 else 0.25)


def tls_trouble(endpoint: Endpoint, credentials: Credentials | None, seconds: float) -> str | None:
    """Whether it is TLS that keeps the two sides apart; gRPC does not say. Tries a handshake of its own to find out."""
    context = _curious() if credentials is None else credentials.client_context()
    try:
        with (
            socket.create_connection(endpoint.sockaddr[:2], seconds) as plain,
            context.wrap_socket(plain, do_handshake_on_connect=False) as secure,
        ):
            secure.do_handshake()
            if credentials is None:
                return f"it speaks TLS, and this side was given no certificates: set {CA}, {CERT} and {KEY}"
            names = (secure.getpeercert() or {}).get("subjectAltName", ())
            secure.recv(1)  # with TLS 1.3, what the other side thinks of our certificate comes after the handshake
            if ("DNS", coordinator_name(credentials.job)) not in names:
                return f"the certificate shown there is not for a coordinator of job {credentials.job}"
    except ssl.SSLError as error:
        if credentials is not None:
            plaintext = error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
            return "it does not speak TLS, and this side does" if plaintext else explain(error)
    except OSError:
        pass  # it is not there, or says nothing
    return None


def _curious() -> ssl.SSLContext:
    """For a handshake that asks only whether the other side speaks TLS; nothing is sent or believed in it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _try(endpoint: Endpoint, seconds: float) -> str | None:
    """Connect and hang up; returns why that failed, or None."""
    with socket.socket(endpoint.family, socket.SOCK_STREAM) as probe:
        probe.settimeout(seconds)
        try:
            probe.connect(endpoint.sockaddr)
            # On loopback a socket can meet itself where nobody listens, if the port is among the ephemeral ones.
            met_itself = probe.getsockname() == probe.getpeername()
        except OSError as error:
            return f"connecting to {endpoint}: {error.strerror or os.strerror(error.errno or 0) or 'timed out'}"
    return f"connecting to {endpoint}: nothing listens there" if met_itself else None
