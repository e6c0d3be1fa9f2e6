"""Listens at the address of an embedded coordinator that has finished, and tells late callers so.

Rank 0 stops its coordinator as soon as the job is complete: no gRPC in a process that trains and forks. Without anybody
at the door, a second process of some rank, or one of another job with the same port, would knock until its deadline.
So a thread listens there that says one line to everybody and hangs up. The line is not authenticated: it can only turn
away, which whoever holds the port could do anyhow.
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
_LONGEST = 300
_LOGGED = 20


class ClosedListener:
    """Holds an address until it is closed; `OSError` if somebody else has it."""

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
        self._thread = threading.Thread(target=self._run, name="gradwire-door", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens: "host:port", or "[host]:port" for an IPv6 address."""
        host, port = self._listener.getsockname()[:2]
        return join(host, port)

    def close(self) -> None:
        """Give the address up."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def abandon(self) -> None:
        """In a forked child: the address stays the parent's."""
        self._sockets.abandon()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        turned_away = 0
        while not self._closed:
            poll.poll()
            try:
                sock, source = self._sockets.accept(self._listener)
            except BlockingIOError:
                continue
            except OSError as error:
                if not self._closed:
                    log.warning("the rendezvous of this job turns nobody away any more: %s", error)
                return
            turned_away += 1
            if turned_away <= _LOGGED:
                log.warning("refused %s: %s", source, self._reason)
            with sock, contextlib.suppress(OSError):
                sock.setblocking(False)
                sock.send(self._line)


def told_at(endpoint: Endpoint, seconds: float) -> str | None:
    """What a `ClosedListener` at this address says within that time, if one is there."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(OSError), socket.socket(endpoint.family, socket.SOCK_STREAM) as knock:
        knock.settimeout(seconds)
        knock.connect(endpoint.sockaddr)
        heard = bytearray()
        while len(heard) < _LONGEST and (part := knock.recv(_LONGEST - len(heard))):
            heard += part
            if not _GREETING.startswith(heard[: len(_GREETING)]):
                return None
            knock.settimeout(max(0.001, deadline - time.monotonic()))
        if heard.endswith(b"\n"):
            return printable(heard[len(_GREETING) : -1].decode("utf-8", "replace"))
    return None
