"""Point-to-point messages, matched by sender and tag, outside every group's order.

Up to `wire.MAX_EAGER` bytes travel at once and are kept at the receiver until somebody asks for them. Longer ones are
offered first and sent when a `recv` has given them a buffer, so nothing is allocated from what a peer claims. A `recv`
that gives up leaves everything in its place: an unmatched message stays queued, a half-arrived one goes on arriving
in private memory and is the first to be found by the next `recv`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.errors import SizeMismatch
from gradwire.wire import MAX_EAGER, Header, Kind, WireError

MAX_KEPT = 64 << 20  # bytes of unasked messages from one peer, before its link is no longer read
_OVERHEAD = 256


@dataclass(slots=True, eq=False)
class Letter:
    """A message that is here, or offered; `payload` is None while it only is offered."""

    group: int
    source: int
    tag: int
    nbytes: int
    identity: int = 0
    payload: memoryview | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A `recv` that waits. It ends with `source` set, or with an error."""

    group: int
    source: int | None
    tag: int
    target: memoryview
    sender: int | None = None
    error: SizeMismatch | None = None

    @property
    def done(self) -> bool:
        return self.sender is not None or self.error is not None

    def fits(self, letter: Letter) -> bool:
        return (
            self.group == letter.group
            and self.tag == letter.tag
            and (self.source is None or self.source == letter.source)
        )


@dataclass(slots=True, eq=False)
class Offer:
    """A `send` that waits for its buffer."""

    identity: int
    accepted: bool = False


@dataclass(slots=True)
class Transfer:
    """A payload on its way in, for a request or, once that gave up, for the next one."""

    letter: Letter
    request: Request | None
    target: memoryview


