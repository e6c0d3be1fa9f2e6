"""Moves bytes between a TCP or TLS connection and the local sockets of the gRPC streams that it carries.

Each stream has a pair of connected local sockets. A link sends and receives on one of them, and the relay's thread does
so on the other. The kernel bounds the bytes between them, and HTTP/2 bounds the bytes between the two ranks. So a
sender that is faster than its receiver finds its socket full.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import select
import socket
import ssl
import termios
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gradwire.security.credentials import explain
from gradwire.transports.grpc.session import MESSAGE_BYTES, Session, SessionError, StreamState
from gradwire.transports.tcp.accept import NO_PLAINTEXT
from gradwire.transports.tcp.dial import NOT_TLS, connected
from gradwire.transports.tcp.link import tune
from gradwire.transports.tcp.tls_link import NotTls, TlsStream

READ_BYTES = 256 << 10
MOST_UNSENT = 1 << 20  # bytes for a peer that does not read; above it, nothing more is read from that peer

CheckCertificate = Callable[[TlsStream], str | None]
"""Returns the reason why the peer's certificate is not accepted, or None."""


@dataclass(eq=False, slots=True)
class StreamFacts:
    """What the relay's thread and the threads of a link know about a stream."""

    tls: TlsStream | None = None  # of its connection
    admitted: bool = False
    failure: OSError | str | None = None  # why it ended; a text if another attempt would end in the same way


class RelayedStream:
    """A stream, with the relay's end of its local sockets."""

    def __init__(self, connection: Connection, local: socket.socket, facts: StreamFacts, now: float) -> None:
        local.setblocking(False)
        self.connection = connection
        self.facts = facts
        self.state: StreamState | None = None  # None until the connection is open
        self.used_at = now  # when something was last sent
        self._local = local
        self._link_open = True  # the link has not closed its end

    def fileno(self) -> int:
        return self._local.fileno()

    @property
    def closed(self) -> bool:
        """Whether the link has received everything, and the relay has closed its socket."""
        return self._local.fileno() < 0

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.closed and (self.state is None or self.state.sent_end)

    @property
    def interest(self) -> int | None:
        """The events to poll for. With 0, only the end of the link is reported; with None, nothing is."""
        if self.closed:
            return None
        if self.state is None:
            return 0
        reads = self._link_open and self.connection.room(self.state) > 0
        events = (select.POLLIN if reads else 0) | (select.POLLOUT if self.state.arrived else 0)
        return events or None  # with 0, the poll would report the end of the link again and again

    def advance(self, now: float) -> None:
        """Move bytes in both directions, as far as there is room. Raise `SessionError` if the connection fails."""
        state = self.state
        if state is None or self.closed:
            return
        self._deliver(state)
        self._collect(state, now)
        if state.received_end and not state.arrived:
            if state.reason is not None and self.facts.failure is None:
                self.facts.failure = ConnectionResetError(errno.ECONNRESET, state.reason)
            self._local.close()
            self.connection.session.end(state)

    def show_use(self, now: float) -> None:
        """Send something that carries no data."""
        if self.state is not None and self._link_open and not self.state.sent_end:
            self.used_at = now
            self.connection.session.show_use(self.state)

    def fail(self, failure: OSError | str) -> None:
        """End the stream because its connection has ended. Bytes that have arrived are still delivered."""
        self.facts.failure = self.facts.failure or failure
        self.state = self.state or StreamState(0)
        self.state.received_end = self.state.sent_end = True

    def close(self) -> None:
        """Close the local socket at once."""
        self._local.close()

    def _deliver(self, state: StreamState) -> None:
        """Pass bytes that have arrived to the link."""
        count = 0
        try:
            while state.arrived:
                sent = self._local.send(state.arrived[:READ_BYTES])
                del state.arrived[:sent]
                count += sent
        except BlockingIOError:
            pass
        except OSError:  # the link is closed: nothing reads these bytes
            count += len(state.arrived)
            state.arrived.clear()
        if count:
            self.connection.session.consumed(state, count)

    def _collect(self, state: StreamState, now: float) -> None:
        """Pass bytes that the link has sent to the peer, and the end of the link."""
        while self._link_open and (room := self.connection.room(state)):
            data = b""
            try:
                data = self._local.recv(min(room, MESSAGE_BYTES))
            except BlockingIOError:
                return
            except OSError:  # the link was closed
                pass
            if not data:
                self._link_open = False
                self.connection.session.end(state)
            else:
                self.connection.session.send(state, data)
                self.used_at = now
            self.connection.send()


