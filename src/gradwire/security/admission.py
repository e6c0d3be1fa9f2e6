"""Link admission: two ranks prove the job's secret to each other before a link carries anything.

    dialer                                          acceptor
      hello: who I am, whom I want, my nonce   →
                                               ←    challenge: my nonce
      proof of the secret                      →
                                               ←    admitted: its own proof, or refused: a reason

Pure: bytes in, bytes out; no socket, no clock. Feed what arrives in any pieces, never more than `wanted` bytes, so that
nothing behind the handshake is swallowed. Proofs are HMACs that bind the role, both nonces and the whole hello, so
none can be replayed, reflected, or used for another rank or channel. The dialer proves first: strangers who connect
get nothing to guess the secret from, and learn nothing about the job. For the same reason only a dialer that has
proved itself gets a reason that is authenticated; before that, a reason is a hint (`Refused` says which it is).
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
_UNPROVED = bytes(_PROOF)
_TLS = b"\x16\x03"  # how every TLS connection begins


@dataclass(frozen=True, slots=True)
class Hello:
    """What a link is for: the job (16 bytes), its generation, the numbered channel, and the ranks at its ends."""

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
    """The side that opened the connection. Send what `start` and `feed` return; `feed` raises `Refused`."""

    def __init__(self, key: bytes, hello: Hello) -> None:
        self._key = _checked_key(key)
        self._hello = hello
        self._transcript = hello._pack(secrets.token_bytes(_NONCE))
        self._received = bytearray()
        self._challenged = False
        self.done = False

    def start(self) -> bytes:
        """The first bytes to send."""
        return self._transcript

    @property
    def wanted(self) -> int:
        """How many bytes may be fed now: 0 once admitted."""
        if self.done:
            return 0
        return self._frame_length() - len(self._received)

    def feed(self, data: bytes | bytearray | memoryview) -> bytes:
        """Take the next bytes from the acceptor; returns what to send back, if anything."""
        _take(self, self._received, data)
        if not _REPLY_MAGIC.startswith(self._received[: len(_REPLY_MAGIC)]):
            raise self._refused("answered with something that is not a gradwire admission")
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
        """A key that both ends have once the link is admitted, and nobody else if the admission was encrypted."""
        return _session_key(self, self._key, purpose, self._transcript)

    def eof(self) -> NoConnection:
        """The error for a connection that ended before admission did; the acceptor may be starting or ending."""
        return NoConnection(
            f"rank {self._hello.target} closed the connection during admission, without a reason",
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
            raise self._refused(f"broke the rules of admission (frame {kind}, {length} bytes)")

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
    """The side that was connected to. Send what `feed` returns, then look at `done` and `refusal`.

    `check` is asked once, about a hello that is proven to come from a holder of the secret, and returns a reason to
    refuse it or None. After a refusal the connection is to be closed when the returned bytes are sent.
    """

    def __init__(self, key: bytes, check: Callable[[Hello], str | None]) -> None:
        self._key = _checked_key(key)
        self._check = check
        self._received = bytearray()
        self._transcript = b""
        self.hello: Hello | None = None  # as claimed; believe it when done
        self.refusal: str | None = None
        self.done = False

    @property
    def wanted(self) -> int:
        """How many bytes may be fed now: 0 once admitted or refused."""
        if self.done or self.refusal is not None:
            return 0
        return (_HELLO.size if self.hello is None else _PROOF) - len(self._received)

    def feed(self, data: bytes | bytearray | memoryview) -> bytes:
        """Take the next bytes from the dialer; returns what to send back, if anything."""
        _take(self, self._received, data)
        if self.hello is None and not _MAGIC.startswith(self._received[: len(_MAGIC)]):
            note = " but TLS: this rank was given no certificates" if self._received.startswith(_TLS) else ""
            return self._refuse(f"what arrived is not a gradwire admission{note}", proven=False)
        if self.wanted:
            return b""
        frame = bytes(self._received)
        self._received.clear()
        return self._challenge(frame) if self.hello is None else self._decide(self.hello, frame)

    def session_key(self, purpose: str) -> bytes:
        """The same key as the dialer's."""
        return _session_key(self, self._key, purpose, self._transcript)

    def eof(self) -> None:
        """The connection ended: if that was before admission did, it is a refusal like any other."""
        if not self.done and self.refusal is None:
            self.refusal = f"the connection ended {self.wanted} bytes short of {self._claim()}"

    def _challenge(self, frame: bytes) -> bytes:
        _, job, generation, channel, source, target, _ = _HELLO.unpack(frame)
        self.hello = Hello(job, generation, channel, source, target)
        nonce = secrets.token_bytes(_NONCE)
        self._transcript = frame + nonce
        return _frame(_CHALLENGE, nonce)

    def _decide(self, hello: Hello, proof: bytes) -> bytes:
        if not hmac.compare_digest(proof, derive(self._key, "link dialer", self._transcript)):
            return self._refuse(f"the process that says it is rank {hello.source} {NO_SECRET}", proven=False)
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

    def _claim(self) -> str:
        return "a hello" if self.hello is None else f"a proof that it is rank {self.hello.source}"


def refusal(reason: str) -> bytes:
    """A refusal that proves nothing, for those who have proved nothing themselves."""
    return _frame(_REFUSED, _UNPROVED + _bounded(reason))


def _checked_key(key: bytes) -> bytes:
    if len(key) < 16:
        raise ConfigError(f"a link key has at least 16 bytes, not {len(key)}")
    return key


def _session_key(side: Dialer | Acceptor, key: bytes, purpose: str, transcript: bytes) -> bytes:
    if not side.done:
        raise ValueError("a session has no key before its link is admitted")
    return derive(key, "link session", purpose.encode(), transcript)


def _take(side: Dialer | Acceptor, received: bytearray, data: bytes | bytearray | memoryview) -> None:
    if len(data) > side.wanted:
        raise ValueError(f"admission was fed {len(data)} bytes where it wanted {side.wanted}")
    received += data


def _frame(kind: int, body: bytes) -> bytes:
    return _REPLY.pack(_REPLY_MAGIC, kind, len(body)) + body


def _bounded(reason: str) -> bytes:
    """At most `LONGEST_REASON` bytes, cut between characters."""
    return reason.encode("utf-8", "replace")[:LONGEST_REASON].decode("utf-8", "ignore").encode()


def printable(words: str) -> str:
    """A stranger's words made safe for a log: no control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
