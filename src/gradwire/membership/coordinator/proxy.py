"""Serves the coordinator's public address: accepts connections and forwards their bytes to the gRPC server behind it.

gRPC's server does not limit the number, the duration or the sources of its connections, so clients without the secret
could exhaust it. Therefore it listens on a socket that only this process can reach. A thread here connects clients to
it, within the limits of `connection_limits`. TLS is between the client and gRPC: the proxy forwards bytes without
reading them.

gRPC identifies the connections from here by the names of their sockets. With such a name the coordinator finds the
client's address of a call, and reports which connections have proved the job's secret.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections import Counter, deque

from gradwire.errors import TransportError
from gradwire.membership.coordinator.connection_limits import ConnectionLimits, Limits, Reason, source_of
from gradwire.membership.coordinator.proxy_sockets import DescriptorLimit, PrivateAddress
from gradwire.membership.endpoints import Endpoint, join
from gradwire.transports.fork_safe_sockets import Sockets

log = logging.getLogger("gradwire.membership")

_CHUNK = 64 << 10  # bytes read at a time, and the most that are buffered for each direction
_ACCEPTED_AT_ONCE = 64
_PROOF_INTERVAL = 1.0  # seconds for which further proofs on the same connection are not reported
_PAUSE = 0.1  # seconds before connections are accepted again, after the process ran out of descriptors
_DRAIN_SECONDS = 1.0  # for clients to receive the last bytes of a stopped server
_QUIET_SECONDS = 0.05  # without a byte, after which a stopped server is assumed to send nothing more
_REPORT_EVERY = 10.0  # seconds between two log lines about closed connections

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_CLOSED = select.EPOLLERR | select.EPOLLHUP | select.EPOLLRDHUP


class ClientConnection:
    """A client's connection from `address`, with its connection to the server if there is one."""

    __slots__ = ("address", "client", "id", "inward", "name", "outward", "proof", "server", "source", "watched")

    def __init__(self, id: int, client: socket.socket, address: str) -> None:
        ip, _, port = address.rpartition(":")
        self.id, self.client, self.source = id, client, source_of(ip)
        self.address = join(self.source if ip.startswith("::ffff:") else ip, int(port))
        self.server: socket.socket | None = None
        self.name = ""  # of the socket that is connected to the server
        self.inward = self.outward = b""  # bytes that were read and that the other side cannot take yet
        self.watched = (0, 0)  # the polled events of the client's and of the server's socket
        self.proof = 0.0  # when it last proved the secret


