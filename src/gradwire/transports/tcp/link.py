"""A link over a connected socket, and the options of TCP sockets."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Callable, Sequence

from gradwire.errors import TransportError
from gradwire.transports.base import Buffer, Link, LinkClosed

MAX_BUFFERS = 512  # in one system call; Linux accepts 1,024
TCP_RTO_MAX_MS = 44  # a socket option of Linux that Python's socket module does not have yet
UNANSWERED_MS = 700  # slow heartbeats are 500 ms apart; without a route, Linux does not even retransmit
# Three fields of Linux's struct tcp_info: tcpi_retransmits, tcpi_unacked (segments), tcpi_last_ack_recv (ms ago).
_TCP_INFO = struct.Struct("@2xB21xI28xI")
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT, errno.ENOTCONN, errno.EBADF)


class SocketLink:
    """A connected, admitted, non-blocking socket."""

    __slots__ = ("_forget", "_socket", "channel", "peer")

    def __init__(self, sock: socket.socket, peer: int, channel: int, forget: Callable[[Link], None]) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.channel = channel
        self._socket = sock
        self._forget = forget

    def send(self, buffers: Sequence[Buffer]) -> int:
        try:
            if len(buffers) == 1:
                return self._socket.send(buffers[0])
            return self._socket.sendmsg(buffers[:MAX_BUFFERS])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise closed_or(error, self.peer) from error

    def receive(self, buffers: Sequence[memoryview]) -> int:
        try:
            if len(buffers) == 1:
                got = self._socket.recv_into(buffers[0])
            else:
                got = self._socket.recvmsg_into(buffers[:MAX_BUFFERS])[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise closed_or(error, self.peer) from error
        if not got:
            raise LinkClosed
        return got

    def close(self) -> None:
        # A shutdown wakes a thread that polls the socket; close alone does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._forget(self)

    def fileno(self) -> int:
        return self._socket.fileno()


class TcpLink(SocketLink):
    """A link over a TCP connection."""

    __slots__ = ()

    def __init__(self, sock: socket.socket, peer: int, channel: int, forget: Callable[[Link], None]) -> None:
        tune(sock)
        super().__init__(sock, peer, channel, forget)

    def repair_within(self, seconds: float) -> None:
        with contextlib.suppress(OSError):  # before Linux 6.15
            self._socket.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, int(1000 * seconds))

    def drops_packets(self) -> bool:
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            retransmits, unacknowledged, since_answer = _TCP_INFO.unpack(info)
        except (OSError, AttributeError, struct.error):  # the socket was closed, or this is not Linux
            return False
        return bool((unacknowledged and retransmits) or since_answer > UNANSWERED_MS)


def closed_or(error: OSError, peer: int) -> Exception:
    """Return the exception that a link raises for an error of its socket."""
    if error.errno in _GONE:
        return LinkClosed()
    return TransportError(f"the link to rank {peer} failed: {error}", peer=peer)


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and keep the connection alive in firewalls.

    Keepalive ends a connection only after more than ten minutes without an answer. The lifeline detects lost hosts.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 127)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
