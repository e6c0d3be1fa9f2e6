"""Fuzzes point-to-point messages: a peer has two links, and the program posts receives and cancels them.

The input is a list of actions, so that the fuzzer does not need to guess headers. A byte below 200 selects a usual
action. A byte from 200 on is followed by eight bytes that describe any action. An action is a header on one of the
links (with the description of the message, which may be damaged), bytes of its payload, a recv with or without a
buffer, the cancelling of a recv, or random bytes. Whatever the peer does, a buffer that was returned to the program
must not be written again. The descriptions alone are a second target.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from fuzz.target import MIB, Target
from fuzz.targets.frames import Stream, check, header
from gradwire.arrays import DTYPES, parse_dtype
from gradwire.generation.mailbox import MAX_UNMATCHED_BYTES, Mailbox, MessageSink
from gradwire.generation.message_format import MAX_DESCRIPTION, Description, parse_description
from gradwire.generation.messages import IncomingMessage, Request
from gradwire.transports.base import Buffer
from gradwire.transports.frames import FrameReader
from gradwire.wire import Kind, WireError
from support.messages import described

ACTION = struct.Struct("<BBBBHH")  # what, on which link, kind, tag, identity or source, bytes
SEND_HEADER, SEND_PAYLOAD, POST_RECV, CANCEL_RECV, SEND_NOISE = range(5)
GROUP = 7
PEER = 1
LARGE_TAG = 4  # messages with this tag or a higher one may claim any size; no recv without a buffer requests them


class Wire(Stream):
    """A link on which more bytes may arrive."""

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
        self.posted: list[Request] = []
        self.returned: list[tuple[memoryview, bytes]] = []
        self.valid = True

    def _accepted(self, world: int, message: IncomingMessage) -> None:
        assert world == PEER

    def act(self, what: int, on: int, kind: int, tag: int, number: int, nbytes: int) -> None:
        match what % 5:
            case 0 if not self._due(on):
                self._arrive(on, _message(kind, tag, number, nbytes, damaged=bool(on & 2)))
            case 1:
                self._arrive(on, bytes([tag]) * min(nbytes, self._due(on)))
            case 2:
                source = None if number % 3 == 0 else number % 3
                without_buffer = kind & 1 and tag < LARGE_TAG
                request = Request(GROUP, source, tag, None if without_buffer else memoryview(bytearray(nbytes)))
                self.mailbox.post_request(request)
                self.posted.append(request)
            case 3 if self.posted:
                self._end(self.posted[number % len(self.posted)])
            case 4:
                self._arrive(on, bytes([tag]) * nbytes)
        self._check()

    def _due(self, on: int) -> int:
        """Return how many bytes of a payload are missing on a link."""
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
        except ValueError:  # includes WireError
            self.readers[on] = None  # a link with invalid data is not read any more
            self.valid = False

    def _end(self, request: Request) -> None:
        self.mailbox.cancel_request(request, self._redirect)
        self.posted.remove(request)
        if request.array is None and request.target is not None:
            self.returned.append((request.target, bytes(request.target)))
        elif request.sender is not None:
            assert request.array is not None
            self.returned.append((memoryview(request.array), request.array.tobytes()))  # type: ignore[arg-type]

    def _redirect(self, world: int, old: memoryview, new: memoryview) -> None:
        for reader in self.readers:
            if reader is not None:
                reader.redirect(old, new)

    def _check(self) -> None:
        for request in [request for request in self.posted if request.done]:
            self._end(request)
        for target, content in self.returned:
            assert target == content, "a buffer was written after it was returned to the program"
        assert self.mailbox.unmatched_bytes(PEER) <= MAX_UNMATCHED_BYTES + MIB


def _message(kind: int, tag: int, number: int, nbytes: int, *, damaged: bool) -> bytes:
    """Return a header and, for a message that has one, its description. The data follows with other actions."""
    fields = {"fingerprint": tag, "sequence": number & 0xFF, "group": GROUP}
    if kind not in (Kind.EAGER, Kind.OFFER):
        return header(kind, nbytes if kind == Kind.PAYLOAD else nbytes & ~8, **fields)
    size = nbytes | (number >> 8 << 32 if kind == Kind.OFFER and tag >= LARGE_TAG else 0)
    description = bytearray(described(size))
    if damaged:
        description[number % len(description)] ^= 1 + tag % 255
    if kind == Kind.EAGER:
        return header(kind, len(description) + nbytes, **fields) + description
    fields |= {"tile": size & 0xFFFFFFFF, "round": size >> 32}
    return header(kind, len(description), **fields) + description


def run_description(data: bytes) -> bool:
    try:
        found = parse_description(data)
    except WireError:
        return False
    packed = found.pack()
    assert data.startswith(packed)
    assert len(packed) <= MAX_DESCRIPTION
    assert found.nbytes >= 0
    return True


def run_actions(data: bytes) -> bool:
    harness = Harness()
    for action in _actions(data):
        harness.act(*action)
    return harness.valid


_OFFER, _PAYLOAD, _WITHDRAW = (
    (SEND_HEADER, 0, int(kind), 1, 5, 8) for kind in (Kind.OFFER, Kind.PAYLOAD, Kind.WITHDRAW)
)
_EAGER, _RECV = (SEND_HEADER, 0, int(Kind.EAGER), 1, 1, 8), (POST_RECV, 0, 0, 1, 1, 8)
_ANY_SIZE = (POST_RECV, 0, 1, 1, 1, 0)
_CANCEL = (CANCEL_RECV, 0, 0, 0, 0, 0)
_PART, _REST, _WHOLE = ((SEND_PAYLOAD, 0, 0, 65, 0, nbytes) for nbytes in (3, 5, 8))
SCENARIOS: list[list[tuple[int, ...]]] = [
    [_EAGER, _WHOLE, _RECV],
    [_OFFER, _RECV, _PAYLOAD, _PART, _REST, _RECV],
    [_RECV, _OFFER, _PAYLOAD, _PART, _CANCEL, _REST, _RECV],
    [_ANY_SIZE, _EAGER, _WHOLE, _OFFER, _ANY_SIZE, _PAYLOAD, _PART, _CANCEL, _REST, _ANY_SIZE],
    [_ANY_SIZE, _OFFER, _WITHDRAW, _EAGER, _WHOLE],
    [_RECV, _OFFER, _WITHDRAW, (SEND_HEADER, 1, int(Kind.ACCEPT), 1, 5, 0)],
]


USUAL = sorted({(what, on ^ other, *rest) for actions in SCENARIOS for what, on, *rest in actions for other in (0, 1)})
UNUSUAL = 200


def _actions(data: bytes) -> Iterator[tuple[int, ...]]:
    while data:
        if data[0] < UNUSUAL:
            yield USUAL[data[0] % len(USUAL)]
            data = data[1:]
        else:
            if len(data) > ACTION.size:
                yield ACTION.unpack_from(data, 1)
            data = data[1 + ACTION.size :]


@st.composite
def disturbed_scenarios(draw: st.DrawFn) -> bytes:
    """Draw a scenario with inserted actions: usual ones on either link, or any."""
    actions = [bytes([USUAL.index(action)]) for action in draw(st.sampled_from(SCENARIOS))]
    usual = st.integers(0, len(USUAL) - 1).map(lambda number: bytes([number]))
    fields = st.tuples(*[st.integers(0, 8)] * 4, st.integers(0, 600), st.integers(0, 99))
    unusual = fields.map(lambda action: bytes([UNUSUAL]) + ACTION.pack(*action))
    for action in draw(st.lists(st.one_of(*[usual] * 5, unusual), max_size=8)):
        actions.insert(draw(st.integers(0, len(actions))), action)
    return b"".join(actions)


_SEEDS = tuple(bytes(USUAL.index(action) for action in actions) for actions in SCENARIOS)
_SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (2, 3), (1 << 62, 0, 5), (1,) * 64)
_DESCRIPTIONS = tuple(
    Description(parse_dtype(name), shape, waits).pack()
    for name, shape, waits in zip(DTYPES, _SHAPES, (False, True, False, True, False), strict=False)
)
TARGETS = (
    Target("point to point", run_actions, _SEEDS, inputs=disturbed_scenarios()),
    Target("message description", run_description, _DESCRIPTIONS),
)
