"""The relay: the thread that serves all gRPC connections of one rank.

Only this thread touches the connections. Links use their local sockets, which need no lock. The relay limits what
processes without the job's secret can use: connections, streams that wait for admission, and time.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from typing import Protocol

from gradwire.errors import Closed
from gradwire.security.credentials import Credentials
from gradwire.security.refusal_log import RefusalLog
from gradwire.transports.base import Bell
from gradwire.transports.fork_safe_sockets import Sockets
from gradwire.transports.grpc.connection import CheckCertificate, Connection, RelayedStream, StreamFacts, reason_of
from gradwire.transports.grpc.session import SessionError, StreamState
from gradwire.transports.tcp.accept import NO_PLAINTEXT
from gradwire.transports.tcp.tls_link import NotTls

log = logging.getLogger("gradwire.transports")

MAX_UNPROVEN = 256  # connections without an admitted stream
MAX_WAITING = 256  # streams that wait for the thread that admits them
QUIET_SECONDS = 5.0  # after which a peer's connection without any stream is closed
USE_SECONDS = 30.0  # after which an idle stream sends an empty message: many proxies end idle streams
DRAIN_SECONDS = 1.0  # for the last bytes of closed links, when the relay stops
CHECK_SECONDS = 1.0  # between checks of the times above
DRAIN_POLL_SECONDS = 0.005


class PolledBell(Bell, Protocol):
    """A bell with a descriptor that is readable while it is rung."""

    def fileno(self) -> int: ...


class RelayedSocket(socket.socket):
    """A link's end of the local sockets of a stream."""

    facts: StreamFacts


