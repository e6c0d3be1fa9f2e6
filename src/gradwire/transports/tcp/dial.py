"""The connecting side of TCP: connects, does the TLS handshake if there are credentials, and asks for admission."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from gradwire.errors import Broken, Closed, NoConnection, Refused
from gradwire.security.admission import Dialer, Hello
from gradwire.security.credentials import Credentials, explain
from gradwire.transports.base import CHECK_SECONDS, Check
from gradwire.transports.fork_safe_sockets import Sockets
from gradwire.transports.tcp.accept import WELCOME, Stream
from gradwire.transports.tcp.tls_link import NotTls, TlsStream

RETRY_SECONDS = 0.05
# A rank listens before it registers. If its port refuses connections for this long, the rank is dead, not late.
REFUSING_SECONDS = 5.0
NOT_TLS = "it does not use TLS, and this rank does: give certificates to all ranks or to none"

T = TypeVar("T")
Steps = Generator[int, None, T]  # yields the poll events that it waits for


class Call(ABC):
    """One connection attempt, up to the admission."""

    def __init__(self, sock: socket.socket, key: bytes, hello: Hello) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._hello = hello
        self._dialer = Dialer(key, hello)
        self._steps = self._join()
        self.waits_for = 0  # poll events
        self.stream: Stream | None = None  # set when it is admitted

    @property
    def dialer(self) -> Dialer:
        """The dialer's side of the admission."""
        return self._dialer

    def advance(self) -> bool:
        """Continue as far as possible without waiting. Return whether the peer has admitted the connection.

        After an error the socket is closed.
        """
        try:
            self.waits_for = next(self._steps)
        except StopIteration as end:
            self.stream = end.value
        except BaseException:
            self.close()
            raise
        return self.stream is not None

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    @abstractmethod
    def _connect(self) -> Steps[Stream]:
        """Return the stream that carries the admission, once it is connected."""

    def _join(self) -> Steps[Stream]:
        stream = yield from self._connect()
        _send(stream, self._dialer.start())
        while not self._dialer.done:
            answer = self._dialer.feed((yield from self._receive(stream)))
            if answer:
                _send(stream, answer)
        return stream

    def _receive(self, stream: Stream, most: int | None = None) -> Steps[bytes]:
        """Receive the next bytes from the acceptor, at most `most` or as many as the dialer wants."""
        data = yield from _retried(lambda: stream.recv(most or self._dialer.wanted))
        if not data:
            raise self._ended()
        return data

    def _ended(self) -> Exception:
        """Return the error for a connection that ended during the admission."""
        return self._dialer.eof()

    def _refused(self, reason: str) -> Refused:
        hello = self._hello
        text = f"no link to rank {hello.target}: {reason}"
        return Refused(text, rank=hello.source, peer=hello.target, generation=hello.generation)


class TcpCall(Call):
    """A connection attempt over TCP, with TLS if there are credentials.

    `check_certificate(rank, stream)` returns the reason why a certificate is not that of this rank, or None.
    """

    def __init__(
        self,
        sockets: Sockets,
        address: tuple[str, int],
        key: bytes,
        hello: Hello,
        credentials: Credentials | None,
        check_certificate: Callable[[int, Stream], str | None],
    ) -> None:
        super().__init__(sockets.open(address[0]), key, hello)
        self._address = address
        self._credentials = credentials
        self._check_certificate = check_certificate

    def _connect(self) -> Steps[Stream]:
        yield from connected(self.socket, self.socket.connect_ex(self._address))
        if self._credentials is None:
            return self.socket
        stream = TlsStream(self.socket, self._credentials.client_context(), server=False)
        yield from self._secure(stream)
        return stream

    def _secure(self, stream: TlsStream) -> Steps[None]:
        """Do the TLS handshake, wait until the peer has accepted this rank's certificate, and check the peer's.

        With TLS 1.3 the handshake ends on this side before the peer has checked the certificate.
        """
        try:
            yield from _retried(stream.shake_hands)
            yield from self._receive(stream, len(WELCOME))
            reason = self._check_certificate(self._hello.target, stream)
        except NotTls:
            reason = NOT_TLS
        except ssl.SSLError as error:
            reason = explain(error)
        if reason is not None:
            raise self._refused(reason)


class Attempts:
    """Connection attempts to one peer, one after the other, until one is admitted or the peer is unreachable."""

    def __init__(self, peer: int, name: str, call: Callable[[], Call], deadline: float) -> None:
        self._peer = peer
        self._name = name
        self._call = call
        self._deadline = deadline
        self._refusing_since: float | None = None
        self.current: Call | None = None
        self.due = 0.0  # time of the next attempt

    def advance(self, now: float) -> Call | None:
        """Continue as far as possible without waiting. Return the call that was admitted, or None."""
        if self.current is None and now < self.due:
            return None
        try:
            self.current = self.current or self._call()
            if self.current.advance():
                return self.current
            if now >= self._deadline:
                self.current.close()
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        except (Refused, Closed, Broken):
            raise
        except OSError as error:  # retry an interrupted admission too: the peer drops some if too many dial at once
            self._failed(error, now)
        return None

    def _failed(self, error: OSError, now: float) -> None:
        refusing = isinstance(error, ConnectionRefusedError)
        self._refusing_since = (self._refusing_since or now) if refusing else None
        dead = self._refusing_since is not None and now - self._refusing_since > REFUSING_SECONDS
        if dead or now + RETRY_SECONDS >= self._deadline:
            raise NoConnection(f"{self._name} does not answer: {error}", peer=self._peer) from error
        self.current, self.due = None, now + RETRY_SECONDS

    def close(self) -> None:
        if self.current is not None:
            self.current.close()


def dial(attempts: Sequence[Attempts], check: Check, admitted: Callable[[int, Call], None]) -> None:
    """Run all attempts at the same time. `admitted(index, call)` gets each call that is admitted.

    `check` is called regularly, and may raise to end the wait.
    """
    pending = dict(enumerate(attempts))
    try:
        while True:
            for index, attempt in list(pending.items()):
                call = attempt.advance(time.monotonic())
                if call is not None:
                    del pending[index]
                    admitted(index, call)
            if not pending:
                return
            if not _wait(list(pending.values())):
                check()
    finally:
        for attempt in pending.values():
            attempt.close()


def _wait(attempts: Sequence[Attempts]) -> bool:
    """Wait until an attempt can continue; False if only time has passed."""
    poll, until = select.poll(), time.monotonic() + CHECK_SECONDS
    for attempt in attempts:
        if attempt.current is None:
            until = min(until, attempt.due)
        else:
            poll.register(attempt.current.socket, attempt.current.waits_for)
    return bool(poll.poll(1000 * max(0.0, until - time.monotonic())))


def connected(sock: socket.socket, error: int) -> Steps[None]:
    """Wait until a non-blocking socket is connected; raise if it fails. `error` is the result of `connect_ex`."""
    if error == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        while not poll.poll(0):
            yield select.POLLOUT
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))  # Python raises the subclass, such as ConnectionRefusedError
    if sock.getsockname() == sock.getpeername():
        # On loopback a socket can connect to itself if no process listens on the port and the port is ephemeral.
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _send(stream: Stream, data: bytes) -> None:
    if stream.send(data) < len(data):  # the data is smaller than the buffer of any socket
        raise ConnectionAbortedError(errno.ECONNABORTED, "the peer does not read")


def _retried(attempt: Callable[[], T]) -> Steps[T]:
    """Call `attempt` whenever the socket is readable, until it does not raise `BlockingIOError`."""
    while True:
        try:
            return attempt()
        except BlockingIOError:
            yield select.POLLIN
