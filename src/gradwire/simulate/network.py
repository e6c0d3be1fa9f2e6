"""Simulate a network: streams that keep their order, as TCP does, and calls that may be lost, late or doubled.

A lost packet of a stream arrives later, and so does everything behind it. Across a cut nothing arrives until the cut is
healed, and neither end is informed. A call across a cut is lost. Whether a cut lies between two processes is decided
when a packet arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from gradwire.simulate.process import Process
from gradwire.simulate.time import Action, Timeline
from gradwire.transports.base import Buffer, LinkClosed

RETRANSMISSION = 0.2  # seconds; TCP's shortest retransmission timeout


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of the network: times in seconds, bandwidth in bytes per second, shares of all packets or calls."""

    latency: float = 0.0005
    jitter: float = 0.0005
    bandwidth: float = 1e8
    lost: float = 0.0  # share of stream packets that are lost and retransmitted
    late: float = 0.0  # share of packets that take up to `lateness` longer
    lateness: float = 0.05
    calls_lost: float = 0.0
    calls_twice: float = 0.0


def nothing() -> None:
    """Do nothing: a callback for events that have no listener."""


class End:
    """One end of a stream between two processes. Executors use it as a link."""

    def __init__(self, network: Network, process: Process, ready: Callable[[], None]) -> None:
        self.peer = -1
        self.channel = -1
        self.process = process
        self.ready = ready  # called when something has arrived
        self.closed = False  # this end was closed
        self.ended = False  # the other end was closed, and everything that it had sent has arrived
        self.other: End = self
        self._network = network
        self._arrived: deque[memoryview] = deque()
        self._travelling: deque[bytes | None] = deque()  # packets on their way to the other end; None ends the stream
        self._clear_at = 0.0
        self.stalled = False
        process.ends[self] = None

    def send(self, buffers: Sequence[Buffer]) -> int:
        if self.closed or self.ended:
            raise LinkClosed
        data = b"".join(buffers)
        self._post(data)
        return len(data)

    def receive(self, buffers: Sequence[memoryview]) -> int:
        got = 0
        for buffer in buffers:
            at = 0
            while at < len(buffer) and self._arrived:
                chunk = self._arrived.popleft()
                part = min(len(chunk), len(buffer) - at)
                buffer[at : at + part] = chunk[:part]
                at += part
                if part < len(chunk):
                    self._arrived.appendleft(chunk[part:])
            got += at
            if at < len(buffer):
                break
        if not got and (self.closed or self.ended):
            raise LinkClosed
        return got

    def next_message(self) -> bytes | None:
        """Return the next message as it was sent, or None if none has arrived. Raise `LinkClosed` after the last."""
        if self._arrived:
            return bytes(self._arrived.popleft())
        if self.closed or self.ended:
            raise LinkClosed
        return None

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.process.ends.pop(self, None)
            self._arrived.clear()
            self._post(None)

    def drop(self) -> None:
        """Close this end because its host lost its power: the other end is not informed."""
        self.closed = self.stalled = True
        self.process.ends.pop(self, None)
        self._travelling.clear()

    def _post(self, data: bytes | None) -> None:
        network = self._network
        size = len(data) if data is not None else 0
        self._travelling.append(data)
        self._clear_at = max(self._clear_at, network.timeline.now + network.transit(self.process, size))
        if not self.stalled:
            network.timeline.at(self._clear_at, self._arrive)

    def _arrive(self) -> None:
        """Deliver the next packet to the other end, or stall the stream if a cut is in between."""
        if self.stalled or not self._travelling:
            return
        if not self._network.reaches(self.process, self.other.process):
            self.stalled = True
            self._network.stalled.append(self)
            return
        self._deliver(self._travelling.popleft())

    def flow(self) -> None:
        """Deliver all stalled packets at once, unless another cut is still in between."""
        if self.stalled and not self._network.reaches(self.process, self.other.process):
            self._network.stalled.append(self)
            return
        self.stalled = False
        while self._travelling:
            self._deliver(self._travelling.popleft())

    def _deliver(self, data: bytes | None) -> None:
        other = self.other
        if other.closed:
            return
        if data is None:
            other.ended = True
        else:
            other._arrived.append(memoryview(data))
        other.ready()


