"""The interfaces of a transport: it makes links, and waits for them.

A link is a non-blocking, ordered, duplex stream of bytes to one peer on one channel. A channel is a number that both
ends know: each group's collectives have one, so have control messages and point-to-point messages, and none can
stand in the way of another. Everything above (messages, groups, failures) is the same over every transport.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, runtime_checkable

from gradwire.errors import Closed, NoConnection

LIFE_CHANNEL = 0  # of no transport: the peer's process itself
CONTROL_CHANNEL = 1
MESSAGE_CHANNEL = 2
LIFELINE_CHANNEL = 3
CHECK_SECONDS = 0.1  # how often a wait for a link asks whether it still makes sense

Buffer = memoryview | bytearray | bytes
Check = Callable[[], None]


def no_check() -> None:
    """For waits that only their deadline ends."""


class LinkClosed(Exception):
    """The other end of a link is gone; what it means for the job is decided above."""


class Link(Protocol):
    """One end of a stream. Neither method blocks; one thread sends and one receives at a time."""

    peer: int
    channel: int

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Take as many bytes as there is room for and say how many. If that is not all, come back with the rest: what
        was taken may have to wait for it."""

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers with what has arrived and say how many bytes; 0 if nothing. `LinkClosed` at the end."""

    def close(self) -> None:
        """Give the link up; the peer sees its end."""


@runtime_checkable
class NetworkLink(Link, Protocol):
    """A link whose bytes may be lost on the way and sent again."""

    def drops_packets(self) -> bool:
        """Whether nothing that was sent lately is acknowledged; False where that cannot be known. For links on which
        something is sent all the time."""

    def repair_within(self, seconds: float) -> None:
        """Send what is lost again at least that often, where the kernel can be told so."""


@runtime_checkable
class KeyedLink(Link, Protocol):
    """A link of a lifeline that carries one-time tokens."""

    key: bytes
    """What tokens are made from, at both ends."""


class Bell(Protocol):
    """Wakes every wait that listens to it, from any thread, until it is silenced."""

    def ring(self) -> None: ...
    def silence(self) -> None: ...


class Resource(Protocol):
    """Something that ends with a generation."""

    def close(self) -> None: ...

    def abandon(self) -> None:
        """In a forked child: let go of every descriptor without a word to the peers."""


class Transport(Resource, Protocol):
    """What `local` and `tcp` offer alike."""

    name: str
    rank: int
    encrypted: bool
    """Whether what is written to the descriptors of links is not what is sent on them."""
    cores: float
    """Usable cores for each rank of this host: a thread may poll before it sleeps where it has one to itself."""

    def dial(self, peer: int, channel: int, deadline: float, check: Check = no_check) -> Link:
        """Make a link; the peer gets its end from `accept`, or through `adopt`. `check` may end the wait by raising."""

    def dial_all(
        self, peers: Sequence[int], channel: int, deadline: float, made: Callable[[Link], None], check: Check = no_check
    ) -> None:
        """Make links to several peers at the same time; `made` gets each as soon as it is there, in any order."""

    def accept(self, peer: int, channel: int, deadline: float, check: Check = no_check) -> Link:
        """Wait for the link that the peer dials."""

    def adopt(self, channel: int, taker: Callable[[Link], None]) -> None:
        """Hand links that peers dial on this channel to `taker`, as they come, instead of keeping them for `accept`."""

    def bell(self) -> Bell: ...

    def wait(self, reads: Iterable[Link], writes: Iterable[Link], bell: Bell, timeout: float) -> Collection[Link]:
        """Return when a link can be read or written, the bell rings, or the time is over: those to read from."""

    def gone(self, peer: int) -> bool:
        """Whether the peer is known to have died without its links being closed (in-process ranks can)."""

    def listens(self, peer: int) -> bool:
        """Whether somebody still accepts connections where the peer did when it registered."""

    def touch(self) -> None:
        """The calling thread acts for this rank."""


class Arrivals:
    """Links that peers have dialled, until somebody here asks for them; every (peer, channel) at most once."""

    MAX_PARKED = 4096

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parked: dict[tuple[int, int], Link] = {}
        self._live: dict[tuple[int, int], Link] = {}
        self._takers: dict[int, Callable[[Link], None]] = {}
        self._closed = False

    def refusal(self, peer: int, channel: int) -> str | None:
        """Why a link from this peer on this channel cannot be taken, if it cannot."""
        with self._changed:
            if self._closed:
                return "this rank is closing"
            if (peer, channel) in self._live:
                return f"rank {peer} already holds this link"
            if len(self._parked) >= self.MAX_PARKED:
                return "too many links wait to be taken"
        return None

    def add(self, link: Link) -> None:
        key = link.peer, link.channel
        with self._changed:
            late = self._closed or key in self._live  # another admission of the same link was quicker
            if not late:
                self._live[key] = link
            taker = self._takers.get(link.channel)
            if taker is None and not late:
                self._parked[key] = link
                self._changed.notify_all()
        if late:
            link.close()
        elif taker is not None:
            taker(link)

    def adopt(self, channel: int, taker: Callable[[Link], None]) -> None:
        with self._changed:
            self._takers[channel] = taker
            early = [key for key in self._parked if key[1] == channel]
            links = [self._parked.pop(key) for key in early]
        for link in links:
            taker(link)

    def forget(self, link: Link) -> None:
        """The link was closed here: the peer may dial anew."""
        with self._changed:
            if self._live.get((link.peer, link.channel)) is link:
                del self._live[link.peer, link.channel]

    def take(self, peer: int, channel: int, deadline: float, check: Check = no_check) -> Link:
        while True:
            with self._changed:
                remaining = deadline - time.monotonic()
                pause = min(remaining, CHECK_SECONDS)
                self._changed.wait_for(lambda: self._closed or (peer, channel) in self._parked, pause)
                if (peer, channel) in self._parked:
                    return self._parked.pop((peer, channel))
                if self._closed:
                    raise Closed("the transport is closed", peer=peer)
            check()
            if remaining <= 0:
                raise NoConnection(f"rank {peer} did not connect in time", peer=peer)

    def close(self) -> list[Link]:
        """Refuse everybody from now on; returns the links nobody took."""
        with self._changed:
            self._closed = True
            parked, self._parked = list(self._parked.values()), {}
            self._changed.notify_all()
        return parked
