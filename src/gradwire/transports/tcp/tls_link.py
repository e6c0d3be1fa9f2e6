"""TLS over a non-blocking socket: the handshake in steps, then encrypted links.

OpenSSL works in memory here (`ssl.SSLObject`), and this module moves its bytes to and from the socket. So forked
children can close the socket, a slow handshake does not block a thread, and a lifeline link can leave TLS after its
admission.

Links do not send `close_notify` at their end. A goodbye is a control message of its own, and the end of a link without
a goodbye counts as a loss in any case.
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
LEAST_PULL = 17 << 10  # more than the largest TLS record
MOST_PULL = 256 << 10
MOST_AT_ONCE = 1 << 20  # bytes in one call, because a call blocks the other direction
LONGEST_HANDSHAKE = 64 << 10
_FIRST_BYTES = (0x15, 0x16)  # the first byte of a TLS alert and of a TLS handshake


class NotTls(Exception):
    """The peer does not use TLS."""


class TlsStream:
    """One end of a TLS connection. No method blocks; they raise `BlockingIOError` like a non-blocking socket."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        self.socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._lock = threading.Lock()  # one thread may send while another receives, but OpenSSL allows only one call
        self._pulled = 0
        self._sealed = memoryview(b"")  # encrypted records for which the kernel had no room
        self._owed = False  # whether the last byte in them was not counted as sent
        self._ended = False
        self._failed = False  # an error was found after valid bytes; the next call raises it

    def fileno(self) -> int:
        return self.socket.fileno()

    # -- the handshake ------------------------------------------------------------------------------------------------

    def shake_hands(self) -> None:
        """Continue the handshake. Return when it is done; raise `BlockingIOError` if the peer has to answer first.

        Raise `ssl.SSLError` if the handshake fails, after sending an alert to the peer. Raise `NotTls` if the peer
        does not use TLS.
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
        """Return the identity in the peer's certificate; raise ValueError if it is not a certificate of gradwire."""
        return identity_of(self.peer_certificate())

    def peer_certificate(self) -> bytes:
        """Return the peer's certificate (DER); raise ValueError if there is none."""
        certificate = self._tls.getpeercert(binary_form=True)
        if certificate is None:
            raise ValueError("the peer has sent no certificate")
        return certificate

    # -- bytes --------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether there is data that was already read from the socket, so that a poll would not report it."""
        with self._lock:
            return bool(self._tls.pending() or self._incoming.pending or self._failed)

    def recv(self, count: int) -> bytes:
        """Receive at most `count` bytes; none at the end."""
        data = bytearray(count)
        return bytes(data[: self.receive([memoryview(data)])])

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers with bytes that have arrived, and return their number; 0 at the end."""
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
                        return total  # the bytes before the error; the next call raises it
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
        """Send bytes as long as there is room for them, and return their number.

        Encrypted bytes cannot be taken back. So if the kernel has no room for all of them, all but one count as sent.
        The caller calls again for the missing byte, as after any partial send, and that call sends the rest.
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
        """Stop using TLS on this socket, as the peer does. Return the plain bytes that have arrived already.

        OpenSSL consumes one record at a time, so the bytes after the last record are not lost.
        """
        with self._lock:
            if self._sealed or self._outgoing.pending or self._tls.pending():
                raise ConnectionAbortedError("data of the TLS connection is still in transit")
            return self._incoming.read()

    def _pull(self, count: int) -> bool:
        """Read from the socket; False if nothing has arrived."""
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
        """Write encrypted bytes to the socket; False if there was no room for all of them."""
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
    """A link inside an admitted TLS connection."""

    __slots__ = ("_stream",)

    def __init__(self, stream: TlsStream, peer: int, channel: int, forget: Callable[[Link], None]) -> None:
        super().__init__(stream.socket, peer, channel, forget)
        self._stream = stream

    @property
    def pending(self) -> bool:
        """Whether there is data to receive that a poll of the socket does not report."""
        return self._stream.pending

    @property
    def peer_certificate(self) -> bytes:
        """The peer's certificate (DER)."""
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
        # The bytes were changed in transit, or the peer sent invalid records. The connection cannot be used any more.
        log.warning("the link to rank %d is broken: %s", self.peer, explain(error))
        return LinkClosed()


class HeartbeatLink(TcpLink):
    """A lifeline link that left TLS after its admission. It carries only one-time tokens.

    Making and checking tokens needs `key`, a secret of both ends that results from the admission. The native thread can
    send tokens made in advance for hours without the interpreter. It could not do that with TLS records.
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
    """Remove at most `count` bytes from the front of a list of views, and return them in one piece."""
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