class ConnectionProxy:
    """Listens at an endpoint from its construction on. Raises `TransportError` if it cannot.

    The server binds to `inner`. After that, `start` begins to connect clients to it.
    """

    def __init__(self, endpoint: Endpoint, limits: Limits) -> None:
        self._sockets = Sockets()
        self._inner = PrivateAddress()
        try:
            self._listener = _listen(endpoint, self._sockets)
        except BaseException:
            self._inner.close()
            raise
        self._descriptors = DescriptorLimit(limits)
        self._limits = ConnectionLimits(self._descriptors.limits)
        self._poll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup_lock = threading.Lock()  # so that no wake-up is written to a closed descriptor
        self._prefix = secrets.token_hex(8)  # random, so that no other process uses these names
        self._ids = itertools.count(1)
        self._connections: dict[int, ClientConnection] = {}  # by id
        self._clients: dict[int, ClientConnection] = {}  # by the client's descriptor
        self._servers: dict[int, ClientConnection] = {}  # by the server's
        self._names: dict[str, ClientConnection] = {}
        self._proofs: deque[tuple[int, float]] = deque()
        self._closed_connections = _ClosedConnections()
        self._paused_until, self._last_warning = 0.0, -_REPORT_EVERY
        self._listening = self._open = True
        self._thread: threading.Thread | None = None
        _proxies.add(self)

    @property
    def port(self) -> int:
        """The port to which clients connect."""
        return int(self._listener.getsockname()[1])

    @property
    def inner(self) -> str:
        """The address at which the server must listen, in gRPC's notation."""
        return f"unix:{self._inner.path}"

    def start(self) -> None:
        """Begin to forward connections. The server must be listening."""
        self._inner.hide()
        self._poll.register(self._wakeup, select.EPOLLIN)
        self._poll.register(self._listener, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="gradwire-coordinator-proxy", daemon=True)
        self._thread.start()

    def find(self, peer: str) -> ClientConnection | None:
        """Return the connection that gRPC calls `peer`, if it still exists. Any thread may call this."""
        return self._names.get(peer.removeprefix("unix-abstract:"))

    def proved(self, connection: ClientConnection) -> None:
        """Record that a request on this connection has proved the job's secret. Any thread may call this."""
        now = time.monotonic()
        if now - connection.proof < _PROOF_INTERVAL:
            return
        first, connection.proof = not connection.proof, now
        self._proofs.append((connection.id, now))
        if first:
            self._wake()

    def refuse(self) -> None:
        """Accept no more connections."""
        self._listening = False
        self._wake()

    def close(self) -> None:
        """Close all connections, after clients have received the last bytes of a stopped server. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self._thread is not None:
            self._wake()
            self._thread.join()
        for connection in list(self._connections.values()):
            self._end(connection)
        self._inner.close()
        self._descriptors.close()
        with self._wakeup_lock:
            self.abandon()

    def abandon(self) -> None:
        """Close the copies of the descriptors in a forked child. The parent continues."""
        _proxies.discard(self)
        self._sockets.abandon()
        self._inner.abandon()
        self._poll.close()
        os.close(self._wakeup)
        self._wakeup = -1

    def _wake(self) -> None:
        with self._wakeup_lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    # -- the thread

    def _run(self) -> None:
        while self._open:
            now = time.monotonic()
            self._enforce(now)
            self._keep_listening(now)
            due = [then for then in (self._limits.due(), self._paused_until) if then]
            self._handle_events(max(0.0, min(due) - now) if due else None)
        self._listener.close()
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._servers and time.monotonic() < deadline:
            busy = self._handle_events(_QUIET_SECONDS)
            if not busy and not any(connection.outward for connection in self._connections.values()):
                break

    def _enforce(self, now: float) -> None:
        """Report proofs to the limits, and carry out their decisions."""
        while self._proofs:
            self._limits.proved(*self._proofs.popleft())
        decisions = self._limits.decide(now)
        for number in decisions.opened:
            self._connect_to_server(self._connections[number])
        for number in decisions.parked:
            self._park(self._connections[number])
        for number, reason in decisions.closed:
            if number in self._connections:
                self._closed_connections.add(reason, self._connections[number].source)
                self._end(self._connections[number])
        self._closed_connections.report(now)

    def _keep_listening(self, now: float) -> None:
        if not self._listening:
            self._listener.close()
            self._paused_until = 0.0
        elif self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._poll.register(self._listener, select.EPOLLIN)

    def _handle_events(self, timeout: float | None) -> bool:
        """Wait for events and handle them. Return False if there were none."""
        events = self._poll.poll(timeout)
        accepting = False
        for descriptor, event in events:
            if (connection := self._clients.get(descriptor)) is not None:
                self._handle_client(connection, event)
            elif (connection := self._servers.get(descriptor)) is not None:
                self._handle_server(connection, event)
            elif descriptor == self._wakeup:
                os.eventfd_read(self._wakeup)
            elif descriptor == self._listener.fileno():
                accepting = True
        if accepting:  # last: a new connection may reuse a descriptor that was closed above and still has an event here
            self._accept()
        return bool(events)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, address = self._sockets.accept(self._listener)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    continue  # this connection has already ended
                self._pause(error, time.monotonic())
                return
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = ClientConnection(next(self._ids), client, address)
            self._connections[connection.id] = self._clients[client.fileno()] = connection
            self._poll.register(client, select.EPOLLRDHUP)
            connection.watched = (select.EPOLLRDHUP, 0)
            self._limits.arrived(connection.id, connection.source, time.monotonic())

    def _pause(self, error: OSError, now: float) -> None:
        """Stop accepting for a moment, because descriptors or memory have run out."""
        if now >= self._last_warning + _REPORT_EVERY:
            log.warning("the coordinator cannot accept connections for now: %s", error.strerror)
            self._last_warning = now
        self._poll.unregister(self._listener)
        self._paused_until = now + _PAUSE

    def _connect_to_server(self, connection: ClientConnection) -> None:
        """Connect to the server on behalf of a client."""
        connection.name = f"{self._prefix}-{connection.id}"
        self._names[connection.name] = connection
        try:
            server = connection.server = self._sockets.open_unix()
            server.setblocking(False)
            server.bind(f"\0{connection.name}")
            self._inner.connect(server)
        except OSError as error:
            log.warning("a connection from %s could not be served: %s", connection.address, error.strerror)
            self._end(connection)
            return
        self._servers[server.fileno()] = connection
        self._poll.register(server, 0)
        self._watch(connection)

    def _park(self, connection: ClientConnection) -> None:
        """Disconnect a client from the server, and ignore its bytes until it is closed."""
        self._end_server(connection)
        self._poll.modify(connection.client, select.EPOLLRDHUP)

    def _handle_client(self, connection: ClientConnection, event: int) -> None:
        if event & _CLOSED:
            self._end(connection)
            return
        if event & select.EPOLLOUT and not self._send_outward(connection, connection.outward):
            return
        if event & select.EPOLLIN and not connection.inward:
            data = _receive(connection.client)
            if data == b"":
                self._end(connection)
                return
            self._send_inward(connection, data or b"")
        self._watch(connection)

    def _handle_server(self, connection: ClientConnection, event: int) -> None:
        assert connection.server is not None
        if event & select.EPOLLOUT:
            self._send_inward(connection, connection.inward)
        if connection.outward:  # a server that has closed is not polled until these bytes are sent
            self._watch(connection, server_closed=bool(event & _CLOSED))
            return
        data = _receive(connection.server) if event & (select.EPOLLIN | _CLOSED) else None
        if data == b"":
            self._server_ended(connection)
        elif self._send_outward(connection, data or b""):
            self._watch(connection)

    def _send_inward(self, connection: ClientConnection, data: bytes) -> None:
        connection.inward = b""
        if connection.server is not None:
            with contextlib.suppress(OSError):  # the end of a server is handled when its last bytes are read
                connection.inward = _send(connection.server, data)

    def _send_outward(self, connection: ClientConnection, data: bytes) -> bool:
        """Send bytes to the client. Return False if it has disconnected."""
        try:
            connection.outward = _send(connection.client, data)
        except OSError:
            self._end(connection)
            return False
        return True

    def _server_ended(self, connection: ClientConnection) -> None:
        """Shut down the sending side and wait for the client to close: closing at once could lose the last bytes."""
        self._end_server(connection)
        connection.inward = b""
        with contextlib.suppress(OSError):
            connection.client.shutdown(socket.SHUT_WR)
        self._watch(connection)

    def _watch(self, connection: ClientConnection, *, server_closed: bool = False) -> None:
        """Poll for the events that can be handled: reading if the buffer is empty, writing if it has bytes."""
        client = (0 if connection.inward else select.EPOLLIN) | (select.EPOLLOUT if connection.outward else 0)
        server = (0 if connection.outward else select.EPOLLIN) | (select.EPOLLOUT if connection.inward else 0)
        before, connection.watched = connection.watched, (client, server)
        if client != before[0]:
            self._poll.modify(connection.client, client)
        if connection.server is None:
            return
        if server_closed:
            self._poll.unregister(connection.server)
            connection.watched = (client, -1)
        elif before[1] == -1:
            if connection.outward:
                connection.watched = (client, -1)
            else:
                self._poll.register(connection.server, server)
        elif server != before[1]:
            self._poll.modify(connection.server, server)

    def _end(self, connection: ClientConnection) -> None:
        self._limits.ended(connection.id)
        self._end_server(connection)
        self._names.pop(connection.name, None)
        self._connections.pop(connection.id, None)
        self._clients.pop(connection.client.fileno(), None)
        connection.client.close()

    def _end_server(self, connection: ClientConnection) -> None:
        server, connection.server = connection.server, None
        if server is not None:
            self._servers.pop(server.fileno(), None)
            server.close()


class _ClosedConnections:
    """Logs closed connections: the first at once, then a summary every `_REPORT_EVERY` seconds."""

    def __init__(self) -> None:
        self._reasons: Counter[Reason] = Counter()
        self._sources: Counter[str] = Counter()
        self._next = 0.0

    def add(self, reason: Reason, source: str) -> None:
        if reason is not Reason.IDLE:
            self._reasons[reason] += 1
            self._sources[source] += 1

    def report(self, now: float) -> None:
        if not self._reasons or now < self._next:
            return
        level = logging.WARNING if Reason.CROWDED in self._reasons else logging.INFO
        reasons = ", ".join(f"{count} {reason.value}" for reason, count in self._reasons.most_common())
        (source, count), *_ = self._sources.most_common(1)
        log.log(level, "closed connections to the coordinator: %s; %d of them came from %s", reasons, count, source)
        self._reasons.clear()
        self._sources.clear()
        self._next = now + _REPORT_EVERY


def _listen(endpoint: Endpoint, sockets: Sockets) -> socket.socket:
    """Return a listening socket. Raise `TransportError` with the system's reason if that fails."""
    listener = sockets.open(endpoint.ip)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(endpoint.sockaddr)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        hint = {
            errno.EADDRINUSE: "another process listens there, perhaps of an earlier run of this job",
            errno.EADDRNOTAVAIL: "this machine does not have that address",
            errno.EACCES: "ports below 1024 need privileges",
        }.get(error.errno or 0, "")
        why = f"{error.strerror}; {hint}" if hint else error.strerror
        raise TransportError(f"the coordinator cannot listen at {endpoint}: {why}") from error
    listener.setblocking(False)
    return listener


def _receive(sock: socket.socket) -> bytes | None:
    """Return the received bytes; empty at the end of the connection, None if there are none yet."""
    try:
        return sock.recv(_CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _send(sock: socket.socket, data: bytes) -> bytes:
    """Send bytes and return the rest that the socket cannot take yet."""
    if not data:
        return b""
    try:
        return data[sock.send(data) :]
    except BlockingIOError:
        return data


_proxies: weakref.WeakSet[ConnectionProxy] = weakref.WeakSet()


def _abandon_all() -> None:
    for proxy in list(_proxies):
        proxy.abandon()


os.register_at_fork(after_in_child=_abandon_all)
