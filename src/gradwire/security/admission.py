"""Admits links: two ranks prove the job's secret to each other before a link carries any data.

    dialer                                             acceptor
      hello: its rank, the wanted rank, its nonce  →
                                                   ←   challenge: its nonce
      proof of the secret                          →
                                                   ←   admitted: its own proof, or refused: a reason

This module is pure: bytes in, bytes out, no socket, no clock. Feed the received bytes in pieces of any size, but never
more than `wanted` bytes: bytes after the handshake belong to the link.

A proof is an HMAC over the role, both nonces and the whole hello. So it cannot be replayed, reflected, or used for
another rank or channel. The dialer proves the secret first. An attacker who connects therefore receives no proof from
which the secret could be guessed, and learns nothing about the job. A refusal is authenticated only after the dialer
has proved the secret. Before that, its reason is only a hint, and the text of `Refused` says so.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.errors import ConfigError, NoConnection, Refused
from gradwire.security.secret import derive

NO_SECRET = "does not hold this job's secret"
LONGEST_REASON = 200  # bytes

_MAGIC = b"gw-link1"
_NONCE = 32
_PROOF = 32
_HELLO = struct.Struct(">8s16sQQII32s")
_REPLY_MAGIC = b"gw-reply"
_REPLY = struct.Struct(">8sBB")  # magic, kind, length of the body
_CHALLENGE, _ADMITTED, _REFUSED = 1, 2, 3
_NO_PROOF = bytes(_PROOF)
_TLS_START = b"\x16\x03"  # the first bytes of every TLS connection


@dataclass(frozen=True, slots=True)
class Hello:
    """The purpose of a link: the job (16 bytes), the generation, the number of the channel, and the two ranks."""

    job: bytes
    generation: int
    channel: int
    source: int
    target: int

    def __post_init__(self) -> None:
        if len(self.job) != 16:
            raise ConfigError(f"a link's job is 16 bytes, not {len(self.job)}")
        for name, bits in (("generation", 64), ("channel", 64), ("source", 32), ("target", 32)):
            if not 0 <= getattr(self, name) < 1 << bits:
                raise ConfigError(f"a link's {name} is not an unsigned number of {bits} bits: {getattr(self, name)}")

    def _pack(self, nonce: bytes) -> bytes:
        return _HELLO.pack(_MAGIC, self.job, self.generation, self.channel, self.source, self.target, nonce)


class Dialer:
    """The side that opened the connection. Send the bytes that `start` and `feed` return. `feed` raises `Refused`."""

    def __init__(self, key: bytes, hello: Hello) -> None:
        self._key = _checked_key(key)
        self._hello = hello
        self._transcript = hello._pack(secrets.token_bytes(_NONCE))
        self._received = bytearray()
        self._challenged = False
        self.done = False

    def start(self) -> bytes:
        """Return the first bytes to send."""
        return self._transcript

    @property
    def wanted(self) -> int:
        """How many bytes may be fed now: 0 once admitted."""
        if self.done:
            return 0
        return self._frame_length() - len(self._received)

    def feed(self, data: bytes | bytearray | memoryview) -> bytes:
        """Process the next bytes from the acceptor and return the bytes to send back, if any."""
        _append(self, self._received, data)
        if not _REPLY_MAGIC.startswith(self._received[: len(_REPLY_MAGIC)]):
            raise self._refused("answered with bytes that are not a gradwire admission")
        if len(self._received) < _REPLY.size:
            return b""
        self._check_header()
        if len(self._received) < self._frame_length():
            return b""
        _, kind, _ = _REPLY.unpack_from(self._received)
        body = bytes(self._received[_REPLY.size :])
        self._received.clear()
        return self._reply(kind, body)

    def session_key(self, purpose: str) -> bytes:
        """Return a key that both ends have once the link is admitted.

        Another holder of the link key that observes the network can derive it too, unless the admission was encrypted.
        """
        return _session_key(self, self._key, purpose, self._transcript)

    def eof(self) -> NoConnection:
        """Return the error for a connection that closed before admission ended.

        This is not a refusal: the acceptor may be starting or shutting down.
        """
        return NoConnection(
            f"rank {self._hello.target} closed the connection during admission without giving a reason",
            rank=self._hello.source,
            peer=self._hello.target,
            generation=self._hello.generation,
        )

    def _frame_length(self) -> int:
        if len(self._received) < _REPLY.size:
            return _REPLY.size
        return _REPLY.size + int(self._received[_REPLY.size - 1])

    def _check_header(self) -> None:
        _, kind, length = _REPLY.unpack_from(self._received)
        if kind == _REFUSED:
            fits = _PROOF <= length <= _PROOF + LONGEST_REASON
        else:
            fits = kind == (_ADMITTED if self._challenged else _CHALLENGE) and length == _NONCE
        if not fits:
            raise self._refused(f"violated the admission protocol (frame {kind}, {length} bytes)")

    def _reply(self, kind: int, body: bytes) -> bytes:
        if kind == _CHALLENGE:
            self._challenged = True
            self._transcript += body
            return derive(self._key, "link dialer", self._transcript)
        if kind == _REFUSED:
            raise self._refusal(body[:_PROOF], body[_PROOF:])
        if not hmac.compare_digest(body, derive(self._key, "link acceptor", self._transcript)):
            raise self._refused(f"{NO_SECRET}: it accepted the link but could not prove it")
        self.done = True
        return b""

    def _refusal(self, proof: bytes, reason: bytes) -> Refused:
        genuine = hmac.compare_digest(proof, derive(self._key, "link refusal", self._transcript, reason))
        note = "" if genuine else " (reply not authenticated)"
        return self._refused(f"refused the link: {printable(reason.decode('utf-8', 'replace'))}{note}")

    def _refused(self, how: str) -> Refused:
        source, target, generation = self._hello.source, self._hello.target, self._hello.generation
        return Refused(f"rank {target} {how}", rank=source, peer=target, generation=generation)


class Acceptor:
    """The side that accepted the connection. Send the bytes that `feed` returns, then read `done` and `refusal`.

    `check` is called once, with a hello whose sender has proved the secret. It returns a reason to refuse the link, or
    None. After a refusal, send the returned bytes and close the connection.
    """

    def __init__(self, key: bytes, check: Callable[[Hello], str | None]) -> None:
        self._key = _checked_key(key)
        self._check = check
        self._received = bytearray()
        self._transcript = b""
        self.hello: Hello | None = None  # as the dialer claims; not proven before `done`
        self.refusal: str | None = None
        self.done = False

    @property
    def wanted(self) -> int:
        """How many bytes may be fed now: 0 once admitted or refused."""
        if self.done or self.refusal is not None:
            return 0
        return (_HELLO.size if self.hello is None else _PROOF) - len(self._received)

    def feed(self, data: bytes | bytearray | memoryview) -> bytes:
        """Process the next bytes from the dialer and return the bytes to send back, if any."""
        _append(self, self._received, data)
        if self.hello is None and not _MAGIC.startswith(self._received[: len(_MAGIC)]):
            note = " but TLS: this rank was given no certificates" if self._received.startswith(_TLS_START) else ""
            return self._refuse(f"the received bytes are not a gradwire admission{note}", proven=False)
        if self.wanted:
            return b""
        frame = bytes(self._received)
        self._received.clear()
        return self._challenge(frame) if self.hello is None else self._decide(self.hello, frame)

    def session_key(self, purpose: str) -> bytes:
        """Return the same key as the dialer's."""
        return _session_key(self, self._key, purpose, self._transcript)

    def eof(self) -> None:
        """Report that the connection closed. If admission had not ended, that counts as a refusal."""
        if not self.done and self.refusal is None:
            self.refusal = f"the connection closed {self.wanted} bytes before the end of {self._expected()}"

    def _challenge(self, frame: bytes) -> bytes:
        _, job, generation, channel, source, target, _ = _HELLO.unpack(frame)
        self.hello = Hello(job, generation, channel, source, target)
        nonce = secrets.token_bytes(_NONCE)
        self._transcript = frame + nonce
        return _frame(_CHALLENGE, nonce)

    def _decide(self, hello: Hello, proof: bytes) -> bytes:
        if not hmac.compare_digest(proof, derive(self._key, "link dialer", self._transcript)):
            return self._refuse(f"the process that claims to be rank {hello.source} {NO_SECRET}", proven=False)
        reason = self._check(hello)
        if reason is not None:
            return self._refuse(reason, proven=True)
        self.done = True
        return _frame(_ADMITTED, derive(self._key, "link acceptor", self._transcript))

    def _refuse(self, reason: str, *, proven: bool) -> bytes:
        self.refusal = reason
        self._received.clear()
        text = _bounded(reason)
        if not proven:
            return refusal(reason)
        return _frame(_REFUSED, derive(self._key, "link refusal", self._transcript, text) + text)

    def _expected(self) -> str:
        return "a hello" if self.hello is None else f"the proof of a process that claims to be rank {self.hello.source}"


