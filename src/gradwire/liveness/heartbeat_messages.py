"""Heartbeats on links: as frames, or as one-time tokens on links that were admitted inside TLS.

Both ends of such a link have a key that nobody else has. From it follow two endless sequences of tokens, one for each
direction. A beat is the next token of its sequence, and the receiver compares it with its own: nobody without the key
can make one, and none counts twice. So a thread that knows nothing of cryptography can beat with tokens that Python
made ahead, for as long as the stock lasts while no Python runs.
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

TOKEN_BYTES = 8  # a guess ends the link: one in 2⁶⁴ of them is right
BLOCK_TOKENS = 1024  # that are made at a time: 51 s of beats
STOCK_BLOCKS = 60
MARK_BLOCKS = 58  # below, Python does not run, and beats are five times slower: the stock lasts for four hours
SLOW_BEATS = 5  # as native/lifeline.cpp has it
LASTS_SECONDS = MARK_BLOCKS * BLOCK_TOKENS * SLOW_BEATS * HEARTBEAT_SECONDS
READ_BYTES = 4096


class HeartbeatSink:
    """Beats, as they are read, go to the detector; `check` knows whose they may be."""

    def __init__(self, check: Callable[[Header], None]) -> None:
        self.detector = Detector()
        self.now = 0.0
        self.ignored: set[int] = set()
        self.outages: set[int] = set()  # ranks to which packets were lost since they were last heard
        self._check = check

    def begin(self, link: Link, header: Header) -> memoryview:
        self._check(header)
        if header.kind != Kind.BEAT or header.nbytes:
            raise WireError(f"kind {header.kind}, {header.nbytes} bytes, on the lifeline")
        return memoryview(b"")

    def finish(self, link: Link, header: Header, payload: memoryview) -> None:
        self.record(link.peer)

    def record(self, peer: int, beat: int | None = None) -> None:
        if peer not in self.ignored:
            self.outages.discard(peer)
            self.detector.record_heartbeat(peer, self.now, beat)


class Tokens:
    """The sequence of tokens that one rank sends over one link."""

    def __init__(self, key: bytes, sender: int) -> None:
        self._key = derive(key, "beats of", sender.to_bytes(4))
        self._blocks = 0
        self._rest = b""

    def block(self) -> bytes:
        """The next `BLOCK_TOKENS` tokens."""
        seed = derive(self._key, "block", self._blocks.to_bytes(8))
        self._blocks += 1
        return hashlib.shake_256(seed).digest(BLOCK_TOKENS * TOKEN_BYTES)

    def take(self, nbytes: int) -> bytes:
        """The next bytes of the sequence."""
        while len(self._rest) < nbytes:
            self._rest += self.block()
        taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return taken


class TokenReader:
    """Reads the tokens of a link; each whole one that is right is a beat, and a wrong byte ends the link."""

    def __init__(self, link: Link, tokens: Tokens, sink: HeartbeatSink) -> None:
        self.link = link
        self.more = False  # the last pass took all it had room for
        self._tokens = tokens
        self._sink = sink
        self._room = memoryview(bytearray(READ_BYTES))
        self._part = 0  # bytes of a token that has not come as a whole

    def pump(self) -> int:
        """Take in what has arrived; the number of bytes. `LinkClosed` at the end, and after a wrong byte."""
        got = self.link.receive([self._room])
        self.more = got == READ_BYTES
        if not hmac.compare_digest(self._room[:got], self._tokens.take(got)):
            log.warning("the lifeline's link to rank %d is closed: what came is no beat of that rank", self.link.peer)
            raise LinkClosed
        whole, self._part = divmod(self._part + got, TOKEN_BYTES)
        if whole:
            self._sink.record(self.link.peer)
        return got
