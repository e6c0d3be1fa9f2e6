"""Point-to-point messages of a peer that holds two links here, while the program asks for messages and gives up.

The input is a play, so that headers need not be guessed: a byte names one of the usual acts, from 200 on eight more
bytes describe any. An act is a header on one of the links, bytes of its payload, a recv, the end of one, or any bytes.
Whatever the peer does, a buffer that the program has back is not written again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from fuzz.target import MIB, Target
from fuzz.targets.frames import Stream, check, header
from gradwire.generation.mailbox import MAX_UNMATCHED_BYTES, IncomingMessage, Mailbox, MessageSink, Request
from gradwire.transports.base import Buffer
from gradwire.transports.frames import FrameReader
from gradwire.wire import Kind

ACT = struct.Struct("<BBBBHH")  # what, on which link, kind, tag, identity or source, bytes
SAY, SEND, ASK, GIVE_UP, BABBLE = range(5)
GROUP = 7
PEER = 1


class Wire(Stream):
    """A link on which more may come."""

    channel = 2

    def __init__(self) -> None:
        super().__init__(b"", peer=PEER)

    def arrive(self, data: Buffer) -> None:
        self._rest = memoryview(bytes(self._rest) + bytes(data))

    def receive(self, buffers: Sequence[memoryview]) -> int:
        return super().receive(buffers) if self._rest else 0


class Harness:
    """A mailbox between two links of one peer and a program."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(self._accepted, lambda: None)
        self.wires = [Wire(), Wire()]
        sink = MessageSink(self.mailbox, check)
        self.readers: list[FrameReader | None] = [
            FrameReader(wire, sink, self.mailbox.changed, 512) for wire in self.wires
        ]
        self.asked: list[Request] = []
        self.returned: list[tuple[memoryview, bytes]] = []
        self.sound = True

    def _accepted(self, world: int, message: IncomingMessage) -> None:
        assert world == PEER

    def play(self, what: int, on: int, kind: int, tag: int, number: int, nbytes: int) -> None:
        match what % 5:
            case 0 if not self._due(on):
                offered = {"tile": nbytes, "round": number >> 8} if kind == Kind.OFFER else {}
                follows = nbytes if kind in (Kind.EAGER, Kind.PAYLOAD) else nbytes & ~8
                self._arrive(on, header(kind, follows, fingerprint=tag, sequence=number & 0xFF, group=GROUP, **offered))
            case 1:
                self._arrive(on, bytes([tag]) * min(nbytes, self._due(on)))
            case 2:
                source = None if number % 3 == 0 else number % 3
                request = Request(GROUP, source, tag, memoryview(bytearray(nbytes)))
                self.mailbox.post_request(request)
                self.asked.append(request)
            case 3 if self.asked:
                self._end(self.asked[number % len(self.asked)])
            case 4:
                self._arrive(on, bytes([tag]) * nbytes)
        self._look()

    def _due(self, on: int) -> int:
        """How many bytes of a payload are still to come on a link."""
        reader = self.readers[on % len(self.readers)]
        return 0 if reader is None else reader.missing

    def _arrive(self, on: int, data: bytes) -> None:
        on %= len(self.readers)
        reader = self.readers[on]
        if reader is None:
            return
        self.wires[on].arrive(data)
        try:
            while reader.pump():
                pass
        except ValueError:  # a WireError is one
            self.readers[on] = None  # a peer that sends nonsense is not read any more
            self.sound = False

    def _end(self, request: Request) -> None:
        self.mailbox.cancel_request(request, self._redirect)
        self.asked.remove(request)
        self.returned.append((request.target, bytes(request.target)))

    def _redirect(self, world: int, old: memoryview, new: memoryview) -> None:
        for reader in self.readers:
            if reader is not None:
                reader.redirect(old, new)

    def _look(self) -> None:
        for request in [one for one in self.asked if one.done]:
            self._end(request)
        for target, content in self.returned:
            assert target == content, "the program's memory was written after it had it back"
        assert self.mailbox.unmatched_bytes(PEER) <= MAX_UNMATCHED_BYTES + MIB


def play(data: bytes) -> bool:
    harness = Harness()
    for act in _acts(data):
        harness.play(*act)
    return harness.sound


_OFFER, _PAYLOAD, _WITHDRAW = ((SAY, 0, int(kind), 1, 5, 8) for kind in (Kind.OFFER, Kind.PAYLOAD, Kind.WITHDRAW))
_EAGER, _RECV, _GIVE_UP = (SAY, 0, int(Kind.EAGER), 1, 1, 8), (ASK, 0, 0, 1, 1, 8), (GIVE_UP, 0, 0, 0, 0, 0)
_PART, _REST, _WHOLE = ((SEND, 0, 0, 65, 0, nbytes) for nbytes in (3, 5, 8))
STORIES: list[list[tuple[int, ...]]] = [
    [_EAGER, _WHOLE, _RECV],
    [_OFFER, _RECV, _PAYLOAD, _PART, _REST, _RECV],
    [_RECV, _OFFER, _PAYLOAD, _PART, _GIVE_UP, _REST, _RECV],
    [_RECV, _OFFER, _WITHDRAW, (SAY, 1, int(Kind.ACCEPT), 1, 5, 0)],
]


USUAL = sorted({(what, on ^ other, *rest) for story in STORIES for what, on, *rest in story for other in (0, 1)})
ODD = 200


def _acts(data: bytes) -> Iterator[tuple[int, ...]]:
    while data:
        if data[0] < ODD:
            yield USUAL[data[0] % len(USUAL)]
            data = data[1:]
        else:
            if len(data) > ACT.size:
                yield ACT.unpack_from(data, 1)
            data = data[1 + ACT.size :]


@st.composite
def plays(draw: st.DrawFn) -> bytes:
    """A story into which something else has come: the same on the other link, or anything."""
    acts = [bytes([USUAL.index(act)]) for act in draw(st.sampled_from(STORIES))]
    usual = st.integers(0, len(USUAL) - 1).map(lambda number: bytes([number]))
    odd = st.tuples(*[st.integers(0, 8)] * 4, st.integers(0, 600), st.integers(0, 99))
    for act in draw(st.lists(st.one_of(*[usual] * 5, odd.map(lambda act: bytes([ODD]) + ACT.pack(*act))), max_size=8)):
        acts.insert(draw(st.integers(0, len(acts))), act)
    return b"".join(acts)


_SEEDS = tuple(bytes(USUAL.index(act) for act in story) for story in STORIES)
TARGETS = (Target("mail", play, _SEEDS, inputs=plays()),)
