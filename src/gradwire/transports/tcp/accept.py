"""The listening side of TCP: admits peers, with limits on bytes, number and time for connections not yet admitted.

One thread runs all admissions at the same time, including TLS handshakes, so a slow or silent connection does not delay
the others. Before its admission a connection can use only the memory of a bounded handshake and of the admission
messages. If there are too many such connections, the oldest one is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gradwire.security.admission import Acceptor, Hello, refusal
from gradwire.security.credentials import Credentials, explain
from gradwire.security.refusal_log import RefusalLog
from gradwire.transports.fork_safe_sockets import Sockets
from gradwire.transports.tcp.tls_link import NotTls, TlsStream

log = logging.getLogger("gradwire.transports")

MAX_PENDING = 256  # connections not yet admitted
ADMISSION_SECONDS = 5.0
UNREAD = 64 << 10
WELCOME = b"!"  # sent when the dialer's certificate is accepted: TLS 1.3 does not tell the dialer
NO_PLAINTEXT = "this rank uses TLS: give that process certificates too (GRADWIRE_TLS_CA, _CERT and _KEY)"

Stream = socket.socket | TlsStream  # a connection during its admission


class Incoming(Protocol):
    """New connections. Its descriptor is readable while there is one."""

    def fileno(self) -> int: ...

    def accept(self) -> tuple[socket.socket, str]:
        """Return the next connection with its source. Raise `BlockingIOError` if there is none."""


class Listener:
    """The connections that arrive at a listening socket."""

    def __init__(self, listener: socket.socket, sockets: Sockets) -> None:
        self._listener, self._sockets = listener, sockets

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> tuple[socket.socket, str]:
        return self._sockets.accept(self._listener)


@dataclass(slots=True)
class _Pending:
    """A connection that is not admitted yet."""

    sock: socket.socket
    source: str
    until: float
    stream: Stream
    secured: bool  # the TLS handshake is done, or there is none
    acceptor: Acceptor


class Acceptance:
    """Accepts connections, and passes on those that prove that they know the job's secret."""

    def __init__(
        self,
        incoming: Incoming,
        key: bytes,
        check: Callable[[Hello, Stream], str | None],
        admitted: Callable[[Stream, Acceptor], None],
        bell: Any,
        credentials: Credentials | None = None,
    ) -> None:
        """`check` returns the reason to refuse a peer, or None. `admitted` gets each connection that is admitted."""
        self._incoming = incoming
        self._key = key
        self._check = check
        self._admitted = admitted
        self._bell = bell
        self._credentials = credentials
        self._pending: dict[int, _Pending] = {}  # by descriptor
        self._stopping = False
        self._paused_until = 0.0
        self._refusals = RefusalLog(log)
        self._thread = threading.Thread(target=self._run, name="gradwire-accept", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._bell.ring()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception:
                # The thread must keep running: losing one connection is better than accepting none.
                log.exception("an incoming connection could not be handled")
                self._paused_until = time.monotonic() + 0.5
        for descriptor in list(self._pending):
            self._drop(descriptor, None)

    def _turn(self) -> None:
        for descriptor, _ in self._poll():
            if descriptor == self._incoming.fileno():
                self._accept()
            elif descriptor in self._pending:
                self._advance(descriptor)
        self._drop_late()

    def _poll(self) -> list[tuple[int, int]]:
        poll = select.poll()
        poll.register(self._bell.fileno(), select.POLLIN)
        now = time.monotonic()
        deadlines = [pending.until for pending in self._pending.values()]
        if now >= self._paused_until:
            poll.register(self._incoming.fileno(), select.POLLIN)
        else:
            deadlines.append(self._paused_until)
        for descriptor in self._pending:
            poll.register(descriptor, select.POLLIN)
        timeout = max(0.0, min(deadlines) - now) * 1000 + 1 if deadlines else None
        return poll.poll(timeout)

    def _accept(self) -> None:
        try:
            sock, source = self._incoming.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Most likely the process has no free descriptors. The listener stays readable: pause instead of spinning.
            log.warning("cannot accept a connection: %s", error)
            self._paused_until = time.monotonic() + 0.5
            return
        sock.setblocking(False)
        if len(self._pending) >= MAX_PENDING:
            oldest = min(self._pending, key=lambda descriptor: self._pending[descriptor].until)
            self._drop(oldest, "too many connections wait for admission, and this is the oldest")
        until = time.monotonic() + ADMISSION_SECONDS
        stream: Stream = sock
        if self._credentials is not None:
            try:
                stream = TlsStream(sock, self._credentials.server_context(), server=True)
            except BaseException:
                sock.close()
                raise
        acceptor = Acceptor(self._key, lambda hello: self._check(hello, stream))
        self._pending[sock.fileno()] = _Pending(sock, source, until, stream, stream is sock, acceptor)

    def _advance(self, descriptor: int) -> None:
        pending = self._pending[descriptor]
        try:
            reason = self._continue_admission(pending)
        except BlockingIOError:
            return
        except NotTls:
            self._answer_in_plaintext(pending.sock)
            reason = f"it does not use TLS; {NO_PLAINTEXT}"
        except ssl.SSLError as error:
            reason = explain(error)
        except OSError as error:
            reason = f"the connection failed: {error}"
        except Exception as error:  # a bug in gradwire must not affect the other connections
            reason = f"could not be handled: {type(error).__name__}: {error}"
        if reason is not None:
            self._drop(descriptor, reason)
            return
        del self._pending[descriptor]
        try:
            self._admitted(pending.stream, pending.acceptor)
        except Exception:
            pending.sock.close()
            log.exception("an incoming connection could not be handled")

    @staticmethod
    def _continue_admission(pending: _Pending) -> str | None:
        """Continue an admission with the data that has arrived. Return a reason to refuse it; None when it is done."""
        stream, acceptor = pending.stream, pending.acceptor
        if not pending.secured and isinstance(stream, TlsStream):
            stream.shake_hands()
            pending.secured = True
            stream.send(WELCOME)
        while not acceptor.done:
            data = stream.recv(acceptor.wanted)
            if not data:
                acceptor.eof()
                hint = "" if stream is pending.sock or acceptor.hello else "; is this rank's certificate its own?"
                return f"{acceptor.refusal}{hint}"
            answer = acceptor.feed(data)
            if answer and stream.send(answer) < len(answer):
                return "does not read its answers"
            if acceptor.refusal is not None:
                return acceptor.refusal
        return None

    @staticmethod
    def _answer_in_plaintext(sock: socket.socket) -> None:
        """Send the reason of the refusal to a dialer without certificates, which cannot read TLS."""
        with contextlib.suppress(OSError):
            sock.send(refusal(NO_PLAINTEXT))

    def _drop_late(self) -> None:
        now = time.monotonic()
        for descriptor in [d for d, pending in self._pending.items() if pending.until <= now]:
            self._drop(descriptor, f"the admission did not finish in {ADMISSION_SECONDS:g} s")

    def _drop(self, descriptor: int, reason: str | None) -> None:
        pending = self._pending.pop(descriptor)
        with contextlib.suppress(OSError):
            # Closing a socket with unread data sends a reset, which could arrive before the reason of the refusal.
            pending.sock.recv(UNREAD)
        with contextlib.suppress(OSError):
            pending.sock.close()
        if reason is not None:
            self._refusals.log("refused a link from %s: %s", pending.source, reason)
