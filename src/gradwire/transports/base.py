"""The interfaces `Transport`, which makes links and waits for them, and `Link`.

A link is a non-blocking, ordered, duplex stream of bytes to one peer on one channel. A channel is a number that both
ends know. The collectives of each group have a channel of their own, and so have control messages, point-to-point
messages and heartbeats, so that none of them blocks another. The layers above are the same for every transport.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, runtime_checkable

from gradwire.errors import Closed, NoConnection

LIFE_CHANNEL = 0  # of links that represent the peer's process; no transport uses it
CONTROL_CHANNEL = 1
MESSAGE_CHANNEL = 2
LIFELINE_CHANNEL = 3
CHECK_SECONDS = 0.1  # between calls of `check` while a link is being opened

Buffer = memoryview | bytearray | bytes
Check = Callable[[], None]


def no_check() -> None:
    """Do nothing, for waits that only a deadline ends."""


class LinkClosed(Exception):
    """The other end of a link is closed. The caller decides what this means for the job."""


class Link(Protocol):
    """One end of a stream. No method blocks. One thread may send while another one receives."""

    peer: int
    channel: int

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Send as many bytes as there is room for, and return their number.

        After a partial send the caller must call again with the rest: the accepted bytes may be delivered only then.
        """

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers with bytes that have arrived, and return their number. Raise `LinkClosed` at the end."""

    def close(self) -> None:
        """Close the link. The peer's end raises `LinkClosed`."""


@runtime_checkable
class NetworkLink(Link, Protocol):
    """A link over a network, which may lose packets and send them again."""

    def drops_packets(self) -> bool:
        """Whether packets sent recently are not acknowledged; False if that cannot be known.

        The answer is meaningful only for links on which data is sent all the time.
        """

    def repair_within(self, seconds: float) -> None:
        """Limit the time between retransmissions, if the kernel supports that."""


@runtime_checkable
class KeyedLink(Link, Protocol):
    """A lifeline link that carries one-time tokens."""

    key: bytes
    """The secret from which both ends derive the tokens."""


class Bell(Protocol):
    """Wakes all waits that got this bell. Any thread may ring it. It stays rung until it is silenced."""

    def ring(self) -> None: ...
    def silence(self) -> None: ...


class Resource(Protocol):
    """Something that is closed with a generation."""

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Close this process's descriptors, in a forked child, without sending anything to the peers."""


class Transport(Resource, Protocol):
    """Makes links between ranks, and waits for them."""

    name: str
    rank: int
    encrypted: bool
    """Whether links encrypt, so that data must not be written to their descriptors directly."""
    relayed: bool
    """Whether a Python thread of this process moves the bytes of links: nothing is sent while the GIL is held."""
    cores: float
    """Usable cores for each rank of this host. With at least 1, a waiting thread may spin before it sleeps."""

    def dial(self, peer: int, channel: int, deadline: float, check: Check = no_check) -> Link:
        """Open a link. The peer gets its end from `accept` or `adopt`. `check` may raise to end the wait."""

    def dial_all(
        self, peers: Sequence[int], channel: int, deadline: float, made: Callable[[Link], None], check: Check = no_check
    ) -> None:
        """Open links to several peers at the same time. `made` gets each link as soon as it is open, in any order."""

    def accept(self, peer: int, channel: int, deadline: float, check: Check = no_check) -> Link:
        """Wait for the link that the peer dials."""

    def adopt(self, channel: int, taker: Callable[[Link], None]) -> None:
        """Pass links that peers dial on this channel to `taker` as they arrive, instead of to `accept`."""

    def bell(self) -> Bell: ...

    def wait(self, reads: Iterable[Link], writes: Iterable[Link], bell: Bell, timeout: float) -> Collection[Link]:
        """Wait until a link can be read or written, the bell rings, or the time is over. Return the readable links."""

    def gone(self, peer: int) -> bool:
        """Whether the peer is known to have ended although its links are open. Only in-process ranks can."""

    def listens(self, peer: int) -> bool:
        """Whether the address that the peer registered still accepts connections."""

    def touch(self) -> None:
        """Note that the calling thread acts for this rank."""


class Arrivals:
    """Links that peers have dialled and that are not accepted yet. Each (peer, channel) has one link at most."""

    MAX_PARKED = 4096

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parked: dict[tuple[int, int], Link] = {}
        self._live: dict[tuple[int, int], Link] = {}
        self._takers: dict[int, Callable[[Link], None]] = {}
        self._closed = False

    def refusal(self, peer: int, channel: int) -> str | None:
        """Return the reason to refuse a link from this peer on this channel, or None."""
        with self._changed:
            if self._closed:
                return "this rank is closing"
            if (peer, channel) in self._live:
                return f"rank {peer} already has this link"
            if len(self._parked) >= self.MAX_PARKED:
                return "too many links wait to be accepted"
        return None

    def add(self, link: Link) -> None:
        key = link.peer, link.channel
        with self._changed:
            late = self._closed or key in self._live  # the same link was admitted twice at the same time
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
        """Forget a link that this rank closed, so that the peer may dial again."""
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
        """Refuse all links from now on, and return those that were not accepted."""
        with self._changed:
            self._closed = True
            parked, self._parked = list(self._parked.values()), {}
            self._changed.notify_all()
        return parked
