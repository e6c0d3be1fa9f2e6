"""The lifeline: sends this rank's heartbeats and receives those of the other ranks.

    ranks that share memory    send heartbeats through it: they count up a word behind the directory of their arena
    other ranks                send heartbeats over lifeline links: between all pairs of up to 32 ranks; in larger jobs
                               between neighbours in a ring

A native thread sends the heartbeats (native/lifeline.hpp). They show that the process runs, even while its interpreter
is blocked. `heartbeat_messages` defines the heartbeats under TLS. Without the native core, and on links that Python
relays (gRPC), the service thread sends them, less often, and such a rank may be silent for 10 s. A rank that sends
heartbeats but makes no progress is stuck, not lost. The service thread reads heartbeats every 0.1 s, and `Detector`
decides which ranks are lost. On one host the service thread also watches a pidfd of each process, and sees the end of
the process within milliseconds. Between hosts the network may be the reason for a silence, so the deadline is longer:
all ranks of a job use the longest `GRADWIRE_PEER_TIMEOUT` among them.
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

DEATH_SECONDS = 0.05  # after the end of a process, in which its last messages are read
PURE_SECONDS = 10.0  # allowed silence of a rank whose heartbeats need its interpreter
ALIVE_SECONDS = 1.0  # errors call a rank alive if it sent a heartbeat within this time
ALL_PAIRS = 32  # ranks; in larger jobs lifeline links form a ring
FEED_BLOCKS = 8  # blocks of tokens made for a link in one turn of the service thread, at most
READ_AHEAD = 64 * HEADER_BYTES
HEARTBEAT_THREAD = b"gradwire-beat"  # the name of the thread in native/lifeline.cpp
STOPPED = "TtZX"  # states in /proc of a process that does not run
WAITING = "RD"  # states in /proc of a thread that waits for a core or for the kernel
LEAST_TIMEOUT = 0.5  # between hosts: TCP sends a lost packet again after 0.2 s
MOST_TIMEOUT = 600.0  # TCP keepalive closes a connection a little later than this


@dataclass(frozen=True, slots=True)
class HeartbeatProfile:
    """The facts about a rank that other ranks need to judge its silence."""

    native: bool  # its heartbeats do not need its interpreter
    pid: int
    namespace: str  # the pid namespace, in which the pid is valid
    started: int = 0  # start time of the process: another process may get the same pid later
    timeout: float = PEER_SECONDS  # the rank's GRADWIRE_PEER_TIMEOUT

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
    def from_wire(cls, fields: object) -> HeartbeatProfile:
        match fields:
            case [bool(native), int(pid), str(namespace), int(started), int(timeout) | float(timeout)] if (
                LEAST_TIMEOUT <= timeout <= MOST_TIMEOUT
            ):
                return cls(native, pid, namespace, started, float(timeout))
        return cls(False, 0, "")

    def observe(self) -> Observation:
        """Return the state of the process now. Call it on the machine of the process."""
        status = machine.process_status(self.pid)
        if status is None or status.started != self.started or status.state in STOPPED:
            return Observation.STOPPED
        return Observation.STARVED if status.state == "D" or heartbeat_thread_waits(self.pid) else Observation.OTHER


Dial = Callable[[int], Link]


class Lifeline:
    """One rank's lifeline. The service thread calls `tick`; any thread may call the other methods."""

    def __init__(
        self,
        control: Control,
        record: bytes,
        sink: HeartbeatSink,
        pump: Callable[[Reader], None],
        remote: Collection[int] = (),
    ) -> None:
        """Make a lifeline that sends nothing yet.

        `record` is a heartbeat as a frame. `pump` reads a link and handles its errors. `remote` are the ranks on other
        hosts.
        """
        self._control = control
        self._remote = frozenset(remote)
        self._record = record
        self._sink = sink
        self._pump = pump
        self._detector = sink.detector
        self.standstill = Standstill()
        self._lock = threading.Lock()
        self._begun = self._closed = False
        self._thread: Any = None  # the native thread that sends heartbeats
        self._arena: OwnArena | None = None
        self._shared: SharedMemory | None = None
        self._linked: set[int] = set()  # ranks with a lifeline link to this one
        self._missing: set[int] = set()  # those of them whose link is not open yet
        self._readers: list[Reader] = []
        self._outboxes: dict[int, Outbox] = {}  # by id of the link; of links on which the native thread sends nothing
        self._relayed = False  # Python relays the links
        self._tokens: dict[int, tuple[int, Tokens]] = {}  # by id of the link: descriptor and tokens, for token links
        self._to_watch: deque[tuple[int, HeartbeatProfile]] = deque()  # ranks that `tick` begins to watch
        self._timeout = PEER_SECONDS
        self._observable: dict[int, HeartbeatProfile] = {}  # ranks whose processes this one can observe
        self._dead: dict[int, float] = {}  # ranks whose process ended, and until when their goodbye may arrive
        self._next_heartbeat = -math.inf

    def begin(self, native: bool, arena: OwnArena | None) -> None:
        """Start to send heartbeats through this arena. Without the native core only links carry heartbeats."""
        self._arena = arena  # keeps the arena alive while the thread writes to it
        if native:
            self._thread = native_core.native.Lifeline(HEARTBEAT_SECONDS)
            if arena is not None:
                self._thread.write_to(arena.address)
            self._thread.start()

    def connect(self, shared: SharedMemory | None, size: int, transport: Transport, dial: Dial) -> None:
        """Receive heartbeats through shared memory, and open links with the other ranks. The higher rank dials."""
        rank = self._control.rank
        self._shared = shared
        self._relayed = transport.relayed
        self._linked = linked(rank, size, set(shared.peers) if shared is not None else set())
        self._missing = set(self._linked)
        self._begun = True
        transport.adopt(LIFELINE_CHANNEL, self.add_link)
        for peer in sorted(self._linked):
            if peer < rank:
                self.add_link(dial(peer))

    def watch(self, profiles: Sequence[HeartbeatProfile]) -> None:
        """Watch the other ranks from now on. `profiles` are those of all ranks; all of them send heartbeats."""
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
        """Send heartbeats on a link, and receive those of its peer. A link that is not expected is closed."""
        key = link.key if isinstance(link, KeyedLink) else None
        with self._lock:
            expected = not self._closed and link.peer in self._missing
            if expected:
                self._missing.remove(link.peer)
                self._send_on(link, key)
                self._readers = [*self._readers, self._reader(link, key)]
        if not expected:
            link.close()

    def _send_on(self, link: Link, key: bytes | None) -> None:
        tokens = Tokens(key, self._control.rank) if key is not None else None
        if tokens is not None:
            self._tokens[id(link)] = _descriptor(link), tokens
        if self._thread is None or self._relayed:
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
        """Stop using a link before it is closed: another file may get its descriptor soon after."""
        if link.channel == LIFE_CHANNEL:
            self._dead[link.peer] = time.monotonic() + DEATH_SECONDS
        elif link.channel == LIFELINE_CHANNEL:
            with self._lock:
                if self._outboxes.pop(id(link), None) is None and self._thread is not None:
                    self._thread.drop(_descriptor(link))
                self._tokens.pop(id(link), None)
                self._readers = [reader for reader in self._readers if reader.link is not link]

    def ignore(self, peer: int) -> None:
        """Ignore the heartbeats of a rank, as if the network to it were cut. For tests."""
        self._observable.pop(peer, None)
        self._sink.ignored.add(peer)

    def close(self) -> None:
        """Stop sending heartbeats. The transport closes the links."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._thread.stop()

    def abandon(self) -> None:
        """Mark the lifeline as closed in a forked child. The native thread does not exist there and is not touched."""
        self._closed = True

    # -- the service thread -------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Receive heartbeats, report lost ranks, and return the seconds until the next call."""
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
        """Let the detector watch a rank."""
        native = profile.native and (peer in self._sharing or not self._relayed)
        if peer in self._remote:
            link = self._link_to(peer)
            if isinstance(link, NetworkLink):  # otherwise TCP's back-off continues after an outage for as long again
                link.repair_within(max(1.0, self._timeout / 4))
            least = LINK_SECONDS if native else PURE_SECONDS
            if self._relayed:  # nothing shows whether the network is the reason of a silence
                least = max(least, self._timeout)
            self._detector.watch_remote(peer, now, max(least, self._timeout), least=least)
        elif native:
            self._detector.watch(peer, now, SHARED_MEMORY_SECONDS if peer in self._sharing else LINK_SECONDS)
        else:
            self._detector.watch(peer, now, PURE_SECONDS, PURE_SECONDS, slow=True)

    def _describe(self, peer: int, silence: float) -> str:
        """Return the text of the error about a lost rank."""
        if self.observe(peer) is Observation.OUTAGE:
            return f"has been silent for {silence:.2f} s: the network to rank {peer} drops packets"
        return f"has been silent for {silence:.2f} s (frozen or cut off)"

    def _report_deaths(self, now: float) -> float:
        """Report ranks whose process ended, and return the seconds until the next report.

        A child process may keep the links of a dead rank open.
        """
        for peer, until in list(self._dead.items()):
            if now >= until:
                del self._dead[peer]
                self._control.lost(peer, now, "died")
        return min(self._dead.values(), default=math.inf) - now

    def _send_heartbeats(self, now: float) -> None:
        """Make tokens for the native thread, and send the heartbeats that it does not send."""
        if self._thread is not None:
            for descriptor, tokens in list(self._tokens.values()):
                left = -(-self._thread.ahead(descriptor) // heartbeat_messages.BLOCK_TOKENS)
                for _ in range(min(FEED_BLOCKS, heartbeat_messages.STOCK_BLOCKS - left)):
                    self._thread.feed(descriptor, tokens.block())
        if self._outboxes and now >= self._next_heartbeat:
            self._next_heartbeat = now + SLOW_HEARTBEAT_SECONDS
            for link, outbox in list(self._outboxes.items()):
                with contextlib.suppress(LinkClosed, OSError):  # the reader of the link notices too, and handles it
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
            counters = native_core.native.beats([address for _, address in pages])
            for (peer, _), counter in zip(pages, counters, strict=True):
                if counter:
                    self._sink.record(peer, counter)
        for reader in self._readers:
            self._pump(reader)

    def observe(self, peer: int) -> Observation | None:
        """Return what can be observed of a silent rank: its process on this machine, or the connection to its host.

        None means that nothing can be observed, or that a test ignores the rank.
        """
        if peer in self._sink.ignored:
            return None
        profile = self._observable.get(peer)
        observation = profile.observe() if profile is not None else None
        if peer not in self._remote or observation in (Observation.STOPPED, Observation.STARVED):
            return observation
        return Observation.OUTAGE if self._drops_packets(peer) else observation

    def _drops_packets(self, peer: int) -> bool:
        """Whether packets to a rank's host were lost since its last heartbeat.

        The answer stays True after an outage until the next heartbeat, because that may arrive later than the
        acknowledgement of this rank's packets.
        """
        link = self._link_to(peer)
        if isinstance(link, NetworkLink) and link.drops_packets():
            self._sink.outages.add(peer)
        return peer in self._sink.outages

    def _link_to(self, peer: int) -> Link | None:
        return next((reader.link for reader in self._readers if reader.link.peer == peer), None)

    def tokens_ahead(self, link: Link) -> int:
        """Return the number of tokens that the native thread can send on a link without the interpreter."""
        return int(self._thread.ahead(_descriptor(link))) if self._thread is not None else 0

    def alive(self, peer: int) -> bool:
        """Whether a rank has sent a heartbeat within `ALIVE_SECONDS`."""
        silence = self._detector.silence(peer, time.monotonic())
        return silence is not None and silence < ALIVE_SECONDS


def linked(rank: int, size: int, sharing: set[int]) -> set[int]:
    """Return the ranks with which a rank has a lifeline link. Both ends compute the same pairs."""
    others = range(size) if size <= ALL_PAIRS else ((rank - 1) % size, (rank + 1) % size)
    return {peer for peer in others if peer != rank and peer not in sharing}


def heartbeat_thread_waits(pid: int) -> bool:
    """Whether the heartbeat thread of a process waits for a core or for the kernel."""
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