class Mailbox:
    """Everything that has arrived or is asked for on one rank. `changed` guards it and tells those who wait."""

    def __init__(self, accept: Callable[[int, Letter], None]) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._accept = accept  # tells the sender of an offer (a world rank) to go on
        self._letters: deque[tuple[int, Letter]] = deque()
        self._requests: list[Request] = []
        self._offers: dict[int, Offer] = {}
        self._transfers: dict[tuple[int, int], Transfer] = {}
        self._identity = 0
        self._kept: dict[int, int] = {}

    # -- asking -------------------------------------------------------------------------------------------------------

    def ask(self, request: Request) -> None:
        """Post a `recv`; it may be done at once."""
        with self.changed:
            for world, letter in self._letters:
                if request.fits(letter):
                    self._match(world, letter, request)
                    return
            self._requests.append(request)

    def give_up(self, request: Request, redirect: Callable[[int, memoryview, memoryview], None]) -> bool:
        """End a `recv` early; False if it was done after all. What it had accepted keeps its place in the queue.

        redirect(world rank, old, new) stops a payload that is arriving in `old` from being written there any more.
        """
        with self.changed:
            if request.done:
                return False
            if request in self._requests:
                self._requests.remove(request)
                return True
            for (world, _), transfer in self._transfers.items():
                if transfer.request is request:
                    transfer.request = None
                    if transfer.target is request.target:
                        transfer.target = memoryview(bytearray(transfer.letter.nbytes))
                        redirect(world, request.target, transfer.target)
                    self._letters.appendleft((world, transfer.letter))
                    return True
            return True

    def _match(self, world: int, letter: Letter, request: Request) -> None:
        if letter.nbytes != len(request.target):
            request.error = SizeMismatch(
                f"rank {letter.source} sent {letter.nbytes} bytes with tag {letter.tag}, "
                f"the buffer has {len(request.target)}; the message is kept",
                peer=letter.source,
                operation="recv",
            )
            self.changed.notify_all()
            return
        if letter.payload is not None:
            request.target[:] = letter.payload
            request.sender = letter.source
            self._drop(world, letter)
        elif (world, letter.identity) in self._transfers:
            # A half-arrived message whose first asker gave up: it ends up here when it is whole.
            transfer = self._transfers[world, letter.identity]
            transfer.request = request
            self._discard(world, letter)
        else:
            self._discard(world, letter)
            self._transfers[world, letter.identity] = Transfer(letter, request, request.target)
            self._accept(world, letter)
        self.changed.notify_all()

    def _discard(self, world: int, letter: Letter) -> None:
        self._letters = deque(entry for entry in self._letters if entry[1] is not letter)

    def _drop(self, world: int, letter: Letter) -> None:
        self._discard(world, letter)
        if letter.identity == 0:
            self._kept[world] = self._kept.get(world, 0) - letter.nbytes - _OVERHEAD

    # -- sending ------------------------------------------------------------------------------------------------------

    def offer(self) -> Offer:
        """Announce a long message; its identity goes into the header."""
        with self.changed:
            self._identity += 1
            offer = self._offers[self._identity] = Offer(self._identity)
            return offer

    def withdraw(self, offer: Offer) -> bool:
        """Take an offer back; False if it was accepted after all."""
        with self.changed:
            return self._offers.pop(offer.identity, None) is not None

    # -- arriving (the reading thread) --------------------------------------------------------------------------------

    def overfull(self, world: int) -> bool:
        return self._kept.get(world, 0) > MAX_KEPT

    def begin(self, world: int, header: Header) -> memoryview:
        """Memory for a payload that is about to arrive; `WireError` for one that nobody expects."""
        if header.kind == Kind.EAGER:
            if header.nbytes > MAX_EAGER:
                raise WireError(f"an eager message of {header.nbytes} bytes")
            return memoryview(bytearray(header.nbytes))
        if header.kind == Kind.PAYLOAD:
            with self.changed:
                transfer = self._transfers.get((world, header.sequence))
                if transfer is None or transfer.letter.nbytes != header.nbytes:
                    raise WireError(f"a payload of {header.nbytes} bytes that was not accepted")
                return transfer.target
        return memoryview(b"")

    def finish(self, world: int, header: Header, payload: memoryview) -> None:
        """A whole message is here."""
        with self.changed:
            match header.kind:
                case Kind.EAGER:
                    self._arrive(world, _letter(header, payload))
                case Kind.OFFER:
                    self._arrive(world, _letter(header, None))
                case Kind.PAYLOAD:
                    self._complete(world, header.sequence, payload)
                case Kind.ACCEPT:
                    offer = self._offers.pop(header.sequence, None)
                    if offer is not None:
                        offer.accepted = True
                case Kind.WITHDRAW:
                    self._withdrawn(world, header.sequence)
                case _:
                    raise WireError(f"message kind {header.kind} point to point")
            self.changed.notify_all()

    def _arrive(self, world: int, letter: Letter) -> None:
        self._letters.append((world, letter))
        if letter.identity == 0:
            self._kept[world] = self._kept.get(world, 0) + letter.nbytes + _OVERHEAD
        for request in self._requests:
            if request.fits(letter):
                self._requests.remove(request)
                self._match(world, letter, request)
                return

    def _withdrawn(self, world: int, identity: int) -> None:
        self._letters = deque(
            (rank, letter) for rank, letter in self._letters if (rank, letter.identity) != (world, identity)
        )
        transfer = self._transfers.pop((world, identity), None)
        if transfer is not None and transfer.request is not None:
            self.ask(transfer.request)  # accepted just as the sender gave up

    def _complete(self, world: int, identity: int, payload: memoryview) -> None:
        transfer = self._transfers.pop((world, identity))
        letter, request = transfer.letter, transfer.request
        letter.payload = payload
        if request is not None:
            if transfer.target is not request.target:
                request.target[:] = payload
            request.sender = letter.source


def _letter(header: Header, payload: memoryview | None) -> Letter:
    identity = 0 if payload is not None else header.sequence
    tag = header.fingerprint if header.fingerprint < 1 << 63 else header.fingerprint - (1 << 64)
    nbytes = header.nbytes if payload is not None else header.tile | header.round << 32
    return Letter(header.group, header.source, tag, nbytes, identity, payload)