class HeartbeatLink:
    """The heartbeats from one process to another. The receiver polls for those that have arrived."""

    __slots__ = ("_arriving", "_clear_at", "_network", "_source", "_target")

    def __init__(self, network: Network, source: Process, target: Process) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._arriving: deque[tuple[float, int]] = deque()
        self._clear_at = 0.0

    def send(self, number: int) -> None:
        network = self._network
        if network.reaches(self._source, self._target):
            transit = network.transit(self._source, 64) if self._source.host != self._target.host else 0.0
            self._clear_at = max(self._clear_at, network.timeline.now + transit)
            self._arriving.append((self._clear_at, number))

    def latest(self) -> int | None:
        """Return the newest heartbeat that has arrived since the last poll, or None."""
        newest, now = None, self._network.timeline.now
        while self._arriving and self._arriving[0][0] <= now:
            newest = self._arriving.popleft()[1]
        return newest


class Network:
    """The connections between all processes: cuts, delays and losses."""

    def __init__(self, timeline: Timeline, random: Random, quality: Quality) -> None:
        self.timeline = timeline
        self.quality = quality
        self.stalled: list[End] = []
        self._random = random
        self._cuts: dict[tuple[str, str], int] = {}
        self._slow: dict[str, float] = {}

    # -- faults -------------------------------------------------------------------------------------------------------

    def cut(self, ones: Sequence[str], others: Sequence[str]) -> None:
        """Let nothing pass between two sets of processes."""
        for pair in _pairs(ones, others):
            self._cuts[pair] = self._cuts.get(pair, 0) + 1

    def heal(self, ones: Sequence[str], others: Sequence[str]) -> None:
        for pair in _pairs(ones, others):
            self._cuts[pair] -= 1
            if not self._cuts[pair]:
                del self._cuts[pair]
        stalled, self.stalled = self.stalled, []
        for end in stalled:
            self.timeline.after(self._random.uniform(0.0, 2 * RETRANSMISSION), end.flow)

    def slow(self, name: str, seconds: float) -> None:
        """Delay what a process sends by up to this many seconds. 0 ends the delay."""
        self._slow[name] = seconds

    def reaches(self, one: Process, other: Process) -> bool:
        return not self._cuts or _pair(one.name, other.name) not in self._cuts

    # -- traffic ------------------------------------------------------------------------------------------------------

    def transit(self, sender: Process, nbytes: int) -> float:
        """Return the seconds that a packet takes, including the retransmissions of a lost one."""
        quality, random = self.quality, self._random.random
        seconds = quality.latency + quality.jitter * random() + nbytes / quality.bandwidth
        if self._slow:
            seconds += self._slow.get(sender.name, 0.0) * random()
        if quality.late and random() < quality.late:
            seconds += quality.lateness * random()
        while quality.lost and random() < quality.lost:
            seconds += RETRANSMISSION
        return seconds

    def connect(self, one: Process, other: Process, ready: Callable[[], None], arrive: Callable[[End], None]) -> End:
        """Open a stream and return this process's end. The other process gets its end when the first packet arrives."""
        near, far = End(self, one, ready), End(self, other, nothing)
        near.other, far.other = far, near
        far.ready = lambda: arrive(far)
        near.send([b"hello"])
        return near

    def call(self, sender: Process, target: Process, deliver: Action, refused: Action = nothing) -> None:
        """Send a message outside of streams. It may arrive twice or not at all, and other messages may overtake it.

        `refused` is called at the sender if the target's process has ended.
        """
        quality, random = self.quality, self._random.random
        if quality.calls_lost and random() < quality.calls_lost:
            return
        copies = 2 if quality.calls_twice and random() < quality.calls_twice else 1
        for _ in range(copies):
            self.timeline.after(self.transit(sender, 100), lambda: self._call(sender, target, deliver, refused))

    def _call(self, sender: Process, target: Process, deliver: Action, refused: Action) -> None:
        if not self.reaches(sender, target):
            return
        if target.alive:
            target.do(deliver)
        else:
            sender.do(refused)


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


def _pairs(ones: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    return [_pair(one, other) for one in ones for other in others if one != other]
