"""The coordinator's public address: accepts connections, and passes their bytes on to the gRPC server behind it.

gRPC's server does not limit how many connections it holds, for how long and from where: clients that prove nothing
could use it up. So it listens on a socket that only this process can reach, and a thread here connects clients to it,
within the limits of `connection_limits`. TLS is between the client and gRPC; this passes on bytes without reading them.

gRPC knows the connections from here by the names of their sockets. By that name the coordinator finds out where a call
comes from, and reports which connections have proved the job's secret.
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
from gradwire.membership.coordinator.proxy_sockets import DescriptorRoom, PrivateAddress
from gradwire.membership.endpoints import Endpoint, join
from gradwire.transports.fork_safe_sockets import Sockets

log = logging.getLogger("gradwire.membership")

_CHUNK = 64 << 10  # bytes that are read at a time, and at most kept for each direction
_ACCEPTED_AT_ONCE = 64
_PROOFS_APART = 1.0  # seconds in which another proof on the same connection is not reported again
_PAUSE = 0.1  # seconds before connections are accepted again, when descriptors have run out
_LAST_WORDS = 1.0  # seconds that clients have to receive what the server had for them when it stopped
_QUIET = 0.05  # seconds without a byte after which a stopped server sends nothing more
_REPORT_EVERY = 10.0  # seconds between two lines in the log about closed connections

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_GONE = select.EPOLLERR | select.EPOLLHUP | select.EPOLLRDHUP


class ClientConnection:
    """A client's connection from `address` and, once it is passed on, the one to the server that goes with it."""

    __slots__ = ("address", "client", "id", "inward", "name", "outward", "proof", "server", "source", "watched")

    def __init__(self, id: int, client: socket.socket, address: str) -> None:
        ip, _, port = address.rpartition(":")
        self.id, self.client, self.source = id, client, source_of(ip)
        self.address = join(self.source if ip.startswith("::ffff:") else ip, int(port))
        self.server: socket.socket | None = None
        self.name = ""  # of the socket that is connected to the server
        self.inward = self.outward = b""  # bytes read that the other side has no room for yet
        self.watched = (0, 0)  # the events that are waited for, at the client's and at the server's socket
        self.proof = 0.0  # when it last proved the secret


