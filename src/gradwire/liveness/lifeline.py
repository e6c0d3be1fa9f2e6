"""The lifeline: sends this rank's heartbeats and receives those of the others.

    ranks that share memory     beat in it: a word behind the directory of their arena
    other ranks                 beat over a link of their own: each pair of up to 32 ranks, beyond that ring neighbours

A native thread beats (native/lifeline.hpp): it shows that the process runs, whatever its interpreter does.
`heartbeat_messages` has the form of beats under TLS. Without the core the service thread beats, slowly, and such a rank
may be silent for 10 s. Who beats but does not come is stuck, not lost. The service thread looks every 0.1 s whom it
heard; `Detector` decides who is silent for too long. On one host the end of a process is seen as well (a pidfd, as a
link on which nothing comes but the end), in milliseconds. Between hosts silence may be the network's: the deadline is
longer there, and all ranks of a job use the longest that any of them has in `GRADWIRE_PEER_TIMEOUT`.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.host import machine, native_core
from gradwire.liveness import heartbeat_messages
from gradwire.liveness.control import Control
from gradwire.liveness.detector import (
    HEARTBEAT_SECONDS,
    LINK_SECONDS,
    PEER_SECONDS,
    SHARED_MEMORY_SECONDS,
    SLOW_HEARTBEAT_SECONDS,
    Observation,
    Standstill,
)
from gradwire.liveness.heartbeat_messages import TOKEN_BYTES, HeartbeatSink, TokenReader, Tokens
from gradwire.transports.base import (
    LIFE_CHANNEL,
    LIFELINE_CHANNEL,
    KeyedLink,
    Link,
    LinkClosed,
    NetworkLink,
    Transport,
)
from gradwire.transports.frames import FrameReader, Outbox, Reader
from gradwire.transports.shm.shared_memory import OwnArena, SharedMemory
from gradwire.wire import HEADER_BYTES

DEATH_SECONDS = 0.05  # in which the last messages of a process that has ended are read
PURE_SECONDS = 10.0  # of silence of a rank whose beats need its interpreter
ALIVE_SECONDS = 1.0  # who was heard within that time is called alive
ALL_PAIRS = 32  # ranks
FEED_BLOCKS = 8  # of tokens, at most, that are made for a link in one turn of the service thread
READ_AHEAD = 64 * HEADER_BYTES
HEARTBEAT_THREAD = b"gradwire-beat"  # as native/lifeline.cpp calls it
STOPPED = "TtZX"  # states of a process that does not run, as /proc names them
WAITING = "RD"  # states of a thread that goes on as soon as it has a core, or the kernel an answer
LEAST_TIMEOUT = 0.5  # between hosts: TCP sends a lost packet again after 0.2 s
MOST_TIMEOUT = 600.0  # connections give up a little later, whatever is waited for


@dataclass(frozen=True, slots=True)
class HeartbeatProfile:
    """What others have to know of a rank to judge its silence."""

    native: bool  # its beats do not need its interpreter
    pid: int
    namespace: str  # within which the pid means something
    started: int = 0  # when its process did: the pid may be another's later
    timeout: float = PEER_SECONDS  # how long a rank on another host may be silent, as far as it is asked

    @classmethod
    def own(cls, timeout: float = PEER_SECONDS) -> HeartbeatProfile:
        namespace = ""
        with contextlib.suppress(OSError):
            namespace = f"{machine.identity()}/{os.stat('/proc/self/ns/pid').st_ino}"
        status = machine.process_status(os.getpid())
        return cls(native_core.available(), os.getpid(), namespace, status.started if status else 0, timeout)

    def to_wire(self) -> list[Any]:
        return [self.native, self.pid, self.namespace, self.started, self.timeout]

    @classmethod
    def from_wire(cls, told: object) -> HeartbeatProfile:
        match told:
            case [bool(native), int(pid), str(namespace), int(started), int(timeout) | float(timeout)] if (
                LEAST_TIMEOUT <= timeout <= MOST_TIMEOUT
            ):
                return cls(native, pid, namespace, started, float(timeout))
        return cls(False, 0, "")

    def observe(self) -> Observation:
        """What is seen of its process now, on the machine that it runs on."""
        status = machine.process_status(self.pid)
        if status is None or status.started != self.started or status.state in STOPPED:
            return Observation.STOPPED
        return Observation.STARVED if status.state == "D" or heartbeat_thread_waits(self.pid) else Observation.OTHER


Dial = Callable[[int], Link]


class Lifeline:
    """One rank's lifeline. Only `tick` is the service thread's own; everything else is for any thread."""

    def __init__(
        self,
        control: Control,
        record: bytes,
        sink: HeartbeatSink,
        pump: Callable[[Reader], None],
        remote: Collection[int] = (),
    ) -> None:
        """`remote` are the ranks on other hosts."""
        self._control = control
        self._remote = frozenset(remote)
        self._record = record  # what a beat is, on a link
        self._sink = sink
        self._pump = pump  # reads a link, and sees to it if that fails
        self._detector = sink.detector
        self.standstill = Standstill()
        self._lock = threading.Lock()
        self._begun = self._closed = False
        self._thread: Any = None  # that beats; the core's
        self._arena: OwnArena | None = None
        self._shared: SharedMemory | None = None
        self._linked: set[int] = set()  # ranks with which there is a link
        self._missing: set[int] = set()  # of these, until there is
        self._readers: list[Reader] = []
        self._outboxes: dict[int, Outbox] = {}  # for beats that this class makes itself; by id of the link
        self._tokens: dict[int, tuple[int, Tokens]] = {}  # for links that leave TLS: the descriptor, and what to send
        self._to_watch: deque[tuple[int, HeartbeatProfile]] = deque()  # whom to watch, for the service thread to see
        self._timeout = PEER_SECONDS
        self._observable: dict[int, HeartbeatProfile] = {}  # ranks whose processes can be looked at
        self._dead: dict[int, float] = {}  # ranks whose process ended, and until when their goodbye may come
        self._next_heartbeat = -math.inf

    def begin(self, native: bool, arena: OwnArena | None) -> None:
        """Beat, in memory that ranks of this host may come to share; without the core only where there are links."""
        self._arena = arena  # which must be there as long as the thread writes to it
        if native:
            self._thread = native_core.native.Lifeline(HEARTBEAT_SECONDS)
            if arena is not None:
                self._thread.write_to(arena.address)
            self._thread.start()

    def connect(self, shared: SharedMemory | None, size: int, transport: Transport, dial: Dial) -> None:
        """Hear those who share memory, and make links to those who do not: of each pair the higher rank dials."""
        rank = self._control.rank
        self._shared = shared
        self._linked = linked(rank, size, set(shared.peers) if shared is not None else set())
        self._missing = set(self._linked)
        self._begun = True
        transport.adopt(LIFELINE_CHANNEL, self.add_link)
        for peer in sorted(self._linked):
            if peer < rank:
                self.add_link(dial(peer))

    def watch(self, profiles: Sequence[HeartbeatProfile]) -> None:
        """From now on judge silence: all have begun."""
        rank = self._control.rank
        self._timeout = max(profile.timeout for profile in profiles)
        for peer in sorted(self._sharing | self._linked):
            profile = profiles[peer]
            if profile.native and profile.started and profile.namespace == profiles[rank].namespace != "":
                self._observable[peer] = profile
            self._to_watch.append((peer, profile))

    @property
    def _sharing(self) -> set[int]:
        """The ranks that share memory with this one."""
        return set(self._shared.peers) if self._shared is not None else set()

    def add_link(self, link: Link) -> None:
        """Beat on a link to a rank, and hear its beats there."""
        key = link.key if isinstance(link, KeyedLink) else None
        with self._lock:
            welcome = not self._closed and link.peer in self._missing
            if welcome:
                self._missing.remove(link.peer)
                self._send_on(link, key)
                self._readers = [*self._readers, self._reader(link, key)]
        if not welcome:
            link.close()

    def _send_on(self, link: Link, key: bytes | None) -> None:
        tokens = Tokens(key, self._control.rank) if key is not None else None
        if tokens is not None:
            self._tokens[id(link)] = _descriptor(link), tokens
        if self._thread is None:
            self._outboxes[id(link)] = Outbox(link)
        elif tokens is None:
            self._thread.add(_descriptor(link), self._record)
        else:
            self._thread.add_tokens(
                _descriptor(link), TOKEN_BYTES, heartbeat_messages.MARK_BLOCKS * heartbeat_messages.BLOCK_TOKENS
            )
            self._thread.feed(_descriptor(link), tokens.block())

    def _reader(self, link: Link, key: bytes | None) -> Reader:
        if key is not None:
            return TokenReader(link, Tokens(key, link.peer), self._sink)
        return FrameReader(link, self._sink, threading.Lock(), READ_AHEAD)

    def link_ended(self, link: Link) -> None:
        """A link is about to be closed: nothing may be written there, its descriptor may soon be another's."""
        if link.channel == LIFE_CHANNEL:
            self._dead[link.peer] = time.monotonic() + DEATH_SECONDS
        elif link.channel == LIFELINE_CHANNEL:
            with self._lock:
                if self._thread is not None:
                    self._thread.drop(_descriptor(link))
                self._outboxes.pop(id(link), None)
                self._tokens.pop(id(link), None)
                self._readers = [reader for reader in self._readers if reader.link is not link]

    def ignore(self, peer: int) -> None:
        """Hear a rank no more, as if the way to it were cut: for tests of what happens then."""
        self._observable.pop(peer, None)
        self._sink.ignored.add(peer)

    def close(self) -> None:
        """Beat no more; the links are the transport's to close."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._thread.stop()

    def abandon(self) -> None:
        """In a forked child: the thread is not here, and nothing of it is touched."""
        self._closed = True

    # -- the service thread -------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Listen, and tell who is lost; the seconds until the next call."""
        self.standstill.tick(now)
        pause = self._tick(now)
        self.standstill.expect_tick(now + pause)
        return pause

    def _tick(self, now: float) -> float:
        pause = self._report_deaths(now)
        if not self._begun or not self._control.intact:
            return pause
        while self._to_watch:
            self._watch(*self._to_watch.popleft(), now)
        if now >= self._detector.due:
            self._send_heartbeats(now)
            self._receive_heartbeats(now)
            for peer, silence in self._detector.tick(now, self.observe):
                self._control.lost(peer, now, self._describe(peer, silence))
        return min(pause, self._detector.due - now)

    def _watch(self, peer: int, profile: HeartbeatProfile, now: float) -> None:
        """Begin to judge the silence of a rank."""
        if peer in self._remote:
            link = self._link_to(peer)
            if isinstance(link, NetworkLink):  # else TCP waits for as long again as an outage has lasted
                link.repair_within(max(1.0, self._timeout / 4))
            least = LINK_SECONDS if profile.native else PURE_SECONDS
            self._detector.watch_remote(peer, now, max(least, self._timeout), least=least)
        elif profile.native:
            self._detector.watch(peer, now, SHARED_MEMORY_SECONDS if peer in self._sharing else LINK_SECONDS)
        else:
            self._detector.watch(peer, now, PURE_SECONDS, PURE_SECONDS, slow=True)

    def _describe(self, peer: int, silence: float) -> str:
        """What happened to a rank that is lost, as its error tells it."""
        if self.observe(peer) is Observation.OUTAGE:
            return f"has been silent for {silence:.2f} s: the network to rank {peer} drops packets"
        return f"has been silent for {silence:.2f} s (frozen or cut off)"

    def _report_deaths(self, now: float) -> float:
        """Report ranks that died although their links are open: a child keeps them. The seconds until the next."""
        for peer, until in list(self._dead.items()):
            if now >= until:
                del self._dead[peer]
                self._control.lost(peer, now, "died")
        return min(self._dead.values(), default=math.inf) - now

    def _send_heartbeats(self, now: float) -> None:
        """What the native thread cannot do: beat if there is none, and make tokens for it."""
        if self._thread is not None:
            for descriptor, tokens in list(self._tokens.values()):
                left = -(-self._thread.ahead(descriptor) // heartbeat_messages.BLOCK_TOKENS)
                for _ in range(min(FEED_BLOCKS, heartbeat_messages.STOCK_BLOCKS - left)):
                    self._thread.feed(descriptor, tokens.block())
        elif now >= self._next_heartbeat:
            self._next_heartbeat = now + SLOW_HEARTBEAT_SECONDS
            for link, outbox in list(self._outboxes.items()):
                with contextlib.suppress(LinkClosed, OSError):  # the reading side learns of it
                    if outbox.flush():
                        outbox.post(self._tokens[link][1].take(TOKEN_BYTES) if link in self._tokens else self._record)

    def _receive_heartbeats(self, now: float) -> None:
        self._sink.now = now
        watched = self._detector.watched
        for peer in watched:
            if self._control.has_left(peer):
                self._detector.forget(peer)
        if self._shared is not None:
            pages = [(peer, self._shared.peers[peer].address) for peer in watched if peer in self._shared.peers]
            for (peer, _), beat in zip(pages, native_core.native.beats([address for _, address in pages]), strict=True):
                if beat:
                    self._sink.record(peer, beat)
        for reader in self._readers:
            self._pump(reader)

    def observe(self, peer: int) -> Observation | None:
        """What is seen of the process of a rank on this machine, or else of the connection to another host; None if
        neither shows anything, and for ranks that are ignored on purpose."""
        if peer in self._sink.ignored:
            return None
        profile = self._observable.get(peer)
        observation = profile.observe() if profile is not None else None
        if peer not in self._remote or observation in (Observation.STOPPED, Observation.STARVED):
            return observation
        return Observation.OUTAGE if self._drops_packets(peer) else observation

    def _drops_packets(self, peer: int) -> bool:
        """Whether packets to a host were lost since the rank there was last heard.

        When an outage is over, this host may learn of it before the other one has sent its beats again.
        """
        link = self._link_to(peer)
        if isinstance(link, NetworkLink) and link.drops_packets():
            self._sink.outages.add(peer)
        return peer in self._sink.outages

    def _link_to(self, peer: int) -> Link | None:
        return next((reader.link for reader in self._readers if reader.link.peer == peer), None)

    def tokens_ahead(self, link: Link) -> int:
        """How many tokens the native thread has for a link; it sends them without the interpreter."""
        return int(self._thread.ahead(_descriptor(link))) if self._thread is not None else 0

    def alive(self, peer: int) -> bool:
        """Whether a rank was heard lately."""
        silence = self._detector.silence(peer, time.monotonic())
        return silence is not None and silence < ALIVE_SECONDS


def linked(rank: int, size: int, sharing: set[int]) -> set[int]:
    """The ranks that a rank has a lifeline link with; both ends find the same."""
    others = range(size) if size <= ALL_PAIRS else ((rank - 1) % size, (rank + 1) % size)
    return {peer for peer in others if peer != rank and peer not in sharing}


def heartbeat_thread_waits(pid: int) -> bool:
    """Whether a thread that beats for a process would run, if it had a core or the kernel an answer for it."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/comm", "rb") as file:
                if file.read().strip() == HEARTBEAT_THREAD:
                    status = machine.process_status(f"{pid}/task/{thread}")
                    if status is not None and status.state in WAITING:
                        return True
    return False


def _descriptor(link: Any) -> int:
    descriptor: int = link.fileno()
    return descriptor