class Connection:
    """A TCP or TLS connection with its session. `name` is the peer's address.

    A connection that this rank opens carries one stream. One that it accepts carries as many as the peer opens, because
    a proxy may use one connection for many links.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        context: ssl.SSLContext | None,
        now: float,
        *,
        address: tuple[str, int] | None = None,
        check: CheckCertificate = lambda tls: None,
    ) -> None:
        """`address` is that of the peer if this rank opens the connection. `check` checks the peer's certificate."""
        sock.setblocking(False)
        self.name = name
        self.dialled = address is not None
        self.streams: set[RelayedStream] = set()
        self.session = Session(client=self.dialled)
        self.tls = TlsStream(sock, context, server=not self.dialled) if context is not None else None
        self.ended = False
        self.used_at = now  # when it last had a stream
        self.received = False  # whether any byte has arrived
        self._proven = False
        self._socket = sock
        self._check = check
        self._connecting = iter(connected(sock, sock.connect_ex(address))) if address is not None else iter(())
        self._is_connected = self._is_open = False
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def interest(self) -> int | None:
        """The events to poll for, or None."""
        if self.ended:
            return None
        if not self._is_connected:
            return select.POLLOUT if self.dialled else select.POLLIN
        reads = self._unsent_bytes <= MOST_UNSENT
        return (select.POLLIN if reads else 0) | (select.POLLOUT if self._unsent_bytes else 0)

    @property
    def proven(self) -> bool:
        """Whether one of its streams was admitted."""
        return self._proven or any(stream.facts.admitted for stream in self.streams)

    def forget_finished(self) -> None:
        """Forget the streams that need nothing more."""
        self._proven = self.proven  # before the streams that prove it are forgotten
        self.streams = {stream for stream in self.streams if not stream.finished}

    @property
    def is_drained(self) -> bool:
        """Whether the peer's kernel has all bytes of all links."""
        if self.ended or not self._is_open:
            return True
        sending = any(not state.sent_end for state in self.session.streams.values())
        return not sending and not self._unsent_bytes and not _unacknowledged(self._socket)

    def room(self, state: StreamState) -> int:
        """Return how many bytes of a stream may be sent now."""
        return 0 if self.ended or self._unsent_bytes else self.session.room(state)

    def advance(self) -> Iterator[StreamState]:
        """Move what can be moved without waiting, and yield the streams that the peer opens.

        Raise `OSError`, `NotTls` or `SessionError` if the connection fails.
        """
        if not self._is_open and not self._open():
            return
        self.send()
        while self._unsent_bytes <= MOST_UNSENT:
            try:
                data = (self.tls or self._socket).recv(READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
            self.received = True
            yield from self.session.receive(data)
            self.send()

    def send(self) -> None:
        """Send the session's bytes, as far as there is room. `advance` finds errors."""
        if self.ended or not self._is_open:
            return
        if output := self.session.output():
            self._unsent.append(memoryview(output))
            self._unsent_bytes += len(output)
        with contextlib.suppress(OSError):  # there is no room, or the connection has failed
            while self._unsent:
                sent = (self.tls or self._socket).send(self._unsent[0])
                self._unsent_bytes -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()

    def end(self, failure: OSError | str, *, in_plaintext: bool = False) -> None:
        """Close the connection and end its streams. With `in_plaintext`, the peer cannot read TLS."""
        if self.ended:
            return
        with contextlib.suppress(SessionError):
            self.session.close()
        self.send()
        with contextlib.suppress(OSError):
            if in_plaintext:
                refusing = Session(client=False)
                refusing.refuse(NO_PLAINTEXT)
                self._socket.send(refusing.output())
            while self._socket.recv(READ_BYTES):  # closing a socket with unread data would reset the connection
                pass
        self.ended = True
        self._socket.close()
        for stream in self.streams:
            stream.fail(failure)

    def _open(self) -> bool:
        """Connect, do the TLS handshake if there is one, and open this rank's stream. Return whether that is done."""
        if not self._is_connected:
            for _ in self._connecting:
                return False
            self._is_connected = True
            tune(self._socket)
        if self.tls is not None:
            try:
                self.tls.shake_hands()
            except BlockingIOError:
                return False
            if reason := self._check(self.tls):
                raise SessionError(reason, final=True)
        self._is_open = True
        for stream in self.streams:
            stream.state = self.session.open(self.name, "http" if self.tls is None else "https")
        return True


def reason_of(error: Exception) -> OSError | str:
    """Return why a connection failed; a text if another attempt would fail in the same way."""
    if isinstance(error, NotTls):
        return NOT_TLS
    if isinstance(error, ssl.SSLError):
        return explain(error)
    if isinstance(error, SessionError):
        return str(error) if error.final else ConnectionAbortedError(errno.ECONNABORTED, str(error))
    return error if isinstance(error, OSError) else OSError(errno.EIO, str(error))


def _unacknowledged(sock: socket.socket) -> int:
    """Return how many bytes the peer's kernel has not acknowledged yet; 0 if that cannot be known."""
    found = array.array("i", [0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, found)
    return found[0]