class ConnectionProxy:
    """Listens at an endpoint from the beginning; raises `TransportError` if it cannot.

    The server binds to `inner`; `start` then begins to pass connections on to it.
    """

    def __init__(self, endpoint: Endpoint, limits: Limits) -> None:
        self._sockets = Sockets()
        self._inner = PrivateAddress()
        try:
            self._listener = _listen(endpoint, self._sockets)
        except BaseException:
            self._inner.close()
            raise
        self._room = DescriptorRoom(limits)
        self._limits = ConnectionLimits(self._room.limits)
        self._poll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ringing = threading.Lock()  # no wake-up is written to a descriptor that was closed
        self._prefix = secrets.token_hex(8)  # nobody else can have taken the names
        self._ids = itertools.count(1)
        self._connections: dict[int, ClientConnection] = {}  # by id
        self._clients: dict[int, ClientConnection] = {}  # by the client's descriptor
        self._servers: dict[int, ClientConnection] = {}  # by the server's
        self._names: dict[str, ClientConnection] = {}
        self._proofs: deque[tuple[int, float]] = deque()
        self._closings = _Closings()
        self._paused_until, self._complained = 0.0, -_REPORT_EVERY
        self._listening = self._open = True
        self._thread: threading.Thread | None = None
        _proxies.add(self)

    @property
    def port(self) -> int:
        """Where clients connect to."""
        return int(self._listener.getsockname()[1])

    @property
    def inner(self) -> str:
        """Where the server is to listen, as gRPC writes it."""
        return f"unix:{self._inner.path}"

    def start(self) -> None:
        """Begin; the server listens."""
        self._inner.hide()
        self._poll.register(self._bell, select.EPOLLIN)
        self._poll.register(self._listener, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="gradwire-coordinator-proxy", daemon=True)
        self._thread.start()

    def find(self, peer: str) -> ClientConnection | None:
        """The connection that gRPC calls `peer`, if it is still there. For any thread."""
        return self._names.get(peer.removeprefix("unix-abstract:"))

    def proved(self, connection: ClientConnection) -> None:
        """A request on this connection has proved the job's secret. For any thread."""
        now = time.monotonic()
        if now - connection.proof < _PROOFS_APART:
            return
        first, connection.proof = not connection.proof, now
        self._proofs.append((connection.id, now))
        if first:
            self._ring()

    def refuse(self) -> None:
        """Accept no more connections."""
        self._listening = False
        self._ring()

    def close(self) -> None:
        """End all connections, when clients have received what a server that stopped had for them. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self._thread is not None:
            self._ring()
            self._thread.join()
        for connection in list(self._connections.values()):
            self._end(connection)
        self._inner.close()
        self._room.close()
        with self._ringing:
            self.abandon()

    def abandon(self) -> None:
        """In a forked child: close its copies of the descriptors; the parent goes on."""
        _proxies.discard(self)
        self._sockets.abandon()
        self._inner.abandon()
        self._poll.close()
        os.close(self._bell)
        self._bell = -1

    def _ring(self) -> None:
        with self._ringing:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    # -- the thread

    def _run(self) -> None:
        while self._open:
            now = time.monotonic()
            self._enforce(now)
            self._keep_listening(now)
            due = [then for then in (self._limits.due(), self._paused_until) if then]
            self._handle_events(max(0.0, min(due) - now) if due else None)
        self._listener.close()
        deadline = time.monotonic() + _LAST_WORDS
        while self._servers and time.monotonic() < deadline:
            busy = self._handle_events(_QUIET)
            if not busy and not any(connection.outward for connection in self._connections.values()):
                break

    def _enforce(self, now: float) -> None:
        """Report proofs, and do what the limits say."""
        while self._proofs:
            self._limits.proved(*self._proofs.popleft())
        decisions = self._limits.decide(now)
        for number in decisions.opened:
            self._pass_on(self._connections[number])
        for number in decisions.parked:
            self._park(self._connections[number])
        for number, reason in decisions.closed:
            if number in self._connections:
                self._closings.add(reason, self._connections[number].source)
                self._end(self._connections[number])
        self._closings.report(now)

    def _keep_listening(self, now: float) -> None:
        if not self._listening:
            self._listener.close()
            self._paused_until = 0.0
        elif self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._poll.register(self._listener, select.EPOLLIN)

    def _handle_events(self, timeout: float | None) -> bool:
        """Wait for events and handle them; False if there were none."""
        events = self._poll.poll(timeout)
        accepting = False
        for descriptor, event in events:
            if (connection := self._clients.get(descriptor)) is not None:
                self._handle_client(connection, event)
            elif (connection := self._servers.get(descriptor)) is not None:
                self._handle_server(connection, event)
            elif descriptor == self._bell:
                os.eventfd_read(self._bell)
            elif descriptor == self._listener.fileno():
                accepting = True
        if accepting:  # last: a new connection may get a descriptor that was closed above, and has an event here
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
                    continue  # that connection has ended already
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
        """Accept nothing for a moment: descriptors or memory have run out."""
        if now >= self._complained + _REPORT_EVERY:
            log.warning("the coordinator cannot accept connections for now: %s", error.strerror)
            self._complained = now
        self._poll.unregister(self._listener)
        self._paused_until = now + _PAUSE

    def _pass_on(self, connection: ClientConnection) -> None:
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
        """Take a client away from the server, and hear nothing more from it but its end."""
        self._end_server(connection)
        self._poll.modify(connection.client, select.EPOLLRDHUP)

    def _handle_client(self, connection: ClientConnection, event: int) -> None:
        if event & _GONE:
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
        if connection.outward:  # a server that has closed is not watched until this is sent
            self._watch(connection, server_closed=bool(event & _GONE))
            return
        data = _receive(connection.server) if event & (select.EPOLLIN | _GONE) else None
        if data == b"":
            self._server_ended(connection)
        elif self._send_outward(connection, data or b""):
            self._watch(connection)

    def _send_inward(self, connection: ClientConnection, data: bytes) -> None:
        connection.inward = b""
        if connection.server is not None:
            with contextlib.suppress(OSError):  # a server that has ended shows it by its own last bytes
                connection.inward = _send(connection.server, data)

    def _send_outward(self, connection: ClientConnection, data: bytes) -> bool:
        """False if the client is gone."""
        try:
            connection.outward = _send(connection.client, data)
        except OSError:
            self._end(connection)
            return False
        return True

    def _server_ended(self, connection: ClientConnection) -> None:
        """Let the client read to the end, and wait until it ends too: closing at once could cost it the last bytes."""
        self._end_server(connection)
        connection.inward = b""
        with contextlib.suppress(OSError):
            connection.client.shutdown(socket.SHUT_WR)
        self._watch(connection)

    def _watch(self, connection: ClientConnection, *, server_closed: bool = False) -> None:
        """Wait for what can go on: reading where there is room for the bytes, writing where there are bytes."""
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


class _Closings:
    """The log's account of connections that were closed: the first at once, then a sum every few seconds."""

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
    """A listening socket, or an error with the system's own reason."""
    listener = sockets.open(endpoint.ip)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(endpoint.sockaddr)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        hint = {
            errno.EADDRINUSE: "another process, perhaps an earlier run of this job, listens there",
            errno.EADDRNOTAVAIL: "this machine does not have that address",
            errno.EACCES: "ports below 1024 need privileges",
        }.get(error.errno or 0, "")
        why = f"{error.strerror}; {hint}" if hint else error.strerror
        raise TransportError(f"the coordinator cannot listen at {endpoint}: {why}") from error
    listener.setblocking(False)
    return listener


def _receive(sock: socket.socket) -> bytes | None:
    """What has come: nothing at the end of the connection, None if it is only not there yet."""
    try:
        return sock.recv(_CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _send(sock: socket.socket, data: bytes) -> bytes:
    """The rest, for which there is no room."""
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
