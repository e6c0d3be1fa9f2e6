"""Links between ranks that are threads of one process: bounded byte pipes in memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from gradwire.transports.base import Arrivals, Bell, Buffer, Check, Link, LinkClosed, no_check

PIPE_BYTES = 256 * 1024
DEAD_AFTER = 0.5  # seconds after the end of its last thread, after which a rank counts as dead


def ignore(transport: LocalTransport) -> None:
    """Do nothing when a rank makes a call."""


class Hub:
    """The shared state of the ranks of one process: a lock for all pipes, and a condition for each rank.

    `on_call` gets a rank's transport at the beginning of each call of that rank, before anything is sent.
    """

    def __init__(self, size: int, on_call: Callable[[LocalTransport], None] = ignore) -> None:
        self.on_call = on_call
        self.lock = threading.Lock()
        self.activity = [threading.Condition(self.lock) for _ in range(size)]
        self.transports = [LocalTransport(self, rank) for rank in range(size)]


class _Pipe:
    """One direction of a link. The hub's lock protects it."""

    __slots__ = ("chunks", "closed", "filled")

    def __init__(self) -> None:
        self.chunks: deque[memoryview] = deque()
        self.filled = 0
        self.closed = False

    def put(self, buffers: Sequence[Buffer]) -> int:
        taken = 0
        for buffer in buffers:
            part = memoryview(buffer)[: PIPE_BYTES - self.filled]
            if part.nbytes:
                self.chunks.append(memoryview(bytes(part)))
                self.filled += part.nbytes
                taken += part.nbytes
            if part.nbytes < len(buffer):
                break
        return taken

    def get(self, buffers: Sequence[memoryview]) -> int:
        got = 0
        for buffer in buffers:
            at = 0
            while at < len(buffer) and self.chunks:
                chunk = self.chunks[0]
                part = min(len(chunk), len(buffer) - at)
                buffer[at : at + part] = chunk[:part]
                at += part
                if part == len(chunk):
                    self.chunks.popleft()
                else:
                    self.chunks[0] = chunk[part:]
            got += at
            if at < len(buffer):
                break
        self.filled -= got
        return got


class LocalLink:
    """A link between two threads."""

    def __init__(self, hub: Hub, rank: int, peer: int, channel: int, outgoing: _Pipe, incoming: _Pipe) -> None:
        self.rank = rank
        self.peer = peer
        self.channel = channel
        self._hub = hub
        self._outgoing = outgoing
        self._incoming = incoming

    def send(self, buffers: Sequence[Buffer]) -> int:
        with self._hub.lock:
            if self._outgoing.closed:
                raise LinkClosed
            taken = self._outgoing.put(buffers)
            if taken:
                self._hub.activity[self.peer].notify_all()
        return taken

    def receive(self, buffers: Sequence[memoryview]) -> int:
        with self._hub.lock:
            got = self._incoming.get(buffers)
            if got:
                self._hub.activity[self.peer].notify_all()
            elif self._incoming.closed:
                raise LinkClosed
        return got

    def close(self) -> None:
        with self._hub.lock:
            self.end()
        self._hub.transports[self.rank]._forget(self)

    def end(self) -> None:
        """Close both directions. The caller holds the hub's lock."""
        self._outgoing.closed = self._incoming.closed = True
        for rank in (self.peer, self.rank):
            self._hub.activity[rank].notify_all()

    def readable(self) -> bool:
        return bool(self._incoming.filled) or self._incoming.closed

    def writable(self) -> bool:
        return self._outgoing.filled < PIPE_BYTES or self._outgoing.closed


class LocalBell:
    """A bell that notifies the condition of one rank."""

    def __init__(self, activity: threading.Condition) -> None:
        self._activity = activity
        self.rung = False

    def ring(self) -> None:
        with self._activity:
            self.rung = True
            self._activity.notify_all()

    def silence(self) -> None:
        with self._activity:
            self.rung = False


class LocalTransport:
    """The transport of one rank to the other ranks of its process."""

    name = "local"
    encrypted = False
    relayed = False
    cores = 0.0  # never spin: with one GIL, spinning would only keep the peer from answering

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank = rank
        self.arrivals = Arrivals()
        self._hub = hub
        self._links: set[LocalLink] = set()
        self._threads: tuple[threading.Thread, ...] = ()
        self._dead_since: float | None = None

    def touch(self) -> None:
        """Remember the threads that act for this rank. The rank counts as dead after the last of them has ended."""
        current = threading.current_thread()
        if current not in self._threads:
            self._threads = (*(thread for thread in self._threads if thread.is_alive()), current)
        self._hub.on_call(self)

    def gone(self, peer: int) -> bool:
        return self._hub.transports[peer]._dead()

    def _dead(self) -> bool:
        if not self._threads or any(thread.is_alive() for thread in self._threads):
            self._dead_since = None
            return False
        now = time.monotonic()
        if self._dead_since is None:
            self._dead_since = now
        return now - self._dead_since >= DEAD_AFTER

    def listens(self, peer: int) -> bool:
        return True

    def dial(self, peer: int, channel: int, deadline: float, check: Check = no_check) -> Link:
        there, back = _Pipe(), _Pipe()
        mine = LocalLink(self._hub, self.rank, peer, channel, there, back)
        theirs = LocalLink(self._hub, peer, self.rank, channel, back, there)
        other = self._hub.transports[peer]
        self._links.add(mine)
        if other.arrivals.refusal(self.rank, channel):
            mine.close()  # the peer has closed: as with a socket, the first use of the link raises
            return mine
        other._links.add(theirs)
        other.arrivals.add(theirs)
        return mine

    def dial_all(
        self, peers: Sequence[int], channel: int, deadline: float, made: Callable[[Link], None], check: Check = no_check
    ) -> None:
        for peer in peers:
            made(self.dial(peer, channel, deadline, check))

    def accept(self, peer: int, channel: int, deadline: float, check: Check = no_check) -> Link:
        return self.arrivals.take(peer, channel, deadline, check)

    def _forget(self, link: LocalLink) -> None:
        self._links.discard(link)
        self.arrivals.forget(link)

    def adopt(self, channel: int, taker: Callable[[Link], None]) -> None:
        self.arrivals.adopt(channel, taker)

    def bell(self) -> LocalBell:
        return LocalBell(self._hub.activity[self.rank])

    def wait(self, reads: Iterable[Link], writes: Iterable[Link], bell: Bell, timeout: float) -> list[Link]:
        assert isinstance(bell, LocalBell)
        readers = [link for link in reads if isinstance(link, LocalLink)]
        writers = [link for link in writes if isinstance(link, LocalLink)]
        activity = self._hub.activity[self.rank]
        with activity:
            activity.wait_for(
                lambda: (
                    bell.rung or any(link.readable() for link in readers) or any(link.writable() for link in writers)
                ),
                timeout,
            )
            return [link for link in readers if link.readable()]

    def close(self) -> None:
        self.arrivals.close()
        links = list(self._links)
        with self._hub.lock:  # all at once, like the links of a process that ends: otherwise this rank's other threads
            for link in links:  # could report, over links that are still open, that the peer of a closed one is lost
                link.end()
        for link in links:
            self._forget(link)

    def abandon(self) -> None:
        """Do nothing: a forked child has copies of the pipes, and no descriptors."""
