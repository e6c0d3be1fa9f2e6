"""An authenticated session with a coordinator: short calls, on a socket that is open no longer than they take.

Only sealed replies are proven. Whatever else comes from the address (the line of a `ClosedListener`, a failed TLS
handshake, the status of a call) may be anybody's: while a coordinator is started anew, other programs can have its
port. A newcomer that has met no coordinator yet believes it and ends, since a mistyped token or address must not look
like a long wait. A member that has met one takes it for a hint: it tries again until its deadline, and the error then
quotes the hint. It believes a status only from a connection over which the coordinator has proved itself; so it says
hello once more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from gradwire.errors import ConfigError, NoConnection, Refused
from gradwire.membership.client.grpc_socket import CallFailed, Connection
from gradwire.membership.closed_listener import closing_reason_at
from gradwire.membership.endpoints import Endpoint, Unresolved, resolve, split
from gradwire.membership.sealing import Unproven, WorkerSeal
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.security import tls_probe
from gradwire.security.admission import NO_SECRET
from gradwire.security.certificates import may_coordinate
from gradwire.security.credentials import Credentials, explain
from gradwire.security.tokens import Token

HOLD_SECONDS = 1.0  # seconds that a call may be held back by the coordinator
BYTES_PER_MEMBER = 4096
_SLACK = 5.0  # seconds beyond that in which an answer must come
_LAST_WORD = 1.0  # seconds beyond the deadline in which the coordinator can still say who is missing
_ONE_TRY = 5.0  # seconds for a connection to be made
_NAME_GRACE = 5.0  # seconds in which a name server may recover
# What a call can end with while a coordinator starts, stops, is overloaded or is cut off.
_TRY_AGAIN = (
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "INTERNAL",
    "UNKNOWN",
    "FAILED_PRECONDITION",
)


Secret = bytes | Token  # what a worker proves: the job's secret, or a join token


class _Unbelieved(Exception):
    """Something at the address turns this process away, without proof that it is the coordinator.

    `by_status`: by how it ended a call, which counts if it has proved itself over the same connection.
    """

    def __init__(self, reason: str, *, by_status: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.by_status = by_status


class CoordinatorSession:
    """A proven conversation with the coordinator at an address, begun again as often as it breaks until time is up."""

    def __init__(
        self,
        address: str,
        secret: Secret,
        timeout: float,
        *,
        seal: WorkerSeal | None = None,
        credentials: Credentials | None = None,
        largest_reply: int = 64 * BYTES_PER_MEMBER,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._host, self._port = split(address)
        self._deadline = time.monotonic() + timeout
        self.seal = seal or WorkerSeal(secret)
        self._credentials = credentials
        self._largest_reply = largest_reply
        self._connection: Connection | None = None
        self._proven = False  # by what is at the other end of the connection
        self._last = "nothing listens there"
        self._hint = ""  # what something there said last without proof
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
            with self.judged():
                return self._call(method, body)
            if self.left <= 0:
                raise self._nobody()
            time.sleep(min(next(pauses), max(0.0, self.left)))

    def stream(self, method: str) -> Callable[[bytes, float], bytes]:
        """A stream, as a function that takes a request and a time limit and returns the proven answer.

        It, and this, raise `CallFailed` if there is no answer.
        """
        connection = self._connected()
        connection.begin_stream(method)

        def ask(body: bytes, timeout: float) -> bytes:
            return self._exchange(method, body, lambda message: connection.ask(message, timeout))

        return ask

    def serving(self) -> bool:
        """What the standard health check says."""
        with self.judged():
            request = StringValue().SerializeToString()
            timeout = max(0.1, min(self.left, _SLACK))
            reply = self._connected().call("Check", request, timeout, service="grpc.health.v1.Health")
            return Int32Value.FromString(reply).value == 1
        return False

    def close(self) -> None:
        """Hang up."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, body: bytes) -> bytes:
        connection = self._connected()
        timeout = min(HOLD_SECONDS + _SLACK, max(0.0, self.left) + _LAST_WORD)
        return self._exchange(method, body, lambda message: connection.call(method, message, timeout))

    def _exchange(self, method: str, body: bytes, send: Callable[[bytes], bytes]) -> bytes:
        request = self.seal.seal(method, body)
        try:
            reply = self.seal.open(method, request, pb.Sealed.FromString(send(request.SerializeToString())))
        except (Unproven, DecodeError) as error:
            reason = f"what answers at {self.address} {NO_SECRET}: its reply is not authenticated"
            raise _Unbelieved(reason, by_status=True) from error
        self._proven = True
        return reply

    def _connected(self) -> Connection:
        """Reach the coordinator and have it prove the secret, before it is told anything of use: once for each seal, by
        which all that follows is proven too."""
        if self._connection is None:
            sock = self._secured(self._reach())
            self._connection = Connection(sock, self.address, self._largest_reply)
            self._proven = self._credentials is not None  # by its certificate
            if not self.seal.authenticated:
                self._meet(self._connection)
        return self._connection

    def _meet(self, connection: Connection) -> None:
        timeout = max(0.1, min(self.left, _SLACK))
        reply = connection.call("Hello", self.seal.hello().SerializeToString(), timeout)
        try:
            self.seal.accept_hello(pb.HelloReply.FromString(reply))
        except (Unproven, DecodeError) as error:
            reason = f"what answers at {self.address} {NO_SECRET}: check GRADWIRE_TOKEN on both sides"
            raise _Unbelieved(reason) from error
        self._proven = True

    @contextlib.contextmanager
    def judged(self) -> Iterator[None]:
        """Swallows a failure after which another try makes sense; any other is raised as what it means."""
        try:
            try:
                yield
            except CallFailed as error:
                self.close()
                self._judge(error)
            except ssl.SSLError as error:
                self.close()
                if self._endpoint is not None:
                    self._look_closer(self._endpoint)
                raise self._unlike(explain(error)) from error
        except _Unbelieved as hint:
            self.close()
            if not self.seal.ever_authenticated or (hint.by_status and self._proven):
                raise Refused(hint.reason) from hint
            self._hint = f"something answered there, without proof: {hint.reason}"
            self.seal.forget_coordinator()  # the next connection begins with a proof; what is said over it then can be believed
        except BaseException:
            self.close()
            raise

    def _judge(self, error: CallFailed) -> None:
        if error.code == "PERMISSION_DENIED":
            reason = f"the coordinator at {self.address} refused this worker: {error.details}"
            raise _Unbelieved(reason, by_status=True) from error
        if error.code == "UNAUTHENTICATED":
            raise _Unbelieved(
                f"the coordinator at {self.address} refused this worker: it {NO_SECRET}; "
                "check that GRADWIRE_TOKEN is the same on both sides"
            ) from error
        if error.code not in _TRY_AGAIN:
            reason = f"what answers at {self.address} is no gradwire coordinator: {error}"
            raise _Unbelieved(reason, by_status=True) from error
        if error.code == "UNAVAILABLE" and self._endpoint is not None:
            self._look_closer(self._endpoint)
        if error.code == "FAILED_PRECONDITION":  # it was started anew
            self.seal.forget_coordinator()
        else:
            self._last = f"something listens there, but: {error.details or error.code}"

    def _look_closer(self, endpoint: Endpoint) -> None:
        """Raise if what hung up can tell why: a `ClosedListener` does, and so does TLS."""
        seconds = min(1.0, max(0.1, self.left))
        over = closing_reason_at(endpoint, seconds)
        if over is not None:
            raise _Unbelieved(
                f"the rendezvous at {self.address} is over: {over}. If this process is not one too many, "
                "another job has this address: choose another port"
            )
        trouble = _trouble(endpoint, seconds, self._credentials)
        if trouble is not None:
            raise self._unlike(trouble)

    def _unlike(self, reason: str) -> _Unbelieved:
        return _Unbelieved(f"no conversation with the coordinator at {self.address}: {reason}")

    def _secured(self, sock: socket.socket) -> socket.socket:
        """The socket under TLS, if there are credentials, and the other side is one that may be the coordinator."""
        if self._credentials is None:
            return sock
        context = self._credentials.client_context()
        context.set_alpn_protocols(["h2"])
        sock.settimeout(max(0.1, min(self.left, _ONE_TRY)))
        try:
            secure = context.wrap_socket(sock)
        except ssl.SSLError:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            raise CallFailed("UNAVAILABLE", f"the TLS handshake: {error.strerror or error}") from error
        if not may_coordinate(secure.getpeercert(binary_form=True) or b"", self._credentials.job):
            reason = tls_probe.identity_problem(secure, self._credentials)
            secure.close()
            raise self._unlike(reason or f"its certificate is not for a coordinator of job {self._credentials.job}")
        return secure

    def _reach(self) -> socket.socket:
        """A connection to the address, or to the first of its addresses that accepts one."""
        endpoints = self._resolved()
        pauses = pauses_between_tries()
        while True:
            for endpoint in endpoints:
                found = _try(endpoint, max(0.1, min(self.left, _ONE_TRY)))
                if not isinstance(found, str):
                    self._endpoint = endpoint
                    return found
                self._last = found
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
                if not error.temporary or time.monotonic() >= until:
                    raise
            time.sleep(0.2)

    @property
    def trouble(self) -> str:
        """Why the last try failed, and what something there said without proof."""
        return "; ".join(text for text in (self._last, self._hint) if text)

    def _nobody(self) -> NoConnection:
        if self.seal.ever_authenticated:
            how = f"the coordinator at {self.address} answered at first and then went away"
        else:
            how = f"no coordinator answered at {self.address}: check that rank 0 or the launcher runs, and its address"
        return NoConnection(
            f"{how} (waited {self.timeout:g} s; {self.trouble})", operation="rendezvous", seconds=self.timeout
        )


def pauses_between_tries() -> Iterator[float]:
    """Seconds between tries: quick at first, as the coordinator usually starts together with its workers."""
    pause = 0.01
    while True:
        yield pause
        pause = min(pause * 1.5, 0.1 if pause < 0.1 else 0.25)


def _trouble(endpoint: Endpoint, seconds: float, credentials: Credentials | None) -> str | None:
    """Why TLS, or its absence, keeps the two sides apart, if it does."""
    knock = _try(endpoint, seconds)
    if isinstance(knock, str):
        return None
    with knock:
        try:
            return tls_probe.tls_problem(knock, credentials)
        except OSError:
            return None


def _try(endpoint: Endpoint, seconds: float) -> socket.socket | str:
    """A connection, or why there is none."""
    sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
    sock.settimeout(seconds)
    try:
        sock.connect(endpoint.sockaddr)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # On loopback a socket can meet itself where nobody listens, if the port is among the ephemeral ones.
        if sock.getsockname() != sock.getpeername():
            return sock
        trouble = "nothing listens there"
    except OSError as error:
        trouble = error.strerror or os.strerror(error.errno or 0) or "timed out"
    sock.close()
    return f"connecting to {endpoint}: {trouble}"
