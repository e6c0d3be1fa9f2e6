"""A member's part in one simulated generation: its links, its lifeline and its control messages.

What decides is the real thing, `ControlProtocol` with its `Verdict` and the `Detector`; links, threads and time, by
which they are driven, are simulated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gradwire.arrays import Array, raw
from gradwire.errors import ConfigError, NoConnection
from gradwire.generation.connection import EXPECTED_SECONDS
from gradwire.job.session_protocol import SET_UP_SECONDS
from gradwire.liveness import control_messages
from gradwire.liveness.control_protocol import (
    Break,
    ControlProtocol,
    Found,
    Leaving,
    Linked,
    Lost,
    Received,
    Send,
    Tick,
)
from gradwire.liveness.control_protocol import (
    Event as ControlEvent,
)
from gradwire.liveness.detector import HEARTBEAT_SECONDS, PEER_SECONDS, SHARED_MEMORY_SECONDS, Detector, Standstill
from gradwire.liveness.verdict import Finding
from gradwire.membership import Assembly, Member
from gradwire.simulate.collective import Collectives
from gradwire.simulate.network import End, Network, Pulse
from gradwire.simulate.process import Process, Program
from gradwire.simulate.time import Event
from gradwire.transports.base import LinkClosed
from gradwire.transports.tcp.dial import REFUSING_SECONDS, RETRY_SECONDS

CONTROL, DATA, STATE = 1, 2, 3  # channels
VERSION, OTHER_VERSION = b"version 2", b"version 1"  # of the set-up protocol
VALUE_BYTES = 160  # of a value that ranks tell each other
CHUNK = 16  # bytes of state
FAIR_SECONDS = 1.0  # without an answer, before that can be held against anybody


@dataclass(frozen=True, slots=True)
class Hello:
    """The first words on a stream: who dials, whom, and what for."""

    address: str
    generation: int
    source: int
    channel: int
    version: bytes
    run: bytes
    pulses: tuple[Pulse, Pulse] | None = None  # there and back


class Listener(Process):
    """A process that others can dial."""

    def knocked(self, hello: Hello, end: End) -> None:
        """Somebody's first packet has arrived at this host."""
        raise NotImplementedError


class Peers(Protocol):
    """Where the other members are."""

    def worker(self, name: str) -> Listener: ...

    def listens(self, member: Member) -> bool:
        """False if it is certain that nobody listens any more where this member did; no answer is no proof."""


