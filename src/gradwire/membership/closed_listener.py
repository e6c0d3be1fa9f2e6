"""Listens at the address of an embedded coordinator that has finished, and informs late callers.

Rank 0 stops its coordinator as soon as all ranks have joined, because gRPC must not run in a process that trains and
forks. If no process listened at the address then, a second process of the same rank, or one of another job with the
same port, would try to connect until its deadline. So a thread listens there. It sends one line to every caller and
closes the connection. The line is not authenticated. It can only make a caller give up, and any process that holds the
port could do that.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time

from gradwire.membership.endpoints import Endpoint, join
from gradwire.security.admission import printable
from gradwire.transports.fork_safe_sockets import Sockets

log = logging.getLogger("gradwire.membership")

_GREETING = b"gradwire: the rendezvous is over: "
_LONGEST = 300  # bytes of the line
_MOST_LOGGED = 20  # refused callers


class ClosedListener:
    """Listens at an address until `close`. Raises `OSError` if another process listens there."""

    def __init__(self, endpoint: Endpoint, reason: str) -> None:
        self._line = (_GREETING + reason.encode())[: _LONGEST - 1] + b"\n"
        self._reason = reason
        self._sockets = Sockets()
        self._listener = self._sockets.open(endpoint.ip)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(endpoint.sockaddr)
            self._listener.listen(64)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gradwire-closed", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The listening address: "host:port", or "[host]:port" for an IPv6 address."""
        host, port = self._listener.getsockname()[:2]
        return join(host, port)

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def abandon(self) -> None:
        """Release the socket in a forked child. The parent keeps listening."""
        self._sockets.abandon()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        refused = 0
        while not self._closed:
            poll.poll()
            try:
                sock, source = self._sockets.accept(self._listener)
            except BlockingIOError:
                continue
            except OSError as error:
                if not self._closed:
                    log.warning("late callers of this job's rendezvous get no reason any more: %s", error)
                return
            refused += 1
            if refused <= _MOST_LOGGED:
                log.warning("refused %s: %s", source, self._reason)
            with sock, contextlib.suppress(OSError):
                sock.setblocking(False)
                sock.send(self._line)


def closing_reason_at(endpoint: Endpoint, seconds: float) -> str | None:
    """Return the reason that a `ClosedListener` at this address sends within `seconds`; None if there is none."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(OSError), socket.socket(endpoint.family, socket.SOCK_STREAM) as sock:
        sock.settimeout(seconds)
        sock.connect(endpoint.sockaddr)
        received = bytearray()
        while len(received) < _LONGEST and (part := sock.recv(_LONGEST - len(received))):
            received += part
            if not _GREETING.startswith(received[: len(_GREETING)]):
                return None
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        if received.endswith(b"\n"):
            return printable(received[len(_GREETING) : -1].decode("utf-8", "replace"))
    return None
