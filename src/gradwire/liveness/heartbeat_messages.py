"""Heartbeats on links: frames, or one-time tokens on links that were admitted inside TLS.

Both ends of such a link share a secret key. They derive two endless sequences of tokens from it, one for each
direction. A heartbeat is the next token of its sequence, and the receiver compares it with its own copy. A process
without the key cannot make a token, and no token counts twice. So a native thread without any cryptography can send
tokens that Python made in advance, until the stock is used up.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable

from gradwire.liveness.detector import HEARTBEAT_SECONDS, Detector
from gradwire.security.secret import derive
from gradwire.transports.base import Link, LinkClosed
from gradwire.wire import Header, Kind, WireError

log = logging.getLogger("gradwire.liveness")

TOKEN_BYTES = 8  # a wrong guess ends the link, and one guess in 2⁶⁴ is right
BLOCK_TOKENS = 1024  # made at a time: 51 s of heartbeats
STOCK_BLOCKS = 60
# Below this stock Python does not run, and heartbeats are sent five times slower: the stock lasts for four hours.
MARK_BLOCKS = 58
SLOW_BEATS = 5  # the same number as in native/lifeline.cpp
LASTS_SECONDS = MARK_BLOCKS * BLOCK_TOKENS * SLOW_BEATS * HEARTBEAT_SECONDS
READ_BYTES = 4096


class HeartbeatSink:
    """Passes heartbeats to the detector as they are read. `check` refuses those of another generation."""

    def __init__(self, check: Callable[[Header], None]) -> None:
        self.detector = Detector()
        self.now = 0.0
        self.ignored: set[int] = set()
        self.outages: set[int] = set()  # ranks to which packets were lost since their last heartbeat
        self._check = check

    def begin(self, link: Link, header: Header) -> memoryview:
        self._check(header)
        if header.kind != Kind.BEAT or header.nbytes:
            raise WireError(f"kind {header.kind}, {header.nbytes} bytes, on the lifeline")
        return memoryview(b"")

    def finish(self, link: Link, header: Header, payload: memoryview) -> None:
        self.record(link.peer)

    def record(self, peer: int, counter: int | None = None) -> None:
        """Record a heartbeat of a peer. `counter` is the number that the peer counts up in shared memory."""
        if peer not in self.ignored:
            self.outages.discard(peer)
            self.detector.record_heartbeat(peer, self.now, counter)


class Tokens:
    """The sequence of tokens that one rank sends over one link."""

    def __init__(self, key: bytes, sender: int) -> None:
        self._key = derive(key, "beats of", sender.to_bytes(4))
        self._blocks = 0
        self._rest = b""

    def block(self) -> bytes:
        """Return the next `BLOCK_TOKENS` tokens."""
        seed = derive(self._key, "block", self._blocks.to_bytes(8))
        self._blocks += 1
        return hashlib.shake_256(seed).digest(BLOCK_TOKENS * TOKEN_BYTES)

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes of the sequence."""
        while len(self._rest) < nbytes:
            self._rest += self.block()
        taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return taken


class TokenReader:
    """Reads the tokens of a link. Each complete and correct token is a heartbeat; a wrong byte ends the link."""

    def __init__(self, link: Link, tokens: Tokens, sink: HeartbeatSink) -> None:
        self.link = link
        self.more = False  # the last read filled the buffer
        self._tokens = tokens
        self._sink = sink
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._part = 0  # bytes of a token that has not arrived completely

    def pump(self) -> int:
        """Read the bytes that have arrived and return their number. Raise `LinkClosed` at the end or a wrong byte."""
        got = self.link.receive([self._buffer])
        self.more = got == READ_BYTES
        if not hmac.compare_digest(self._buffer[:got], self._tokens.take(got)):
            log.warning("closed the lifeline link to rank %d: it received a wrong heartbeat token", self.link.peer)
            raise LinkClosed
        whole, self._part = divmod(self._part + got, TOKEN_BYTES)
        if whole:
            self._sink.record(self.link.peer)
        return got
