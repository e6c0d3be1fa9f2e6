"""The side of a connection that dials: it connects, speaks TLS if there are credentials, and asks to be admitted."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import TypeVar

from gradwire.errors import Refused
from gradwire.security.admission import Dialer, Hello
from gradwire.security.tls import Credentials, explain
from gradwire.transports.base import CHECK_SECONDS, Check
from gradwire.transports.sockets import Sockets
from gradwire.transports.tcp_accept import WELCOME, Line
from gradwire.transports.tls import NotTls, TlsStream

T = TypeVar("T")


class Call:
    """One connection on its way to being admitted. `impostor` tells why a certificate cannot be the peer's."""

    def __init__(
        self,
        sockets: Sockets,
        address: tuple[str, int],
        key: bytes,
        hello: Hello,
        credentials: Credentials | None,
        impostor: Callable[[int, Line], str | None],
    ) -> None:
        self._hello = hello
        self._dialer = Dialer(key, hello)
        self._credentials = credentials
        self._impostor = impostor
        self._connected = self._greeted = False
        self._socket = sockets.open(address[0])
        self._socket.setblocking(False)
        self._trouble = self._socket.connect_ex(address)

    def greet(self) -> None:
        """Say the first word already, if that can be done without waiting; what goes wrong shows when it matters."""
        if self._credentials is None:
            try:
                self._connect(time.monotonic(), _no_time)
                self._say_hello(self._socket)
            except BlockingIOError:
                pass
            except OSError as error:  # the system tells it only once
                self._trouble = error.errno or errno.EIO

    def admitted(self, deadline: float, check: Check) -> Line:
        """The connection, when the peer has let it in; it is closed if that fails."""
        try:
            self._connect(deadline, check)
            line: Line = self._socket
            if self._credentials is not None:
                line = TlsStream(self._socket, self._credentials.client_context(), server=False)
                self._secure(line, deadline, check)
            self._say_hello(line)
            while not self._dialer.done:
                answer = self._dialer.feed(self._hear(line, deadline, check))
                if answer:
                    _say(line, answer)
        except BaseException:
            self.close()
            raise
        return line

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _connect(self, deadline: float, check: Check) -> None:
        if not self._connected:
            await_connection(self._socket, self._trouble, deadline, check)
            self._connected = True

    def _say_hello(self, line: Line) -> None:
        if not self._greeted:
            _say(line, self._dialer.start())
            self._greeted = True

    def _secure(self, line: TlsStream, deadline: float, check: Check) -> None:
        """Shake hands, wait until the other side has accepted our certificate, and make sure that its own fits.

        With TLS 1.3 this side is done before the other one has looked at what it sent.
        """
        hello = self._hello
        try:
            _patiently(line.shake_hands, line, deadline, check)
            self._hear(line, deadline, check, len(WELCOME))
            reason = self._impostor(hello.target, line)
        except NotTls:
            reason = "it does not use TLS, and this rank does: give certificates to all ranks or to none"
        except ssl.SSLError as error:
            reason = explain(error)
        if reason is not None:
            text = f"no link to rank {hello.target}: {reason}"
            raise Refused(text, rank=hello.source, peer=hello.target, generation=hello.generation)

    def _hear(self, line: Line, deadline: float, check: Check, most: int | None = None) -> bytes:
        """What the acceptor says next, as much as the dialer wants."""
        data = _patiently(lambda: line.recv(most or self._dialer.wanted), line, deadline, check)
        if not data:
            raise self._dialer.eof()
        return data


def await_connection(sock: socket.socket, trouble: int, deadline: float, check: Check) -> None:
    """Until a socket that does not block is connected; `trouble` is what `connect_ex` said."""
    if trouble == errno.EINPROGRESS:
        _await(sock, select.POLLOUT, deadline, check)
        trouble = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if trouble:
        raise OSError(trouble, os.strerror(trouble))  # which makes it a ConnectionRefusedError where it is one
    if sock.getsockname() == sock.getpeername():
        # On loopback a socket can meet itself where nobody listens, if the port is among the ephemeral ones.
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _no_time() -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _await(sock: Line, events: int, deadline: float, check: Check) -> None:
    poll = select.poll()
    poll.register(sock, events)
    while not poll.poll(1000 * min(CHECK_SECONDS, max(0.0, deadline - time.monotonic()))):
        check()
        if time.monotonic() >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def _say(line: Line, data: bytes) -> None:
    if line.send(data) < len(data):  # it is less than any socket's buffer
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _patiently(attempt: Callable[[], T], line: Line, deadline: float, check: Check) -> T:
    while True:
        try:
            return attempt()
        except BlockingIOError:
            _await(line, select.POLLIN, deadline, check)
