"""TLS over a non-blocking socket: the handshake in steps, then encrypted links.

OpenSSL works in memory here (`ssl.SSLObject`), and this module moves its bytes. So the socket stays the one that forked
children drop, a slow handshake waits for nobody, and a lifeline's link can leave TLS when it is admitted.

The end of a link is not announced by TLS (`close_notify`): that says nothing which a goodbye, itself a message inside,
does not say better, and an end without one is a loss, whoever caused it.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import cast

from gradwire.security.credentials import explain, identity_of
from gradwire.transports.base import Buffer, Link, LinkClosed
from gradwire.transports.tcp.link import MAX_BUFFERS, TcpLink, closed_or

log = logging.getLogger("gradwire.transports")

BATCH = 128 << 10  # bytes encrypted at a time
LEAST_PULL = 17 << 10  # a whole record and more
MOST_PULL = 256 << 10
MOST_AT_ONCE = 1 << 20  # bytes of one call, which keeps the other direction waiting
LONGEST_HANDSHAKE = 64 << 10
_FIRST_BYTES = (0x15, 0x16)  # of TLS: an alert, a handshake


class NotTls(Exception):
    """The other side does not speak TLS."""


class TlsStream:
    """One end of a TLS connection. Nothing blocks: `BlockingIOError` where a socket raises it."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        self.socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._lock = threading.Lock()  # one thread may send while another receives, and OpenSSL allows only one
        self._pulled = 0
        self._sealed = memoryview(b"")  # records that the kernel has had no room for
        self._owed = False  # whether the last byte in them has not been counted as sent
        self._ended = False
        self._failed = False  # after bytes that were still good

    def fileno(self) -> int:
        return self.socket.fileno()

    # -- the handshake ------------------------------------------------------------------------------------------------

    def shake_hands(self) -> None:
        """Go on with the handshake; returns when it is done, else `BlockingIOError`.

        `ssl.SSLError` if the sides do not agree, and the other side is told; `NotTls` if it says something else.
        """
        with self._lock:
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    self._push()
                    if not self._pull(LEAST_PULL):
                        raise BlockingIOError from None
                    if self._ended:
                        raise ConnectionResetError("the connection ended during the TLS handshake") from None
                    if self._pulled > LONGEST_HANDSHAKE:
                        raise ConnectionAbortedError("a TLS handshake without end") from None
                except ssl.SSLError:
                    self._push()  # the alert
                    raise
                else:
                    self._push()
                    return

    def identity(self) -> str:
        """Whom the other side's certificate speaks for; ValueError if that is nobody of a gradwire job."""
        return identity_of(self.peer_certificate())

    def peer_certificate(self) -> bytes:
        """The certificate that the other side has shown (DER); ValueError if there is none."""
        certificate = self._tls.getpeercert(binary_form=True)
        if certificate is None:
            raise ValueError("it has shown no certificate")
        return certificate

    # -- bytes --------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether something has come that no poll of the socket will tell."""
        with self._lock:
            return bool(self._tls.pending() or self._incoming.pending or self._failed)

    def recv(self, count: int) -> bytes:
        """At most so many bytes; none at the end."""
        data = bytearray(count)
        return bytes(data[: self.receive([memoryview(data)])])

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers with what has come: the number of bytes, 0 at the end."""
        total = 0
        with self._lock:
            for buffer in buffers:
                filled = 0
                while filled < len(buffer) and total < MOST_AT_ONCE:
                    try:
                        got = self._read(buffer[filled:])
                    except OSError:
                        if not total:
                            raise
                        self._failed = True
                        return total  # what came before the end; the next call finds that
                    if not got:
                        if not total and not self._ended:
                            raise BlockingIOError
                        return total
                    filled += got
                    total += got
        return total

    def _read(self, view: memoryview) -> int:
        while not self._ended:
            try:
                got = cast(int, self._tls.read(len(view), view))  # with a buffer, the number of bytes
            except ssl.SSLWantReadError:
                if not self._pull(min(max(LEAST_PULL, len(view)), MOST_PULL)):
                    return 0
            else:
                self._ended = not got
                return got
        return 0

    def send(self, *buffers: Buffer) -> int:
        """Take bytes as long as there is room for them: how many.

        What has been encrypted must be sent. So where the kernel has no room for all of it, all but one byte counts as
        sent: whoever comes back for that one, as after any send that was cut short, sends the rest on its way.
        """
        with self._lock:
            parts = [memoryview(buffer) for buffer in buffers if len(buffer)]
            sent = 0
            if parts and self._owed:
                if not self._push():
                    raise BlockingIOError
                self._owed = False
                sent = 1
                _take(parts, 1)
            while parts and sent < MOST_AT_ONCE:
                batch = _take(parts, BATCH)
                self._tls.write(batch)
                sent += len(batch)
                if not self._push():
                    self._owed = True
                    sent -= 1
                    break
            if not sent and self._owed:
                raise BlockingIOError
            return sent

    def leave(self) -> bytes:
        """Use the socket without TLS from now on, as the other side does: what has come from there already.

        OpenSSL takes one record at a time from what it is given, so that what follows the last one is untouched.
        """
        with self._lock:
            if self._sealed or self._outgoing.pending or self._tls.pending():
                raise ConnectionAbortedError("something is on its way that belongs inside TLS")
            return self._incoming.read()

    def _pull(self, count: int) -> bool:
        """Take in what the socket has; False if that is nothing now."""
        try:
            data = self.socket.recv(count)
        except BlockingIOError:
            return False
        if not data:
            self._ended = True
        elif not self._pulled and data[0] not in _FIRST_BYTES:
            raise NotTls
        self._pulled += len(data)
        self._incoming.write(data)
        return True

    def _push(self) -> bool:
        """Hand to the socket what is encrypted; False if there was no room for some of it."""
        while True:
            if not self._sealed:
                self._sealed = memoryview(self._outgoing.read())
                if not self._sealed:
                    return True
            try:
                self._sealed = self._sealed[self.socket.send(self._sealed) :]
            except BlockingIOError:
                return False


class TlsLink(TcpLink):
    """A link inside a TLS connection that is set up and admitted."""

    __slots__ = ("_stream",)

    def __init__(self, stream: TlsStream, peer: int, channel: int, forget: Callable[[Link], None]) -> None:
        super().__init__(stream.socket, peer, channel, forget)
        self._stream = stream

    @property
    def pending(self) -> bool:
        """Whether there is something to receive that no poll will tell."""
        return self._stream.pending

    @property
    def peer_certificate(self) -> bytes:
        """The certificate that the peer has shown (DER)."""
        return self._stream.peer_certificate()

    def send(self, buffers: Sequence[Buffer]) -> int:
        try:
            return self._stream.send(*buffers[:MAX_BUFFERS])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._ended(error) from error

    def receive(self, buffers: Sequence[memoryview]) -> int:
        try:
            got = self._stream.receive(buffers)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._ended(error) from error
        if not got:
            raise LinkClosed
        return got

    def _ended(self, error: OSError) -> Exception:
        if not isinstance(error, ssl.SSLError):
            return closed_or(error, self.peer)
        # Somebody on the way has changed the bytes, or the peer has lost its mind: either way nothing more can come.
        log.warning("the link to rank %d is broken: %s", self.peer, explain(error))
        return LinkClosed()


class HeartbeatLink(TcpLink):
    """A lifeline's link that was admitted inside TLS and then has left it: it carries one-time tokens, nothing else.

    Making and checking tokens takes `key`, which both ends have from the admission, and nobody else. A thread without
    Python can send tokens that were made ahead for hours; TLS records it could not.
    """

    __slots__ = ("_early", "key")

    def __init__(self, stream: TlsStream, peer: int, channel: int, forget: Callable[[Link], None], key: bytes) -> None:
        super().__init__(stream.socket, peer, channel, forget)
        self.key = key
        self._early = stream.leave()

    def receive(self, buffers: Sequence[memoryview]) -> int:
        if not self._early:
            return super().receive(buffers)
        part = min(len(buffers[0]), len(self._early))
        buffers[0][:part] = self._early[:part]
        self._early = self._early[part:]
        return part


def _take(parts: list[memoryview], count: int) -> Buffer:
    """Remove at most so many bytes from the front of some views, as one piece."""
    taken = []
    while parts and count:
        head = parts[0][:count]
        taken.append(head)
        count -= len(head)
        if len(head) < len(parts[0]):
            parts[0] = parts[0][len(head) :]
        else:
            parts.pop(0)
    return taken[0] if len(taken) == 1 else b"".join(taken)
