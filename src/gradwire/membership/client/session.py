"""Provides an authenticated session with a coordinator: short calls on a socket that is closed after them.

Only sealed replies are proven. Everything else that comes from the address is not: the line of a `ClosedListener`, a
failed TLS handshake, the status of a call. While a coordinator restarts, another program may use its port. This session
treats such an unproven refusal as follows:

- If the coordinator has never proved the secret to this process, the refusal is raised at once. A mistyped token or
  address must not cause a long wait.
- If it has, the refusal is only a hint: the session tries again until its deadline, and the final error quotes the
  hint. A status is trusted only on a connection over which the coordinator has proved the secret, so the session sends
  Hello again.
"""

from __future__ import annotations

import contextlib
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

HOLD_SECONDS = 1.0  # for which the coordinator may delay the reply to RegisterWorker
BYTES_PER_MEMBER = 4096
_REPLY_MARGIN = 5.0  # seconds beyond HOLD_SECONDS within which a reply must come
_REPLY_GRACE = 1.0  # seconds beyond the deadline for a last reply, which names the missing ranks
_CONNECT_SECONDS = 5.0  # for one attempt to connect
_NAME_GRACE = 5.0  # seconds for a name server to recover
# Status codes that a call can end with while a coordinator starts, stops, is overloaded or is unreachable.
_TRY_AGAIN = (
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "INTERNAL",
    "UNKNOWN",
    "FAILED_PRECONDITION",
)


Secret = bytes | Token  # the credential that a worker proves: the job's secret, or a join token


