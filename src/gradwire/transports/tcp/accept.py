"""The listening side of TCP: admits peers, within limits on bytes, number and time for callers not yet admitted.

One thread runs every admission at once, TLS handshakes too, so a slow or silent stranger delays nobody. Nothing from a
stranger is stored beyond the frames of an admission and of a bounded handshake, and of too many strangers the one that
has dawdled longest is shown out first.
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
from typing import Any

from gradwire.security.admission import Acceptor, Hello, refusal
from gradwire.security.credentials import Credentials, explain
from gradwire.security.refusal_log import RefusalLog
from gradwire.transports.fork_safe_sockets import Sockets
from gradwire.transports.tcp.tls_link import NotTls, TlsStream

log = logging.getLogger("gradwire.transports")

MAX_STRANGERS = 256
ADMISSION_SECONDS = 5.0
UNREAD = 64 << 10
WELCOME = b"!"  # to a dialer whose certificate is accepted, since its side of TLS does not tell it
NO_PLAINTEXT = "links here are TLS: give that process certificates too (GRADWIRE_TLS_CA, _CERT and _KEY)"

Line = socket.socket | TlsStream  # a connection during its admission


@dataclass(slots=True)
class _Stranger:
    sock: socket.socket
    source: str
    until: float
    line: Line
    secured: bool
    acceptor: Acceptor


class Acceptance:
    """Accepts connections on a listener and hands on those that prove to know the job's secret."""

    def __init__(
        self,
        listener: socket.socket,
        sockets: Sockets,
        key: bytes,
        check: Callable[[Hello, Line], str | None],
        admitted: Callable[[Line, Acceptor], None],
        bell: Any,
        credentials: Credentials | None = None,
    ) -> None:
        self._listener = listener
        self._sockets = sockets
        self._key = key
        self._check = check
        self._admitted = admitted
        self._bell = bell
        self._credentials = credentials
        self._strangers: dict[int, _Stranger] = {}
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
                # Better to lose one link than to stop accepting.
                log.exception("a connection could not be handled")
                self._paused_until = time.monotonic() + 0.5
        for descriptor in list(self._strangers):
            self._dismiss(descriptor, None)

    def _turn(self) -> None:
        for descriptor, _ in self._poll():
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._strangers:
                self._hear(descriptor)
        self._show_out_the_late()

    def _poll(self) -> list[tuple[int, int]]:
        poll = select.poll()
        poll.register(self._bell.fileno(), select.POLLIN)
        now = time.monotonic()
        deadlines = [stranger.until for stranger in self._strangers.values()]
        if now >= self._paused_until:
            poll.register(self._listener.fileno(), select.POLLIN)
        else:
            deadlines.append(self._paused_until)
        for descriptor in self._strangers:
            poll.register(descriptor, select.POLLIN)
        timeout = max(0.0, min(deadlines) - now) * 1000 + 1 if deadlines else None
        return poll.poll(timeout)

    def _accept(self) -> None:
        try:
            sock, source = self._sockets.accept(self._listener)
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors, most likely: wait instead of spinning on a listener that stays readable.
            log.warning("cannot accept a connection: %s", error)
            self._paused_until = time.monotonic() + 0.5
            return
        sock.setblocking(False)
        if len(self._strangers) >= MAX_STRANGERS:
            eldest = min(self._strangers, key=lambda descriptor: self._strangers[descriptor].until)
            self._dismiss(eldest, "too many connections that say nothing")
        until = time.monotonic() + ADMISSION_SECONDS
        line: Line = sock
        if self._credentials is not None:
            try:
                line = TlsStream(sock, self._credentials.server_context(), server=True)
            except BaseException:
                sock.close()
                raise
        acceptor = Acceptor(self._key, lambda hello: self._check(hello, line))
        self._strangers[sock.fileno()] = _Stranger(sock, source, until, line, line is sock, acceptor)

    def _hear(self, descriptor: int) -> None:
        stranger = self._strangers[descriptor]
        try:
            reason = self._converse(stranger)
        except BlockingIOError:
            return
        except NotTls:
            self._answer_in_plaintext(stranger.sock)
            reason = f"what arrived is not TLS; {NO_PLAINTEXT}"
        except ssl.SSLError as error:
            reason = explain(error)
        except OSError as error:
            reason = f"broke off: {error}"
        except Exception as error:  # a bug of ours, which costs others nothing
            reason = f"could not be handled: {type(error).__name__}: {error}"
        if reason is not None:
            self._dismiss(descriptor, reason)
            return
        del self._strangers[descriptor]
        try:
            self._admitted(stranger.line, stranger.acceptor)
        except Exception:
            stranger.sock.close()
            log.exception("a connection could not be handled")

    @staticmethod
    def _converse(stranger: _Stranger) -> str | None:
        """Go on with an admission, as far as it goes: a reason to refuse it, or None when it is done."""
        line, acceptor = stranger.line, stranger.acceptor
        if not stranger.secured and isinstance(line, TlsStream):
            line.shake_hands()
            stranger.secured = True
            line.send(WELCOME)
        while not acceptor.done:
            data = line.recv(acceptor.wanted)
            if not data:
                acceptor.eof()
                hint = "" if line is stranger.sock or acceptor.hello else "; is this rank's certificate its own?"
                return f"{acceptor.refusal}{hint}"
            answer = acceptor.feed(data)
            if answer and line.send(answer) < len(answer):
                return "does not read its answers"
            if acceptor.refusal is not None:
                return acceptor.refusal
        return None

    @staticmethod
    def _answer_in_plaintext(sock: socket.socket) -> None:
        """Tell a dialer without certificates why it is not heard; anybody else cannot make sense of it."""
        with contextlib.suppress(OSError):
            sock.send(refusal(NO_PLAINTEXT))

    def _show_out_the_late(self) -> None:
        now = time.monotonic()
        for descriptor in [d for d, stranger in self._strangers.items() if stranger.until <= now]:
            self._dismiss(descriptor, f"said too little in {ADMISSION_SECONDS:g} s")

    def _dismiss(self, descriptor: int, reason: str | None) -> None:
        stranger = self._strangers.pop(descriptor)
        with contextlib.suppress(OSError):
            # What was sent and not read would make the end a reset, which may overtake the reason on its way.
            stranger.sock.recv(UNREAD)
        with contextlib.suppress(OSError):
            stranger.sock.close()
        if reason is not None:
            self._refusals.log("refused a link from %s: %s", stranger.source, reason)
