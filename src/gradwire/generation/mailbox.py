"""Matches point-to-point messages with requests by sender and tag, outside of every group's order.

Messages of up to `wire.MAX_EAGER` bytes are sent at once and stored at the receiver until a `recv` requests them.
Longer messages are offered first, and sent when a `recv` has a buffer for them: the receiver never allocates memory for
a size that a peer only claims. A `recv` that is cancelled loses nothing. An unmatched message stays queued. A message
that has arrived in part continues to arrive in private memory, and the next matching `recv` gets it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradwire.arrays import dtype_name
from gradwire.errors import ArrayError, GradwireError, SizeMismatch
from gradwire.wire import MAX_EAGER, Header, Kind, WireError

if TYPE_CHECKING:
    from gradwire.transports.base import Link

COPY_TAG = -1
MAX_UNMATCHED_BYTES = 64 << 20  # of one peer; above this its message link is not read
_OVERHEAD = 256  # bytes that an unmatched message counts beyond its payload


@dataclass(slots=True, eq=False)
class IncomingMessage:
    """A message that has arrived or was offered. `payload` is None until it has arrived."""

    world: int  # the sender's world rank; `source` is its rank in the group
    group: int
    source: int
    tag: int
    nbytes: int
    identity: int = 0
    payload: memoryview | None = None
    number: int = 0  # in the order of arrival
    dtype: int = 0  # of a copy: the code of its dtype; 0 for other messages

    @property
    def sender(self) -> tuple[int, int]:
        """The sender: its rank in the group as the header claims, and its world rank as the link proves."""
        return self.source, self.world

    @property
    def weight(self) -> int:
        """The bytes that this message counts while it is unmatched."""
        return _OVERHEAD + (self.nbytes if self.identity == 0 else 0)


@dataclass(slots=True, eq=False)
class Request:
    """A waiting `recv`. It is done when `sender` or `error` is set."""

    group: int
    source: int | None
    tag: int
    target: memoryview
    sender: int | None = None
    error: GradwireError | None = None
    dtype: int = 0  # of a copy: the code of its dtype; 0 for other messages
    members: Sequence[int] | None = None  # the group's world ranks; None: all ranks

    @property
    def done(self) -> bool:
        return self.sender is not None or self.error is not None

    def fits(self, message: IncomingMessage) -> bool:
        return self.group == message.group and self.tag == message.tag and self.wants(message.source, message.world)

    def wants(self, source: int, world: int) -> bool:
        """Whether this rank of the group may answer the request, and `world` is really its world rank."""
        return self.source in (None, source) and self.world(source) == world

    def world(self, source: int) -> int:
        """Return the world rank of a rank of the group; -1 if the group has no such rank."""
        if self.members is None:
            return source
        return self.members[source] if source < len(self.members) else -1


@dataclass(slots=True, eq=False)
class Offer:
    """A waiting `send`. It is accepted when the receiver has a buffer."""

    identity: int
    accepted: bool = False


@dataclass(slots=True)
class Transfer:
    """A payload that was accepted and is arriving. `request` is None after its request was cancelled."""

    message: IncomingMessage
    request: Request | None
    target: memoryview
    arriving: bool = False  # a link has begun to receive it; a second link must not


class UnmatchedMessages:
    """Messages that no `recv` has requested yet. Among those that match one `recv`, the oldest comes first."""

    def __init__(self) -> None:
        # By group and tag, then by sender: the claimed rank in the group and the proven world rank.
        self._queues: dict[tuple[int, int], dict[tuple[int, int], deque[IncomingMessage]]] = {}
        self.arrived = 0  # the number of messages so far

    def add(self, message: IncomingMessage) -> None:
        if not message.number:
            self.arrived += 1
            message.number = self.arrived
        queue = self._queues.setdefault((message.group, message.tag), {}).setdefault(message.sender, deque())
        later = (position for position, other in enumerate(queue) if message.number < other.number)
        if queue and message.number < queue[-1].number:  # it was removed before and returns
            queue.insert(next(later), message)
        else:
            queue.append(message)

    @property
    def queues(self) -> int:
        """The number of (group, tag) pairs that have messages. Empty ones are removed."""
        return len(self._queues)

    def find(self, request: Request) -> IncomingMessage | None:
        """Return the oldest message that matches a request, or None."""
        queues = self._queues.get((request.group, request.tag))
        if not queues:
            return None
        if request.source is not None:
            queue = queues.get((request.source, request.world(request.source)))
            return queue[0] if queue else None
        oldest = (queue[0] for sender, queue in queues.items() if request.wants(*sender))
        return min(oldest, key=lambda message: message.number, default=None)

    def remove(self, message: IncomingMessage) -> None:
        """Remove a message. It is the first of its queue, unless its sender withdrew it."""
        key = message.group, message.tag
        queue = self._queues[key][message.sender]
        if queue[0] is message:
            queue.popleft()
        else:
            queue.remove(message)
        if not queue:  # tags that are used only once must not use memory for ever
            del self._queues[key][message.sender]
            if not self._queues[key]:
                del self._queues[key]


class Mailbox:
    """All messages and requests of one rank. `changed` is its lock, and is notified of every change."""

    def __init__(self, accept: Callable[[int, IncomingMessage], None], has_room: Callable[[], None]) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._accept = accept  # sends the acceptance of an offer to its sender, a world rank
        self._has_room = has_room  # called when a peer that was over the limit no longer is
        self.unmatched = UnmatchedMessages()
        self._requests: list[Request] = []
        self._offers: dict[int, Offer] = {}
        self._offered: dict[tuple[int, int], IncomingMessage] = {}  # by sender and identity, until the payload arrived
        self._transfers: dict[tuple[int, int], Transfer] = {}
        self._identity = 0
        self._unmatched_bytes: dict[int, int] = {}

    def wake_waiters(self) -> None:
        """Wake the waiting threads, because something outside of the mailbox changed."""
        with self.changed:
            self.changed.notify_all()

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of requests without a message."""
        return len(self._requests)

    def post_request(self, request: Request) -> None:
        """Add the request of a `recv`. It is done at once if its message has arrived."""
        with self.changed:
            message = self.unmatched.find(request)
            if message is None:
                self._requests.append(request)
            else:
                self._match(message, request)

    def cancel_request(self, request: Request, redirect: Callable[[int, memoryview, memoryview], None]) -> bool:
        """Cancel a request; False if it was done already. A message that it had accepted stays for the next request.

        `redirect(world rank, old, new)` makes a payload that is arriving in `old` continue to arrive in `new`.
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
                        transfer.target = memoryview(bytearray(transfer.message.nbytes))
                        redirect(world, request.target, transfer.target)
                    self._add_unmatched(transfer.message)
                    return True
            return True

    def _match(self, message: IncomingMessage, request: Request) -> None:
        """Assign an unmatched message to a request, or set the request's error if they do not fit."""
        request.error = _misfit(message, request)
        if request.error is not None:
            self.changed.notify_all()
            return
        self._remove_unmatched(message)
        transfer = self._transfers.get((message.world, message.identity))
        if message.payload is not None:
            request.target[:] = message.payload
            request.sender = message.source
        elif transfer is not None:
            transfer.request = request  # it is arriving, and its first request was cancelled
        else:
            self._transfers[message.world, message.identity] = Transfer(message, request, request.target)
            self._accept(message.world, message)
        self.changed.notify_all()

    def _add_unmatched(self, message: IncomingMessage) -> None:
        self.unmatched.add(message)
        self._unmatched_bytes[message.world] = self._unmatched_bytes.get(message.world, 0) + message.weight

    def _remove_unmatched(self, message: IncomingMessage) -> None:
        self.unmatched.remove(message)
        was_overfull = self.overfull(message.world)
        self._unmatched_bytes[message.world] -= message.weight
        if was_overfull and not self.overfull(message.world):
            self._has_room()

    # -- sending ------------------------------------------------------------------------------------------------------

    def offer(self) -> Offer:
        """Make an offer for a long message. Its identity goes into the header."""
        with self.changed:
            self._identity += 1
            offer = self._offers[self._identity] = Offer(self._identity)
            return offer

    def withdraw(self, offer: Offer) -> bool:
        """Withdraw an offer; False if it was accepted already."""
        with self.changed:
            return self._offers.pop(offer.identity, None) is not None

    # -- arrivals (called by the thread that reads) -------------------------------------------------------------------

    def overfull(self, world: int) -> bool:
        return self.unmatched_bytes(world) > MAX_UNMATCHED_BYTES

    def unmatched_bytes(self, world: int) -> int:
        """Return the bytes of this peer's messages that no `recv` has requested yet."""
        return self._unmatched_bytes.get(world, 0)

    def begin(self, world: int, header: Header) -> memoryview:
        """Return memory for a payload that is about to arrive; raise `WireError` if it is not expected."""
        if header.kind == Kind.EAGER:
            if header.nbytes > MAX_EAGER:
                raise WireError(f"an eager message of {header.nbytes} bytes")
            return memoryview(bytearray(header.nbytes))
        if header.kind == Kind.PAYLOAD:
            with self.changed:
                transfer = self._transfers.get((world, header.sequence))
                if transfer is None or transfer.message.nbytes != header.nbytes:
                    raise WireError(f"a payload of {header.nbytes} bytes that was not accepted")
                if transfer.arriving:
                    raise WireError("a payload on two links at once")
                transfer.arriving = True
                return transfer.target
        if header.nbytes or header.kind not in (Kind.OFFER, Kind.ACCEPT, Kind.WITHDRAW):
            raise WireError(f"kind {header.kind}, {header.nbytes} bytes, point to point")
        return memoryview(b"")

    def finish(self, world: int, header: Header, payload: memoryview) -> None:
        """Process a message that has arrived completely."""
        with self.changed:
            match header.kind:
                case Kind.EAGER:
                    self._arrive(_message(world, header, payload))
                case Kind.OFFER:
                    message = _message(world, header, None)
                    if not message.identity or (world, message.identity) in self._offered:
                        raise WireError(f"an offer with the identity {message.identity}, which is 0 or in use")
                    self._offered[world, message.identity] = message
                    self._arrive(message)
                case Kind.PAYLOAD:
                    self._complete(world, header.sequence, payload)
                case Kind.ACCEPT:
                    offer = self._offers.pop(header.sequence, None)
                    if offer is not None:
                        offer.accepted = True
                case Kind.WITHDRAW:
                    self._withdrawn(world, header.sequence)
            self.changed.notify_all()

    def _arrive(self, message: IncomingMessage) -> None:
        self._add_unmatched(message)
        for request in [request for request in self._requests if request.fits(message)]:
            self._requests.remove(request)
            self._match(message, request)
            if request.error is None:
                return

    def _withdrawn(self, world: int, identity: int) -> None:
        message, transfer = self._offered.get((world, identity)), self._transfers.get((world, identity))
        if message is None:
            return
        if transfer is not None and transfer.arriving:
            raise WireError("a message that is withdrawn while it arrives")
        del self._offered[world, identity]
        if transfer is None or transfer.request is None:
            self._remove_unmatched(message)
        if transfer is not None:
            del self._transfers[world, identity]
            if transfer.request is not None:
                self.post_request(transfer.request)  # its acceptance and the withdrawal crossed

    def _complete(self, world: int, identity: int, payload: memoryview) -> None:
        transfer = self._transfers.pop((world, identity))
        del self._offered[world, identity]
        message, request = transfer.message, transfer.request
        message.payload = payload
        if request is not None:
            if transfer.target is not request.target:
                request.target[:] = payload
            request.sender = message.source