class _UnprovenRefusal(Exception):
    """A program at the address refuses this process, without proof that it is the coordinator.

    `by_status`: the refusal is the status of a call. It is trusted if the coordinator has proved the secret over the
    same connection.
    """

    def __init__(self, reason: str, *, by_status: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.by_status = by_status


class CoordinatorSession:
    """An authenticated session with the coordinator at an address. It reconnects until the deadline."""

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
        self._proven = False  # the peer of the current connection has proved that it is the coordinator
        self._last_failure = "nothing listens there"
        self._hint = ""  # the last unproven refusal
        self._endpoint: Endpoint | None = None

    @property
    def left(self) -> float:
        """The seconds until the deadline."""
        return self._deadline - time.monotonic()

    def set_time_left(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now."""
        self._deadline = time.monotonic() + seconds

    def ask(self, method: str, body: bytes) -> bytes:
        """Return the proven reply to a request. Try again on a new connection until the deadline."""
        pauses = pauses_between_tries()
        while True:
            with self.suppress_retryable():
                return self._call(method, body)
            if self.left <= 0:
                raise self._no_connection()
            time.sleep(min(next(pauses), max(0.0, self.left)))

    def stream(self, method: str) -> Callable[[bytes, float], bytes]:
        """Open a stream and return a function that sends a request on it, with a timeout, and returns the proven reply.

        Both this method and the function raise `CallFailed` if there is no reply.
        """
        connection = self._connected()
        connection.begin_stream(method)

        def ask(body: bytes, timeout: float) -> bytes:
            return self._exchange(method, body, lambda message: connection.ask(message, timeout))

        return ask

    def serving(self) -> bool:
        """Return the result of the standard health check."""
        with self.suppress_retryable():
            request = StringValue().SerializeToString()
            timeout = max(0.1, min(self.left, _REPLY_MARGIN))
            reply = self._connected().call("Check", request, timeout, service="grpc.health.v1.Health")
            return Int32Value.FromString(reply).value == 1
        return False

    def close(self) -> None:
        """Close the connection."""
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
        timeout = min(HOLD_SECONDS + _REPLY_MARGIN, max(0.0, self.left) + _REPLY_GRACE)
        return self._exchange(method, body, lambda message: connection.call(method, message, timeout))

    def _exchange(self, method: str, body: bytes, send: Callable[[bytes], bytes]) -> bytes:
        request = self.seal.seal(method, body)
        try:
            reply = self.seal.open(method, request, pb.Sealed.FromString(send(request.SerializeToString())))
        except (Unproven, DecodeError) as error:
            reason = f"the program at {self.address} {NO_SECRET}: its reply is not authenticated"
            raise _UnprovenRefusal(reason, by_status=True) from error
        self._proven = True
        return reply

    def _connected(self) -> Connection:
        """Return a connection to the coordinator.

        Before any request is sent, the coordinator must have proved the secret. That is done once for each seal,
        because the seal also proves all later messages.
        """
        if self._connection is None:
            sock = self._secured(self._connect())
            self._connection = Connection(sock, self.address, self._largest_reply)
            self._proven = self._credentials is not None  # by its certificate
            if not self.seal.authenticated:
                self._authenticate(self._connection)
        return self._connection

    def _authenticate(self, connection: Connection) -> None:
        timeout = max(0.1, min(self.left, _REPLY_MARGIN))
        reply = connection.call("Hello", self.seal.hello().SerializeToString(), timeout)
        try:
            self.seal.accept_hello(pb.HelloReply.FromString(reply))
        except (Unproven, DecodeError) as error:
            reason = f"the program at {self.address} {NO_SECRET}: check GRADWIRE_TOKEN on both sides"
            raise _UnprovenRefusal(reason) from error
        self._proven = True

    @contextlib.contextmanager
    def suppress_retryable(self) -> Iterator[None]:
        """Suppress failures after which another try makes sense. Raise all others as an error for the user."""
        try:
            try:
                yield
            except CallFailed as error:
                self.close()
                self._classify(error)
            except ssl.SSLError as error:
                self.close()
                if self._endpoint is not None:
                    self._probe_reason(self._endpoint)
                raise self._tls_failure(explain(error)) from error
        except _UnprovenRefusal as hint:
            self.close()
            if not self.seal.ever_authenticated or (hint.by_status and self._proven):
                raise Refused(hint.reason) from hint
            self._hint = f"an unauthenticated answer from there: {hint.reason}"
            self.seal.forget_coordinator()  # so that the next connection begins with a proof, and its status counts
        except BaseException:
            self.close()
            raise

    def _classify(self, error: CallFailed) -> None:
        if error.code == "PERMISSION_DENIED":
            reason = f"the coordinator at {self.address} refused this worker: {error.details}"
            raise _UnprovenRefusal(reason, by_status=True) from error
        if error.code == "UNAUTHENTICATED":
            raise _UnprovenRefusal(
                f"the coordinator at {self.address} refused this worker: it {NO_SECRET}; "
                "check that GRADWIRE_TOKEN is the same on both sides"
            ) from error
        if error.code not in _TRY_AGAIN:
            reason = f"the program at {self.address} is not a gradwire coordinator: {error}"
            raise _UnprovenRefusal(reason, by_status=True) from error
        if error.code == "UNAVAILABLE" and self._endpoint is not None:
            self._probe_reason(self._endpoint)
        if error.code == "FAILED_PRECONDITION":  # the coordinator was restarted
            self.seal.forget_coordinator()
        else:
            self._last_failure = f"a program listens there, but the call failed: {error.details or error.code}"

    def _probe_reason(self, endpoint: Endpoint) -> None:
        """Connect again to find out why a program closed the connection, and raise the reason if there is one.

        A `ClosedListener` sends a reason, and a TLS handshake can show one.
        """
        seconds = min(1.0, max(0.1, self.left))
        closing_reason = closing_reason_at(endpoint, seconds)
        if closing_reason is not None:
            raise _UnprovenRefusal(
                f"the rendezvous at {self.address} is over: {closing_reason}. Either this is a surplus process of that "
                "job, or another job uses this address: then choose another port"
            )
        problem = _tls_problem(endpoint, seconds, self._credentials)
        if problem is not None:
            raise self._tls_failure(problem)

    def _tls_failure(self, reason: str) -> _UnprovenRefusal:
        return _UnprovenRefusal(f"cannot connect to the coordinator at {self.address}: {reason}")

    def _secured(self, sock: socket.socket) -> socket.socket:
        """Return the socket with TLS if there are credentials. Raise if the peer's certificate is no coordinator's."""
        if self._credentials is None:
            return sock
        context = self._credentials.client_context()
        context.set_alpn_protocols(["h2"])
        sock.settimeout(max(0.1, min(self.left, _CONNECT_SECONDS)))
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
            reason = reason or f"its certificate is not for a coordinator of job {self._credentials.job}"
            raise self._tls_failure(reason)
        return secure

    def _connect(self) -> socket.socket:
        """Return a connection to the first of the resolved addresses that accepts one."""
        endpoints = self._resolved()
        pauses = pauses_between_tries()
        while True:
            for endpoint in endpoints:
                found = _try_connect(endpoint, max(0.1, min(self.left, _CONNECT_SECONDS)))
                if not isinstance(found, str):
                    self._endpoint = endpoint
                    return found
                self._last_failure = found
            if self.left <= 0:
                raise self._no_connection()
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
    def failure(self) -> str:
        """Why the last try failed, and the last unproven refusal."""
        return "; ".join(text for text in (self._last_failure, self._hint) if text)

    def _no_connection(self) -> NoConnection:
        if self.seal.ever_authenticated:
            what = f"the coordinator at {self.address} answered at first and then no longer"
        else:
            what = f"no coordinator answered at {self.address}: check that rank 0 or the launcher runs, and its address"
        return NoConnection(
            f"{what} (waited {self.timeout:g} s; {self.failure})", operation="rendezvous", seconds=self.timeout
        )


def pauses_between_tries() -> Iterator[float]:
    """Yield the seconds between tries, short at first: a coordinator often starts together with its workers."""
    pause = 0.01
    while True:
        yield pause
        pause = min(pause * 1.5, 0.1 if pause < 0.1 else 0.25)


def _tls_problem(endpoint: Endpoint, seconds: float, credentials: Credentials | None) -> str | None:
    """Return the TLS problem between this process and the program at the endpoint, if there is one."""
    sock = _try_connect(endpoint, seconds)
    if isinstance(sock, str):
        return None
    with sock:
        try:
            return tls_probe.tls_problem(sock, credentials)
        except OSError:
            return None


def _try_connect(endpoint: Endpoint, seconds: float) -> socket.socket | str:
    """Return a connection, or a text that says why there is none."""
    sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
    sock.settimeout(seconds)
    try:
        sock.connect(endpoint.sockaddr)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # On loopback a socket can connect to itself if no program listens and the port is in the ephemeral range.
        if sock.getsockname() != sock.getpeername():
            return sock
        reason = "nothing listens there"
    except OSError as error:
        reason = error.strerror or str(error) or "timed out"  # a timeout of Python's own has no errno
    sock.close()
    return f"connecting to {endpoint}: {reason}"
