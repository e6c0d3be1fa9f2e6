"""Link admission: noise on either side, and somebody in between who changes what passes."""

from __future__ import annotations

from fuzz.target import Target
from gradwire.errors import Refused
from gradwire.security.admission import LONGEST_REASON, Acceptor, Dialer, Hello

KEY = bytes(range(32))
HELLO = Hello(bytes(16), 1, 2, 1, 0)
MOST = 300  # bytes that either side ever wants, keeps or says at once


def noise_to_acceptor(data: bytes) -> bool:
    """The first byte says in which pieces the rest comes. Nobody gets in by chance."""
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
    believed, refusal = False, ""
    try:
        for rest in _pieces(data):
            while rest and dialer.wanted:
                part, rest = rest[: dialer.wanted], rest[dialer.wanted :]
                believed = bool(dialer.feed(part)) or believed
                assert dialer.wanted <= MOST
    except Refused as error:
        refusal = str(error)
    assert refusal.isprintable()
    assert len(refusal) <= LONGEST_REASON + MOST
    assert not dialer.done
    return believed


def in_between(data: bytes) -> bool:
    """Each three bytes change one byte of what passes: which one, and how. A change is noticed before anybody is in."""
    changes = {int.from_bytes(data[at : at + 2], "big") % 256: data[at + 2] for at in range(0, len(data) - 2, 3)}
    passed = 0

    def changed(words: bytes) -> bytes:
        nonlocal passed
        heard = bytes(byte ^ changes.get(passed + at, 0) for at, byte in enumerate(words))
        passed += len(words)
        return heard

    dialer, acceptor = Dialer(KEY, HELLO), Acceptor(KEY, lambda hello: None)
    said = dialer.start()
    harmed = False
    try:
        while said and acceptor.wanted:
            heard = changed(said)
            harmed = harmed or heard != said
            answer = acceptor.feed(heard)
            assert not (harmed and acceptor.done)
            heard, said = changed(answer), b""
            harmed = harmed or heard != answer
            while heard and dialer.wanted:
                part, heard = heard[: dialer.wanted], heard[dialer.wanted :]
                said += dialer.feed(part)
    except Refused:
        assert harmed
    assert dialer.done == (not harmed)
    return dialer.done


def _pieces(data: bytes) -> list[bytes]:
    size, rest = (data[0] + 1, data[1:]) if data else (1, b"")
    return [rest[start : start + size] for start in range(0, len(rest), size)]


_CHALLENGE = b"gw-reply\x01\x20" + bytes(32)
TARGETS = (
    Target("noise to the acceptor", noise_to_acceptor, (b"\xff" + Dialer(KEY, HELLO).start(),)),
    Target("noise to the dialer", noise_to_dialer, (b"\xff" + _CHALLENGE, b"\x07" + _CHALLENGE)),
    Target("in between two ranks", in_between, (b"", b"\x00\x05\x00")),
)