def _message(world: int, header: Header, payload: memoryview | None) -> IncomingMessage:
    identity = 0 if payload is not None else header.sequence
    tag = header.fingerprint if header.fingerprint < 1 << 63 else header.fingerprint - (1 << 64)
    nbytes = header.nbytes if payload is not None else header.tile | header.round << 32
    dtype = max(0, -tag)  # the tags of users are not negative; a negative tag is the dtype code of a copy
    return IncomingMessage(
        world, header.group, header.source, max(tag, COPY_TAG), nbytes, identity, payload, dtype=dtype
    )


def _misfit(message: IncomingMessage, request: Request) -> GradwireError | None:
    """Return the error if a message does not fit the buffer of a request; None if it fits."""
    if message.dtype != request.dtype:
        theirs, mine = dtype_name(message.dtype), dtype_name(request.dtype)
        text = f"rank {message.source} copies {theirs}, but y is {mine}; the copy is kept"
        return ArrayError(text, operation="copy", peer=message.source)
    if message.nbytes == len(request.target):
        return None
    what = f"copies {message.nbytes} bytes" if message.dtype else f"sent {message.nbytes} bytes with tag {message.tag}"
    text = f"rank {message.source} {what}, the buffer has {len(request.target)}; the message is kept"
    return SizeMismatch(
        text,
        expected=len(request.target),
        got=message.nbytes,
        operation="copy" if message.dtype else "recv",
        peer=message.source,
    )


class MessageSink:
    """Passes point-to-point messages to the mailbox as they are read. `check` refuses those of another generation."""

    def __init__(self, mailbox: Mailbox, check: Callable[[Header], None]) -> None:
        self._mailbox = mailbox
        self._check = check

    def begin(self, link: Link, header: Header) -> memoryview:
        self._check(header)
        return self._mailbox.begin(link.peer, header)

    def finish(self, link: Link, header: Header, payload: memoryview) -> None:
        self._mailbox.finish(link.peer, header, payload)