class Relay:
    """Carries streams between local sockets and the gRPC connections of a rank.

    It is also the queue of the streams that peers have opened: `fileno` and `accept` are for `Acceptance`.
    """

    def __init__(
        self,
        listener: socket.socket,
        sockets: Sockets,
        credentials: Credentials | None,
        waiting: PolledBell,
        wake: PolledBell,
    ) -> None:
        """`waiting` rings while streams wait for admission. `wake` wakes the relay's thread."""
        self._listener = listener
        self._sockets = sockets
        self._credentials = credentials
        self._waiting_bell = waiting
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: deque[tuple[RelayedSocket, str]] = deque()
        self._new: list[Connection] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gradwire-grpc", daemon=True)
        # The fields below belong to the thread.
        self._connections: set[Connection] = set()
        self._poll = select.poll()
        self._polled: dict[Connection | RelayedStream, tuple[int, int]] = {}  # descriptor and events
        self._by_descriptor: dict[int, Connection | RelayedStream] = {}
        self._check_at = 0.0
        self._refusals = RefusalLog(log)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send what closed links have left, within `DRAIN_SECONDS`, and close all connections."""
        with self._lock:
            self._stopping = True
            waiting, self._waiting = self._waiting, deque()
        for link_end, _ in waiting:
            link_end.close()
        self._wake.ring()
        if self._thread.is_alive():
            self._thread.join()

    # -- other threads ------------------------------------------------------------------------------------------------

    def open(self, address: tuple[str, int], check: CheckCertificate) -> RelayedSocket:
        """Begin to open a stream to a peer, and return the link's end of it. Errors are in its `facts`."""
        host, port = address
        name, now = f"[{host}]:{port}" if ":" in host else f"{host}:{port}", time.monotonic()
        context = self._credentials.http2_client_context() if self._credentials is not None else None
        connection = Connection(self._sockets.open(host), name, context, now, address=address, check=check)
        try:
            link_end = self._add_stream(connection, None, now)
        except OSError as error:  # there are no free descriptors
            connection.end(error)
            raise
        with self._lock:
            stopping = self._stopping
            if not stopping:
                self._new.append(connection)
        if stopping:
            self._discard(connection)
            link_end.close()
            raise Closed("the transport is closed")
        self._wake.ring()
        return link_end

    def fileno(self) -> int:
        return self._waiting_bell.fileno()

    def accept(self) -> tuple[socket.socket, str]:
        """Return the next stream that a peer has opened. Raise `BlockingIOError` if there is none."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._waiting_bell.silence()
        raise BlockingIOError

    def _add_stream(self, connection: Connection, state: StreamState | None, now: float) -> RelayedSocket:
        link_end, relay_end = self._sockets.pair(RelayedSocket)
        link_end.facts = StreamFacts(connection.tls)
        stream = RelayedStream(connection, relay_end, link_end.facts, now)
        stream.state = state
        connection.streams.add(stream)
        return link_end

    @staticmethod
    def _discard(connection: Connection) -> None:
        connection.end(ConnectionResetError("the transport was closed"))
        for stream in connection.streams:
            stream.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._poll.register(self._wake.fileno(), select.POLLIN)
        self._poll.register(self._listener.fileno(), select.POLLIN)
        stop_at: float | None = None
        while True:
            if self._stopping:
                stop_at = stop_at or time.monotonic() + DRAIN_SECONDS
                if time.monotonic() >= stop_at or all(one.is_drained for one in self._connections):
                    break
            try:
                self._turn(DRAIN_POLL_SECONDS if self._stopping else CHECK_SECONDS)
            except Exception:  # the thread must keep running: other connections do not depend on this one
                log.exception("the relay of gRPC links could not handle an event")
                time.sleep(DRAIN_POLL_SECONDS)
        for connection in (*self._connections, *self._new):
            self._discard(connection)

    def _turn(self, pause: float) -> None:
        ready = self._poll.poll(1000 * pause)
        now = time.monotonic()
        for descriptor, _ in ready:
            if descriptor == self._wake.fileno():
                self._begin_new(now)
            elif descriptor == self._listener.fileno():
                self._accept(now)
            elif descriptor in self._by_descriptor:
                self._serve(self._by_descriptor[descriptor], now)
        if now >= self._check_at:
            self._check_at = now + CHECK_SECONDS
            self._check_times(now)

    def _begin_new(self, now: float) -> None:
        self._wake.silence()
        with self._lock:
            new, self._new = self._new, []
        self._connections.update(new)
        for connection in new:
            self._serve(connection, now)

    def _serve(self, served: Connection | RelayedStream, now: float) -> None:
        """Continue a connection and its streams, or one stream."""
        connection = served if isinstance(served, Connection) else served.connection
        streams = connection.streams if served is connection else {served}
        try:
            if isinstance(served, Connection):
                for state in served.advance():
                    self._opened(served, state, now)
            elif served.state is None:
                raise ConnectionAbortedError("the link was closed before its connection was open")
            for stream in list(streams):
                assert isinstance(stream, RelayedStream)
                stream.advance(now)
            connection.send()
        except Exception as error:  # one connection must not affect the others
            if not isinstance(error, (OSError, NotTls, SessionError)):
                log.exception("the gRPC connection with %s could not be handled", connection.name)
            self._end(connection, error, now)
        self._tidy(connection)

    def _end(self, connection: Connection, error: Exception, now: float) -> None:
        """End a connection because of an error, and deliver what has arrived on its streams."""
        failure, not_tls = reason_of(error), isinstance(error, NotTls)
        hung_up = isinstance(error, ConnectionResetError)
        if connection.ended or (hung_up and (connection.proven or not connection.received)):
            pass
        elif connection.proven:
            log.warning("the gRPC connection with %s is broken: %s", connection.name, failure)
        elif not connection.dialled:
            reason = f"it does not use TLS; {NO_PLAINTEXT}" if not_tls else failure
            self._refusals.log("refused a link from %s: %s", connection.name, reason)
        connection.end(failure, in_plaintext=not_tls and not connection.dialled)
        for stream in connection.streams:
            stream.advance(now)

    def _tidy(self, connection: Connection) -> None:
        """Forget what has finished, and poll for what the rest waits for."""
        for stream in connection.streams:
            self._update(stream)
        connection.forget_finished()
        if connection.dialled and not connection.streams:
            connection.end(ConnectionResetError("the link was closed"))
        self._update(connection)
        if connection.ended and not connection.streams:
            self._connections.discard(connection)

    def _update(self, served: Connection | RelayedStream) -> None:
        """Poll for the events that a connection or stream waits for now."""
        interest = served.interest
        descriptor, events = self._polled.get(served, (-1, -1))
        if interest is None:
            if descriptor >= 0:
                del self._polled[served], self._by_descriptor[descriptor]
                self._poll.unregister(descriptor)
        elif interest != events:
            self._polled[served] = served.fileno(), interest
            self._by_descriptor[served.fileno()] = served
            self._poll.register(served.fileno(), interest)

    def _accept(self, now: float) -> None:
        try:
            sock, source = self._sockets.accept(self._listener)
        except BlockingIOError:
            return
        except OSError as error:
            # Most likely the process has no free descriptors. The listener stays readable: pause instead of spinning.
            log.warning("cannot accept a connection: %s", error)
            self._poll.unregister(self._listener.fileno())
            return
        unproven = [one for one in self._connections if not one.dialled and not one.proven and not one.ended]
        if len(unproven) >= MAX_UNPROVEN:
            oldest = min(unproven, key=lambda one: one.used_at)
            self._end(oldest, SessionError("too many connections wait for admission, and this is the oldest"), now)
            self._tidy(oldest)
        context = self._credentials.http2_server_context() if self._credentials is not None else None
        connection = Connection(sock, source, context, now)
        self._connections.add(connection)
        self._update(connection)

    def _opened(self, connection: Connection, state: StreamState, now: float) -> None:
        """Pass a stream that a peer has opened to the thread that admits it."""
        try:
            if len(self._waiting) >= MAX_WAITING or self._stopping:
                raise OSError("too many streams wait for admission")
            link_end = self._add_stream(connection, state, now)
        except OSError:
            connection.session.refuse_stream(state)
            return
        with self._lock:
            self._waiting.append((link_end, connection.name))
        self._waiting_bell.ring()

    def _check_times(self, now: float) -> None:
        self._poll.register(self._listener.fileno(), select.POLLIN)  # after a pause
        for connection in list(self._connections):
            for stream in connection.streams:
                connection.used_at = now
                if now - stream.used_at >= USE_SECONDS:
                    stream.show_use(now)
            connection.send()
            if not connection.streams and now - connection.used_at > QUIET_SECONDS:
                silent = SessionError(f"it opened no link within {QUIET_SECONDS:g} s")
                self._end(connection, ConnectionResetError() if connection.proven else silent, now)
            self._tidy(connection)
