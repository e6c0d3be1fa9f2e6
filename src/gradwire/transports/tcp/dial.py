"""The connecting side of TCP: connects, speaks TLS if there are credentials, and asks for admission."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from gradwire.errors import Broken, Closed, NoConnection, Refused
from gradwire.security.admission import Dialer, Hello
from gradwire.security.credentials import Credentials, explain
from gradwire.transports.base import CHECK_SECONDS, Check
from gradwire.transports.fork_safe_sockets import Sockets
from gradwire.transports.tcp.accept import WELCOME, Line
from gradwire.transports.tcp.tls_link import NotTls, TlsStream

RETRY_SECONDS = 0.05
# A rank listens before it registers: one whose port refuses connections for so long is dead, not late.
REFUSING_SECONDS = 5.0

T = TypeVar("T")
Talk = Generator[int, None, T]  # goes on when the socket is ready for what it yields: events of poll


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
        self.socket = sockets.open(address[0])
        self.socket.setblocking(False)
        self._talk = self._converse(self.socket.connect_ex(address))
        self.waits_for = 0  # events of poll
        self.line: Line | None = None  # when it is admitted

    @property
    def dialer(self) -> Dialer:
        """Its side of the admission."""
        return self._dialer

    def go_on(self) -> bool:
        """Go as far as possible without waiting; whether the peer has let it in. What fails is closed."""
        try:
            self.waits_for = next(self._talk)
        except StopIteration as end:
            self.line = end.value
        except BaseException:
            self.close()
            raise
        return self.line is not None

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def _converse(self, trouble: int) -> Talk[Line]:
        yield from connected(self.socket, trouble)
        line: Line = self.socket
        if self._credentials is not None:
            line = TlsStream(self.socket, self._credentials.client_context(), server=False)
            yield from self._secure(line)
        _say(line, self._dialer.start())
        while not self._dialer.done:
            answer = self._dialer.feed((yield from self._hear(line)))
            if answer:
                _say(line, answer)
        return line

    def _secure(self, line: TlsStream) -> Talk[None]:
        """Shake hands, wait until the other side has accepted our certificate, and make sure that its own fits.

        With TLS 1.3 this side is done before the other one has looked at what it sent.
        """
        hello = self._hello
        try:
            yield from _patiently(line.shake_hands)
            yield from self._hear(line, len(WELCOME))
            reason = self._impostor(hello.target, line)
        except NotTls:
            reason = "it does not use TLS, and this rank does: give certificates to all ranks or to none"
        except ssl.SSLError as error:
            reason = explain(error)
        if reason is not None:
            text = f"no link to rank {hello.target}: {reason}"
            raise Refused(text, rank=hello.source, peer=hello.target, generation=hello.generation)

    def _hear(self, line: Line, most: int | None = None) -> Talk[bytes]:
        """What the acceptor says next, as much as the dialer wants."""
        data = yield from _patiently(lambda: line.recv(most or self._dialer.wanted))
        if not data:
            raise self._dialer.eof()
        return data


class Attempts:
    """Calls to one peer, one after the other, until it lets one in or there is no hope."""

    def __init__(self, peer: int, name: str, call: Callable[[], Call], deadline: float) -> None:
        self._peer = peer
        self._name = name
        self._call = call
        self._deadline = deadline
        self._refusing_since: float | None = None
        self.present: Call | None = None
        self.due = 0.0  # when to call again

    def go_on(self, now: float) -> Call | None:
        """As far as possible without waiting: the call that is admitted, if there is one."""
        if self.present is None and now < self.due:
            return None
        try:
            self.present = self.present or self._call()
            if self.present.go_on():
                return self.present
            if now >= self._deadline:
                self.present.close()
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        except (Refused, Closed, Broken):
            raise
        except OSError as error:  # an admission that was broken off is tried again too: many peers may dial at once
            self._failed(error, now)
        return None

    def _failed(self, error: OSError, now: float) -> None:
        refusing = isinstance(error, ConnectionRefusedError)
        self._refusing_since = (self._refusing_since or now) if refusing else None
        dead = self._refusing_since is not None and now - self._refusing_since > REFUSING_SECONDS
        if dead or now + RETRY_SECONDS >= self._deadline:
            raise NoConnection(f"{self._name} does not answer: {error}", peer=self._peer) from error
        self.present, self.due = None, now + RETRY_SECONDS

    def close(self) -> None:
        if self.present is not None:
            self.present.close()


def dial(attempts: Sequence[Attempts], check: Check, admitted: Callable[[int, Call], None]) -> None:
    """All of these at the same time; `admitted` is told of each, by its index. `check` may end the wait by raising."""
    pending = dict(enumerate(attempts))
    try:
        while True:
            for index, attempt in list(pending.items()):
                call = attempt.go_on(time.monotonic())
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
    """Until one can go on; False if time has passed."""
    poll, until = select.poll(), time.monotonic() + CHECK_SECONDS
    for attempt in attempts:
        if attempt.present is None:
            until = min(until, attempt.due)
        else:
            poll.register(attempt.present.socket, attempt.present.waits_for)
    return bool(poll.poll(1000 * max(0.0, until - time.monotonic())))


def connected(sock: socket.socket, trouble: int) -> Talk[None]:
    """A socket that does not block becomes connected; `trouble` is what `connect_ex` said."""
    if trouble == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        while not poll.poll(0):
            yield select.POLLOUT
        trouble = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if trouble:
        raise OSError(trouble, os.strerror(trouble))  # which makes it a ConnectionRefusedError where it is one
    if sock.getsockname() == sock.getpeername():
        # On loopback a socket can meet itself where nobody listens, if the port is among the ephemeral ones.
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _say(line: Line, data: bytes) -> None:
    if line.send(data) < len(data):  # it is less than any socket's buffer
        raise ConnectionAbortedError(errno.ECONNABORTED, "it takes nothing in")


def _patiently(attempt: Callable[[], T]) -> Talk[T]:
    while True:
        try:
            return attempt()
        except BlockingIOError:
            yield select.POLLIN
