"""Point-to-point messages that have arrived, and the requests of the calls that receive them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.arrays import Array, DType, raw
from gradwire.errors import ArrayError, GradwireError, SizeMismatch
from gradwire.generation.message_format import Description, description_bytes, parse_description
from gradwire.wire import MAX_EAGER, Header, Kind, WireError

COPY_TAG = -1  # of copies; the tags of users are not negative
_OVERHEAD = 256  # bytes that an unmatched message counts beyond its payload and its description


@dataclass(slots=True, eq=False)
class IncomingMessage:
    """A message that has arrived or was offered. `payload` is None until it has arrived.

    The description stays packed: a tuple for the shape would take more memory than an unmatched message counts.
    """

    world: int  # the sender's world rank; `source` is its rank in the group
    group: int
    source: int
    tag: int
    nbytes: int
    packed: bytes = b""  # the description
    identity: int = 0
    payload: memoryview | None = None
    number: int = 0  # in the order of arrival

    @property
    def sender(self) -> tuple[int, int]:
        """The sender: its rank in the group as the header claims, and its world rank as the link proves."""
        return self.source, self.world

    @property
    def weight(self) -> int:
        """The bytes that this message counts while it is unmatched."""
        return _OVERHEAD + len(self.packed) + (self.nbytes if self.identity == 0 else 0)

    @property
    def description(self) -> Description:
        """The dtype and the shape of the message. They fit the number of bytes."""
        return parse_description(self.packed)


def parse_message(world: int, header: Header, content: memoryview) -> IncomingMessage:
    """Return an eager message or an offer; raise `WireError` if its description does not fit its size."""
    description = parse_description(content)
    length = description_bytes(len(description.shape))
    eager = header.kind == Kind.EAGER
    nbytes = len(content) - length if eager else header.tile | header.round << 32
    tag = header.fingerprint if header.fingerprint < 1 << 63 else header.fingerprint - (1 << 64)
    if description.nbytes != nbytes or (not eager and len(content) != length) or (eager and nbytes > MAX_EAGER):
        raise WireError(f"a message of {nbytes} bytes whose description gives {description.nbytes}")
    if tag < COPY_TAG:
        raise WireError(f"a message with tag {tag}")
    identity, payload = (0, content[length:]) if eager else (header.sequence, None)
    packed = bytes(content[:length])
    return IncomingMessage(world, header.group, header.source, tag, nbytes, packed, identity, payload)


@dataclass(slots=True, eq=False)
class Request:
    """A waiting receive. It is done when `sender` or `error` is set.

    Without a buffer (`target` is None) a message of any size fits. Memory for it is allocated when it is matched:
    `array` is then the result.
    """

    group: int
    source: int | None
    tag: int
    target: memoryview | None
    sender: int | None = None
    error: GradwireError | None = None
    dtype: DType | None = None  # of a copy: its messages must have this dtype
    members: Sequence[int] | None = None  # the group's world ranks; None: all ranks
    array: Array | None = None

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

    def memory_for(self, message: IncomingMessage) -> memoryview:
        """Return the memory for a message that matches; raise `GradwireError` if the message does not fit."""
        if self.target is not None:
            self._check_fit(message, len(self.target))
            return self.target
        dtype, shape, _ = message.description
        try:
            self.array = np.empty(shape, dtype.storage)
        except (MemoryError, ValueError) as error:
            text = f"no memory for the message of rank {message.source}, {message.nbytes} bytes: {error}"
            raise ArrayError(f"{text}; the message is kept", operation="recv", peer=message.source) from error
        self.target = raw(self.array.reshape(-1))
        return self.target

    def release_memory(self) -> None:
        """Release the memory that was allocated for a message, because its sender has withdrawn it."""
        if self.array is not None:
            self.array = self.target = None

    def _check_fit(self, message: IncomingMessage, room: int) -> None:
        source = message.source
        if self.dtype is not None and (theirs := message.description.dtype) is not self.dtype:
            text = f"rank {source} copies {theirs.name}, but y is {self.dtype.name}; the copy is kept"
            raise ArrayError(text, operation="copy", peer=source)
        if message.nbytes != room:
            copies = message.tag == COPY_TAG
            what = f"copies {message.nbytes} bytes" if copies else f"sent {message.nbytes} bytes with tag {message.tag}"
            text = f"rank {source} {what}, the buffer has {room}; the message is kept"
            operation = "copy" if copies else "recv"
            raise SizeMismatch(text, expected=room, got=message.nbytes, operation=operation, peer=source)


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

    def offered_by(self, world: int) -> list[IncomingMessage]:
        """Return the messages that a world rank has offered and that no receive has requested."""
        queues = (queue for senders in self._queues.values() for queue in senders.values())
        return [message for queue in queues for message in queue if message.world == world and message.identity]

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