def refusal(reason: str) -> bytes:
    """Return a refusal without a proof, for a dialer that has not proved the secret."""
    return _frame(_REFUSED, _NO_PROOF + _bounded(reason))


def _checked_key(key: bytes) -> bytes:
    if len(key) < 16:
        raise ConfigError(f"a link key has at least 16 bytes, not {len(key)}")
    return key


def _session_key(side: Dialer | Acceptor, key: bytes, purpose: str, transcript: bytes) -> bytes:
    if not side.done:
        raise ValueError("a link has no session key before it is admitted")
    return derive(key, "link session", purpose.encode(), transcript)


def _append(side: Dialer | Acceptor, received: bytearray, data: bytes | bytearray | memoryview) -> None:
    if len(data) > side.wanted:
        raise ValueError(f"admission was fed {len(data)} bytes, and it wanted at most {side.wanted}")
    received += data


def _frame(kind: int, body: bytes) -> bytes:
    return _REPLY.pack(_REPLY_MAGIC, kind, len(body)) + body


def _bounded(reason: str) -> bytes:
    """Encode a reason in at most `LONGEST_REASON` bytes, cut between characters."""
    return reason.encode("utf-8", "replace")[:LONGEST_REASON].decode("utf-8", "ignore").encode()


def printable(text: str) -> str:
    """Replace control characters, so that text from an unauthenticated sender is safe in a log."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
