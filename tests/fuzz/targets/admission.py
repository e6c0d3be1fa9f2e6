"""Fuzzes link admission: random bytes on either side, and an attacker in the middle who changes bytes."""

from __future__ import annotations

from fuzz.target import Target
from gradwire.errors import Refused
from gradwire.security.admission import LONGEST_REASON, Acceptor, Dialer, Hello

KEY = bytes(range(32))
HELLO = Hello(bytes(16), 1, 2, 1, 0)
MOST = 300  # bytes that either side ever wants, buffers or sends at once


def noise_to_acceptor(data: bytes) -> bool:
    """Feed random bytes, in pieces of a size that the first byte gives. They must never be admitted."""
    acceptor = Acceptor(KEY, lambda hello: None)
    for rest in _pieces(data):
        while rest and acceptor.wanted:
            part, rest = rest[: acceptor.wanted], rest[acceptor.wanted :]
            assert len(acceptor.feed(part)) <= MOST
            assert acceptor.wanted <= MOST
    acceptor.eof()
    assert not acceptor.done
    assert acceptor.refusal
    return acceptor.hello is not None


def noise_to_dialer(data: bytes) -> bool:
    dialer = Dialer(KEY, HELLO)
    accepted, refusal = False, ""
    try:
        for rest in _pieces(data):
            while rest and dialer.wanted:
                part, rest = rest[: dialer.wanted], rest[dialer.wanted :]
                accepted = bool(dialer.feed(part)) or accepted
                assert dialer.wanted <= MOST
    except Refused as error:
        refusal = str(error)
    assert refusal.isprintable()
    assert len(refusal) <= LONGEST_REASON + MOST
    assert not dialer.done
    return accepted


def man_in_the_middle(data: bytes) -> bool:
    """Change one transmitted byte for each three bytes of the input: position and mask.

    A changed admission must never succeed.
    """
    changes = {int.from_bytes(data[at : at + 2], "big") % 256: data[at + 2] for at in range(0, len(data) - 2, 3)}
    passed = 0

    def changed(sent: bytes) -> bytes:
        nonlocal passed
        received = bytes(byte ^ changes.get(passed + at, 0) for at, byte in enumerate(sent))
        passed += len(sent)
        return received

    dialer, acceptor = Dialer(KEY, HELLO), Acceptor(KEY, lambda hello: None)
    sent = dialer.start()
    tampered = False
    try:
        while sent and acceptor.wanted:
            received = changed(sent)
            tampered = tampered or received != sent
            answer = acceptor.feed(received)
            assert not (tampered and acceptor.done)
            received, sent = changed(answer), b""
            tampered = tampered or received != answer
            while received and dialer.wanted:
                part, received = received[: dialer.wanted], received[dialer.wanted :]
                sent += dialer.feed(part)
    except Refused:
        assert tampered
    assert dialer.done == (not tampered)
    return dialer.done


def _pieces(data: bytes) -> list[bytes]:
    size, rest = (data[0] + 1, data[1:]) if data else (1, b"")
    return [rest[start : start + size] for start in range(0, len(rest), size)]


_CHALLENGE = b"gw-reply\x01\x20" + bytes(32)
TARGETS = (
    Target("noise to the acceptor", noise_to_acceptor, (b"\xff" + Dialer(KEY, HELLO).start(),)),
    Target("noise to the dialer", noise_to_dialer, (b"\xff" + _CHALLENGE, b"\x07" + _CHALLENGE)),
    Target("tampering with an admission", man_in_the_middle, (b"", b"\x00\x05\x00")),
)
