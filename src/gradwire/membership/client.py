"""A worker's side of the rendezvous: short unary calls, and no gRPC thread left when they are over."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from gradwire.errors import ConfigError, InvalidSize, NoConnection, Refused, Timeout
from gradwire.membership.addresses import Endpoint, Unresolved, resolve, split
from gradwire.membership.doorkeeper import told_at
from gradwire.membership.members import Assembly, Member, named
from gradwire.membership.messages import Malformed, assembly_from_wire, member_to_wire, parse
from gradwire.membership.quiet import grpc
from gradwire.membership.sealing import Unproven, WorkerSeal
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.membership.v1 import gradwire_pb2_grpc as rpc
from gradwire.security.admission import NO_SECRET, printable

log = logging.getLogger("gradwire.membership")

_PATIENCE = 1.0  # seconds that a call may be held back by the coordinator
_SLACK = 5.0  # seconds beyond that in which an answer must come
_LAST_WORD = 1.0  # seconds beyond the deadline in which the coordinator can still say who is missing
_ONE_TRY = 5.0  # seconds for a connection to be made
_NAME_GRACE = 5.0  # seconds in which a name server may recover
_TELL_AFTER = 5.0  # seconds of waiting that are worth a line in the log
_BYTES_PER_MEMBER = 4096
# What a call can end with while a coordinator starts, stops, is overloaded or is cut off.
_TRY_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


def register(address: str, member: Member, *, size: int, secret: bytes, job: str | None, timeout: float) -> Assembly:
    """Register at the coordinator and wait until all have come.

    Raises `NoConnection` if nobody answers, `Refused` with the coordinator's reason, `Timeout` naming the ranks that
    did not come, and `ConfigError` for an address that cannot be. Whoever fails gives its place back.
    """
    if size < 1:
        raise InvalidSize(f"a job has at least one rank, not {size}")
    request = pb.RegisterWorkerRequest(member=member_to_wire(member), size=size, job=job or "")
    with _Conversation(address, secret, timeout, largest_reply=_BYTES_PER_MEMBER * (size + 64)) as coordinator:
        try:
            return _wait_for_all(coordinator, request)
        except NoConnection:  # also when refused: there is no place to give back, or nobody to give it to
            raise
        except BaseException:
            coordinator.hurry(1.0)
            with contextlib.suppress(Exception):
                _unregister(coordinator, member)
            raise


def unregister(address: str, member: Member, *, secret: bytes, timeout: float = 5.0) -> bool:
    """Take leave; False if the coordinator knows no such member."""
    with _Conversation(address, secret, timeout) as coordinator:
        return _unregister(coordinator, member)


def _unregister(coordinator: _Conversation, member: Member) -> bool:
    request = pb.UnregisterWorkerRequest(member=member_to_wire(member))
    return parse(pb.UnregisterWorkerReply, coordinator.ask("UnregisterWorker", request.SerializeToString())).known


def _wait_for_all(coordinator: _Conversation, request: pb.RegisterWorkerRequest) -> Assembly:
    start = time.monotonic()
    tell_after = _TELL_AFTER
    while True:
        request.patience_ms = max(0, round(1000 * min(_PATIENCE, coordinator.left)))
        reply = _asked(coordinator, request)
        outcome = reply.WhichOneof("outcome")
        if outcome == "assembly":
            return _believed(coordinator, reply.assembly, request.size)
        if outcome == "refusal":
            raise Refused(f"the coordinator at {coordinator.address} refused this worker: {reply.refusal.reason}")
        missing = named(reply.waiting.missing, reply.waiting.missing_count)
        waited = time.monotonic() - start
        if coordinator.left <= 0:
            raise Timeout(
                f"the job did not come together at {coordinator.address} within {coordinator.timeout:g} s: "
                f"of {request.size}, {missing} did not come",
                operation="rendezvous",
                seconds=coordinator.timeout,
            )
        if waited >= tell_after:
            log.warning(
                "%.0f s at the rendezvous %s: of %d, %s have not come",
                waited,
                coordinator.address,
                request.size,
                missing,
            )
            tell_after *= 2
        time.sleep(max(0.0, min(reply.waiting.again_after_ms / 1000, coordinator.left)))


def _asked(coordinator: _Conversation, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerReply:
    body = coordinator.ask("RegisterWorker", request.SerializeToString())
    try:
        reply = parse(pb.RegisterWorkerReply, body)
    except Malformed as error:
        raise _another_version(coordinator) from error
    if reply.WhichOneof("outcome") is None:
        raise _another_version(coordinator)
    return reply


def _believed(coordinator: _Conversation, assembly: pb.Assembly, size: int) -> Assembly:
    try:
        return assembly_from_wire(assembly, size)
    except Malformed as error:
        raise _another_version(coordinator) from error


def _another_version(coordinator: _Conversation) -> Refused:
    return Refused(
        f"the coordinator at {coordinator.address} answers in a way that this version of gradwire does not know"
    )


class _Conversation:
    """A proven conversation with the coordinator at an address, begun again as often as it breaks until time is up."""

    def __init__(
        self, address: str, secret: bytes, timeout: float, largest_reply: int = 64 * _BYTES_PER_MEMBER
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._host, self._port = split(address)
        self._deadline = time.monotonic() + timeout
        self._seal = WorkerSeal(secret)
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
        pauses = _pauses()
        while True:
            try:
                if self._stub is None:
                    self._connect()
                return self._call(method, body)
            except grpc.RpcError as error:
                self._disconnect()
                self._judge(error)
            if self.left <= 0:
                raise self._nobody()
            time.sleep(min(next(pauses), max(0.0, self.left)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disconnect()

    def _call(self, method: str, body: bytes) -> bytes:
        request = self._seal.seal(method, body)
        timeout = min(_PATIENCE + _SLACK, max(0.0, self.left) + _LAST_WORD)
        reply = getattr(self._stub, method)(request, timeout=timeout)
        try:
            return self._seal.open(method, request, reply)
        except Unproven as error:
            raise Refused(f"what answers at {self.address} {NO_SECRET}: its reply is not authenticated") from error

    def _connect(self) -> None:
        """Reach the coordinator and have it prove the secret, before it is told anything of use."""
        endpoint = self._endpoint = self._reach()
        family = "ipv6" if endpoint.family == socket.AF_INET6 else "ipv4"
        target = f"{family}:{endpoint}".replace("%", "%25")  # a zone, in a URL
        self._channel = grpc.insecure_channel(target, options=self._options())
        self._stub = rpc.MembershipStub(self._channel)  # type: ignore[no-untyped-call]
        reply = self._stub.Hello(self._seal.hello(), timeout=max(0.1, min(self.left, _SLACK)), wait_for_ready=False)
        try:
            self._seal.meet(reply)
        except Unproven as error:
            raise Refused(f"what answers at {self.address} {NO_SECRET}: check GRADWIRE_TOKEN on both sides") from error
        self._met = True

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),  # a new try must not inherit the last one's back-off
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.max_receive_message_length", self._largest_reply),
        ]

    def _disconnect(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()

    def _judge(self, error: Any) -> None:
        """Return if another try makes sense, else raise what the failed call means."""
        code, details = error.code(), printable(error.details() or "")
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
        if code != grpc.StatusCode.FAILED_PRECONDITION:
            self._last = f"something listens there, but: {details or code}"

    def _reach(self) -> Endpoint:
        """Find the address that accepts a connection. Plain sockets tell more, and sooner, than gRPC's own retries."""
        endpoints = self._resolved()
        pauses = _pauses()
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


def _pauses() -> Iterator[float]:
    """Seconds between tries: quick at first, as the coordinator usually starts together with its workers."""
    pause = 0.01
    while True:
        yield pause
        pause = min(pause * 1.5, 0.1 if pause < 0.1 else 0.25)


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
