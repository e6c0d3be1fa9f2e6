"""A simulated network: streams that stay in order, as TCP's do, and calls that get lost, late, out of order or doubled.

A packet of a stream that is lost comes later, and so does everything behind it; across a cut nothing comes until it is
healed, and nobody is told. A call across a cut is lost. Who can talk to whom is decided when a packet arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from gradwire.simulate.process import Process
from gradwire.simulate.time import Action, Timeline
from gradwire.transports.base import Buffer, LinkClosed

RETRANSMISSION = 0.2  # seconds, as TCP's shortest


@dataclass(frozen=True, slots=True)
class Quality:
    """How good the network is: seconds, bytes each second, and shares of all packets or calls."""

    latency: float = 0.0005
    jitter: float = 0.0005
    bandwidth: float = 1e8
    lost: float = 0.0  # of streams: such a packet comes later
    late: float = 0.0  # takes up to `lateness` longer
    lateness: float = 0.05
    calls_lost: float = 0.0
    calls_twice: float = 0.0


def nothing() -> None:
    """For events that nobody listens to."""


class End:
    """One end of a stream between two processes: a link, as the executors know it."""

    def __init__(self, network: Network, process: Process, ready: Callable[[], None]) -> None:
        self.peer = -1
        self.channel = -1
        self.process = process
        self.ready = ready  # called when something has arrived
        self.closed = False  # here
        self.ended = False  # by the other side, and all it had sent is here
        self.other: End = self
        self._network = network
        self._arrived: deque[memoryview] = deque()
        self._travelling: deque[bytes | None] = deque()  # towards the other end; None ends the stream
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

    def take(self) -> bytes | None:
        """The next message that has arrived, as it was sent; None if there is none. `LinkClosed` at the end."""
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

    def vanish(self) -> None:
        """The host of this end lost its power: nobody is told."""
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
        """The next packet of this end reaches the other one, if nothing is in between."""
        if self.stalled or not self._travelling:
            return
        if not self._network.reaches(self.process, self.other.process):
            self.stalled = True
            self._network.stalled.append(self)
            return
        self._deliver(self._travelling.popleft())

    def flow(self) -> None:
        """What is in between is gone: everything that was held up comes at once."""
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


class Pulse:
    """Signs of life from one process to another: who looks sees those that have arrived by then."""

    __slots__ = ("_arriving", "_clear_at", "_network", "_source", "_target")

    def __init__(self, network: Network, source: Process, target: Process) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._arriving: deque[tuple[float, int]] = deque()
        self._clear_at = 0.0

    def beat(self, number: int) -> None:
        network = self._network
        if network.reaches(self._source, self._target):
            transit = network.transit(self._source, 64) if self._source.host != self._target.host else 0.0
            self._clear_at = max(self._clear_at, network.timeline.now + transit)
            self._arriving.append((self._clear_at, number))

    def heard(self) -> int | None:
        """The newest beat that has arrived since the last look."""
        newest, now = None, self._network.timeline.now
        while self._arriving and self._arriving[0][0] <= now:
            newest = self._arriving.popleft()[1]
        return newest


class Network:
    """Who can talk to whom, and how fast."""

    def __init__(self, timeline: Timeline, random: Random, quality: Quality) -> None:
        self.timeline = timeline
        self.quality = quality
        self.stalled: list[End] = []
        self._random = random
        self._cuts: dict[tuple[str, str], int] = {}
        self._slow: dict[str, float] = {}

    # -- faults -------------------------------------------------------------------------------------------------------

    def cut(self, ones: Sequence[str], others: Sequence[str]) -> None:
        """Nothing passes between two sets of processes any more."""
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
        """What a process sends takes so much longer; 0: no longer."""
        self._slow[name] = seconds

    def reaches(self, one: Process, other: Process) -> bool:
        return not self._cuts or _pair(one.name, other.name) not in self._cuts

    # -- traffic ------------------------------------------------------------------------------------------------------

    def transit(self, sender: Process, nbytes: int) -> float:
        """The seconds that a packet takes; one that is lost is sent again."""
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
        """An end of a new stream; the other process gets its own when the first packet arrives there."""
        mine, theirs = End(self, one, ready), End(self, other, nothing)
        mine.other, theirs.other = theirs, mine
        theirs.ready = lambda: arrive(theirs)
        mine.send([b"hello"])
        return mine

    def call(self, sender: Process, target: Process, deliver: Action, refused: Action = nothing) -> None:
        """A message that belongs to no stream: it comes once, twice or not at all, and others may overtake it.

        `refused` is called at the sender if nobody listens at the target.
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