class Rank:
    """One member in one generation."""

    def __init__(self, worker: Process, assembly: Assembly, network: Network, peers: Peers, version: bytes) -> None:
        self.worker = worker
        self._network = network
        self._peers = peers
        self.assembly = assembly
        self.number = assembly.generation
        self.rank = assembly.rank
        self.size = len(assembly.members)
        self.ids = [member.id for member in assembly.members]
        self.control = ControlProtocol(self.rank, self.ids, self.number)
        self.links: dict[int, dict[int, End]] = {CONTROL: {}, DATA: {}, STATE: {}}
        self.calls = Collectives(worker, self.control, self.handle, assembly, self.links[DATA])
        self.detector = Detector()
        self.standstill = Standstill()
        self.closed = False
        self._pulses: dict[int, tuple[Pulse, Pulse]] = {}  # by rank: to listen to, and to beat
        self._beats = 0
        self._due: Event | None = None
        self._misfits: dict[int, None] = {}  # that speak another version of the set-up protocol
        self._version = version
        self._ends: list[End] = []
        self._look()
        self._beat()

    # -- finding each other -------------------------------------------------------------------------------------------

    def connect(self, deadline: float) -> Program:
        """Dial the ranks below and wait for those above; `NoConnection` names one that cannot be found."""
        for channel in (CONTROL, DATA):
            yield from self.dial(range(self.rank), channel, deadline)
        look_at = self.worker.now + EXPECTED_SECONDS
        while missing := self._missing():
            yield from self.calls.check("init")
            self._check_versions()
            met = missing[0] in self.links[CONTROL]  # then its lifeline tells whether it can be reached
            if self.worker.now >= deadline + (FAIR_SECONDS if met else 0.0):  # who has a complaint speaks first
                raise self._not_found(missing[0], "did not connect in time", accused=not met)
            if self.worker.now >= look_at:
                look_at = self.worker.now + EXPECTED_SECONDS
                if not self._peers.listens(self.assembly.members[missing[0]]):
                    raise self._refused(missing[0]) from ConnectionRefusedError()
            yield 0.1

    def _check_versions(self) -> None:
        for peer in self._misfits:
            raise ConfigError(f"rank {peer} speaks another version of the set-up protocol", peer=peer)

    def _missing(self) -> list[int]:
        above = range(self.rank + 1, self.size)
        return [peer for peer in above if peer not in self.links[CONTROL] or peer not in self.links[DATA]]

    def dial(self, peers: range | tuple[int, ...], channel: int, deadline: float) -> Program:
        """Links to some ranks, all at once. Who refuses is asked again for a while."""
        now = self.worker.now
        calling = {peer: (self._call(peer, channel), now) for peer in peers}
        while calling:
            for peer, (end, since) in list(calling.items()):
                now = self.worker.now
                try:
                    welcome = end.take()
                except LinkClosed:
                    if now - since > REFUSING_SECONDS or now >= deadline:
                        raise self._refused(peer) from ConnectionRefusedError()
                    yield RETRY_SECONDS
                    calling[peer] = (self._call(peer, channel), since)
                    continue
                if welcome is not None:
                    if welcome != VERSION:
                        self._misfits[peer] = None
                    del calling[peer]
                    self._adopt(peer, channel, end)
                elif now >= deadline:
                    raise self._not_found(peer, "does not answer", accused=now - since >= FAIR_SECONDS)
            self._check_versions()
            yield from self.calls.check("init")
            if calling:
                yield 0.1

    def _call(self, peer: int, channel: int) -> End:
        worker, network, member = self.worker, self._network, self.assembly.members[peer]
        target = self._peers.worker(member.id)
        pulses = None
        if channel == CONTROL:
            there, back = Pulse(network, worker, target), Pulse(network, target, worker)
            pulses = (there, back)
            self._pulses[peer] = (back, there)
        hello = Hello(member.address, self.number, self.rank, channel, self._version, self.assembly.run, pulses)
        end = network.connect(worker, target, worker.wake, lambda end: target.knocked(hello, end))
        self._ends.append(end)
        return end

    def _not_found(self, peer: int, why: str, *, accused: bool) -> NoConnection:
        """Silence is held against a rank, unless it may be this rank's own."""
        return NoConnection(f"rank {peer}, {self.ids[peer]}, {why}", peer=peer if accused else None)

    def _refused(self, peer: int) -> NoConnection:
        """A rank that closed its door is dead, or has gone on: that is for others to find out."""
        return NoConnection(f"rank {peer}, {self.ids[peer]}, does not listen any more", peer=peer)

    def welcome(self, hello: Hello, end: End) -> None:
        """A member of this generation has dialled."""
        if self.closed or end.ended or hello.source in self.links[hello.channel]:
            end.close()
            return
        if hello.version != VERSION:
            self._misfits[hello.source] = None
            self.worker.wake()
            end.close()
            return
        self._ends.append(end)
        end.take()  # its hello
        end.send([self._version])  # which welcomes it
        if hello.pulses is not None:
            self._pulses[hello.source] = hello.pulses
        self._adopt(hello.source, hello.channel, end)
        self.worker.wake()

    def _adopt(self, peer: int, channel: int, end: End) -> None:
        end.peer, end.channel = peer, channel
        self.links[channel][peer] = end
        if channel == CONTROL:
            end.ready = lambda: self.worker.do(lambda: self._hear(peer, end))
            self.handle(Linked(peer))
            near = self.assembly.members[peer].host == self.worker.host
            if near:
                self.detector.watch(peer, self.worker.now, SHARED_MEMORY_SECONDS)
            else:
                self.detector.watch_remote(peer, self.worker.now, PEER_SECONDS)
            self._hear(peer, end)  # what came right behind the welcome
        else:
            end.ready = self.worker.wake

    # -- what ranks tell and hand each other --------------------------------------------------------------------------

    def gather(self, value: Any, algorithm: str) -> Program:
        """The values of all ranks, by rank."""
        text = json.dumps(value).encode().ljust(VALUE_BYTES)
        told = np.empty(VALUE_BYTES * self.size, np.uint8)
        yield from self.calls.run("all_gather", algorithm, np.frombuffer(text, np.uint8), told)
        return [json.loads(part.tobytes()) for part in told.reshape(self.size, VALUE_BYTES)]

    def pull(self, state: Array, giver: int, overwrite: bool) -> Program:
        """In pieces, put into place when all are there; a member that has nothing to lose lets them overwrite it."""
        try:
            yield from self.dial((giver,), STATE, self.worker.now + SET_UP_SECONDS)
        except NoConnection:
            yield from self.calls.find_out(giver, "transfer")
        link, pulled, got = self.links[STATE][giver], state if overwrite else state.copy(), 0
        view = raw(pulled)
        while got < len(view):
            try:
                got += link.receive([view[got:]])
            except LinkClosed:
                yield from self.calls.find_out(giver, "transfer")
            yield from self.calls.check("transfer")
            if got < len(view):
                yield None
        state[:] = pulled

    def give(self, state: Array, taker: int, seconds: float) -> Program:
        """Send a state, which takes some seconds."""
        while taker not in self.links[STATE]:
            yield from self.calls.check("transfer")
            yield None
        data = state.tobytes()
        for begin in range(0, len(data), CHUNK):
            yield from self.worker.compute(seconds * CHUNK / len(data))
            yield from self.calls.check("transfer")
            try:
                self.links[STATE][taker].send([data[begin : begin + CHUNK]])
            except LinkClosed:
                yield from self.calls.find_out(taker, "transfer")

    # -- the service thread -------------------------------------------------------------------------------------------

    def handle(self, event: ControlEvent) -> None:
        """Let the control protocol handle an event, and carry out its instructions."""
        for instruction in self.control.handle(event, self.worker.now):
            match instruction:
                case Send(peers, message):
                    payload = control_messages.encode(message)
                    for peer in peers:
                        self._post(peer, payload)
                case Break():
                    self.worker.wake()

    def _post(self, peer: int, payload: bytes) -> None:
        end = self.links[CONTROL].get(peer)
        if end is not None and not end.closed and not end.ended:
            end.send([payload])

    def _hear(self, peer: int, end: End) -> None:
        if self.closed:
            return
        try:
            while (payload := end.take()) is not None:
                message = control_messages.decode(payload, self.size)
                if message is not None:
                    self.handle(Received(peer, message))
        except LinkClosed:
            self.links[CONTROL].pop(peer, None)
            self.detector.forget(peer)
            end.close()
            if not self.control.has_left(peer):
                self.handle(Lost(peer))
        if not self.control.intact:
            self._look()

    def _look(self) -> None:
        """What is due: beats that have arrived, suspicions, the control protocol."""
        if self.closed:
            return
        if self._due is not None:
            self._due.cancel()
        now = self.worker.now
        self.standstill.tick(now)
        for peer, (heard, _) in self._pulses.items():
            beat = heard.heard()
            if beat is not None:
                self.detector.record_heartbeat(peer, now, beat)
        for peer, seconds in self.detector.tick(now):
            self.handle(Lost(peer, f"is frozen or cut off: silent for {seconds:.1f} s"))
        self.handle(Tick())
        pause = min(self.control.pause(now), self.detector.due - now)
        if self.control.decided:
            self.worker.wake()
        self.standstill.expect_tick(now + pause)
        self._due = self.worker.later(max(pause, 0.001), self._look)

    def _beat(self) -> None:
        """The lifeline's own thread: it beats as long as the process is not stopped, whatever else hangs."""
        worker = self.worker
        if self.closed or not worker.alive:
            return
        if not worker.stopped:
            self._beats += 1
            for _, beaten in self._pulses.values():
                beaten.beat(self._beats)
        worker.timeline.after(worker.clock.seconds(HEARTBEAT_SECONDS), self._beat)

    # -- the end ------------------------------------------------------------------------------------------------------

    def give_up(self, reason: str) -> None:
        """This generation does not come about: the others need not wait for this member."""
        if self.control.intact:
            self.handle(Found(Finding("aborted", reason, self.rank)))

    def close(self) -> None:
        """Say goodbye and let go of all links."""
        self.handle(Leaving())
        self.closed = True
        if self._due is not None:
            self._due.cancel()
        for end in self._ends:
            end.close()
