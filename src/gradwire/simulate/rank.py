"""Simulate a member in one generation: its links, its lifeline and its control messages.

All decisions are made by the shipped code: `ControlProtocol` with its `Verdict`, and the `Detector`. Links, threads and
time are simulated.
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
from gradwire.simulate.network import End, HeartbeatLink, Network
from gradwire.simulate.process import Process, Program
from gradwire.simulate.time import Event
from gradwire.transports.base import LinkClosed
from gradwire.transports.tcp.dial import REFUSING_SECONDS, RETRY_SECONDS

CONTROL, DATA, STATE = 1, 2, 3  # channels
VERSION, OTHER_VERSION = b"version 2", b"version 1"  # of the set-up protocol
VALUE_BYTES = 160  # of a gathered value, padded
CHUNK = 16  # bytes of state per message
FAIR_SECONDS = 1.0  # shortest silence after which a rank may be reported as unreachable


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a stream: it identifies the caller, the target and the purpose."""

    address: str
    generation: int
    source: int
    channel: int
    version: bytes
    run: bytes
    heartbeats: tuple[HeartbeatLink, HeartbeatLink] | None = None  # to the target, and back to the caller


class Listener(Process):
    """A process to which others can connect."""

    def dialed(self, hello: Hello, end: End) -> None:
        """Handle the first packet of a new stream."""
        raise NotImplementedError


class Peers(Protocol):
    """Finds the other members."""

    def worker(self, name: str) -> Listener: ...

    def listens(self, member: Member) -> bool:
        """Return False if this member's address refuses connections. An address without an answer counts as True."""


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
        self._heartbeats: dict[int, tuple[HeartbeatLink, HeartbeatLink]] = {}  # by rank: incoming and outgoing
        self._beats = 0
        self._due: Event | None = None
        self._incompatible: dict[int, None] = {}  # ranks with another version of the set-up protocol, in order
        self._version = version
        self._ends: list[End] = []
        self._poll()
        self._beat()

    # -- connecting ---------------------------------------------------------------------------------------------------

    def connect(self, deadline: float) -> Program:
        """Connect to the lower ranks and wait for the higher ones. Raise `NoConnection` for a rank that is missing."""
        for channel in (CONTROL, DATA):
            yield from self.dial(range(self.rank), channel, deadline)
        check_at = self.worker.now + EXPECTED_SECONDS
        while missing := self._missing():
            yield from self.calls.check("init")
            self._check_versions()
            # With a control link, the lifeline shows whether the rank is reachable. Such a rank is not accused, and a
            # rank that can name a culprit gets FAIR_SECONDS more to report it.
            linked = missing[0] in self.links[CONTROL]
            if self.worker.now >= deadline + (FAIR_SECONDS if linked else 0.0):
                raise self._not_found(missing[0], "did not connect in time", accused=not linked)
            if self.worker.now >= check_at:
                check_at = self.worker.now + EXPECTED_SECONDS
                if not self._peers.listens(self.assembly.members[missing[0]]):
                    raise self._refused(missing[0]) from ConnectionRefusedError()
            yield 0.1

    def _check_versions(self) -> None:
        for peer in self._incompatible:
            raise ConfigError(f"rank {peer} uses another version of the set-up protocol", peer=peer)

    def _missing(self) -> list[int]:
        above = range(self.rank + 1, self.size)
        return [peer for peer in above if peer not in self.links[CONTROL] or peer not in self.links[DATA]]

    def dial(self, peers: range | tuple[int, ...], channel: int, deadline: float) -> Program:
        """Connect to some ranks concurrently. A rank that refuses is tried again for `REFUSING_SECONDS`."""
        now = self.worker.now
        dialing = {peer: (self._dial(peer, channel), now) for peer in peers}
        while dialing:
            for peer, (end, since) in list(dialing.items()):
                now = self.worker.now
                try:
                    welcome = end.next_message()
                except LinkClosed:
                    if now - since > REFUSING_SECONDS or now >= deadline:
                        raise self._refused(peer) from ConnectionRefusedError()
                    yield RETRY_SECONDS
                    dialing[peer] = (self._dial(peer, channel), since)
                    continue
                if welcome is not None:
                    if welcome != VERSION:
                        self._incompatible[peer] = None
                    del dialing[peer]
                    self._adopt(peer, channel, end)
                elif now >= deadline:
                    raise self._not_found(peer, "does not answer", accused=now - since >= FAIR_SECONDS)
            self._check_versions()
            yield from self.calls.check("init")
            if dialing:
                yield 0.1

    def _dial(self, peer: int, channel: int) -> End:
        worker, network, member = self.worker, self._network, self.assembly.members[peer]
        target = self._peers.worker(member.id)
        heartbeats = None
        if channel == CONTROL:
            there, back = HeartbeatLink(network, worker, target), HeartbeatLink(network, target, worker)
            heartbeats = (there, back)
            self._heartbeats[peer] = (back, there)
        hello = Hello(member.address, self.number, self.rank, channel, self._version, self.assembly.run, heartbeats)
        end = network.connect(worker, target, worker.wake, lambda end: target.dialed(hello, end))
        self._ends.append(end)
        return end

    def _not_found(self, peer: int, why: str, *, accused: bool) -> NoConnection:
        """Return the error for a silent rank. It names the rank as `peer` only if the silence is that rank's fault."""
        return NoConnection(f"rank {peer}, {self.ids[peer]}, {why}", peer=peer if accused else None)

    def _refused(self, peer: int) -> NoConnection:
        """Return the error for a rank that refuses connections: it has ended or has left for the next generation."""
        return NoConnection(f"rank {peer}, {self.ids[peer]}, no longer listens", peer=peer)

    def welcome(self, hello: Hello, end: End) -> None:
        """Accept a stream from a member of this generation."""
        if self.closed or end.ended or hello.source in self.links[hello.channel]:
            end.close()
            return
        if hello.version != VERSION:
            self._incompatible[hello.source] = None
            self.worker.wake()
            end.close()
            return
        self._ends.append(end)
        end.next_message()  # skip the hello
        end.send([self._version])  # the welcome message
        if hello.heartbeats is not None:
            self._heartbeats[hello.source] = hello.heartbeats
        self._adopt(hello.source, hello.channel, end)
        self.worker.wake()

    def _adopt(self, peer: int, channel: int, end: End) -> None:
        end.peer, end.channel = peer, channel
        self.links[channel][peer] = end
        if channel == CONTROL:
            end.ready = lambda: self.worker.do(lambda: self._receive(peer, end))
            self.handle(Linked(peer))
            near = self.assembly.members[peer].host == self.worker.host
            if near:
                self.detector.watch(peer, self.worker.now, SHARED_MEMORY_SECONDS)
            else:
                self.detector.watch_remote(peer, self.worker.now, PEER_SECONDS)
            self._receive(peer, end)  # messages that arrived right after the welcome
        else:
            end.ready = self.worker.wake

    # -- values and state ---------------------------------------------------------------------------------------------

    def gather(self, value: Any, algorithm: str) -> Program:
        """Return the values of all ranks, by rank."""
        text = json.dumps(value).encode().ljust(VALUE_BYTES)
        gathered = np.empty(VALUE_BYTES * self.size, np.uint8)
        yield from self.calls.run("all_gather", algorithm, np.frombuffer(text, np.uint8), gathered)
        return [json.loads(part.tobytes()) for part in gathered.reshape(self.size, VALUE_BYTES)]

    def pull(self, state: Array, giver: int, overwrite: bool) -> Program:
        """Receive the state from another rank.

        With `overwrite` the chunks go directly into `state`. Otherwise `state` changes only when all chunks are there.
        """
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
        """Send a state to another rank. It takes `seconds`."""
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
        """Pass an event to the control protocol, and perform the instructions that it returns."""
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

    def _receive(self, peer: int, end: End) -> None:
        if self.closed:
            return
        try:
            while (payload := end.next_message()) is not None:
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
            self._poll()

    def _poll(self) -> None:
        """Process the heartbeats that have arrived, report silent ranks as lost, and tick the control protocol."""
        if self.closed:
            return
        if self._due is not None:
            self._due.cancel()
        now = self.worker.now
        self.standstill.tick(now)
        for peer, (incoming, _) in self._heartbeats.items():
            beat = incoming.latest()
            if beat is not None:
                self.detector.record_heartbeat(peer, now, beat)
        for peer, seconds in self.detector.tick(now):
            self.handle(Lost(peer, f"is frozen or cut off: silent for {seconds:.1f} s"))
        self.handle(Tick())
        pause = min(self.control.pause(now), self.detector.due - now)
        if self.control.decided:
            self.worker.wake()
        self.standstill.expect_tick(now + pause)
        self._due = self.worker.later(max(pause, 0.001), self._poll)

    def _beat(self) -> None:
        """Send heartbeats as the lifeline's own thread does: also while the rest of the process hangs, unless a signal
        has stopped the process."""
        worker = self.worker
        if self.closed or not worker.alive:
            return
        if not worker.stopped:
            self._beats += 1
            for _, outgoing in self._heartbeats.values():
                outgoing.send(self._beats)
        worker.timeline.after(worker.clock.seconds(HEARTBEAT_SECONDS), self._beat)

    # -- the end ------------------------------------------------------------------------------------------------------

    def give_up(self, reason: str) -> None:
        """Report to the other ranks that this member cannot set up the generation, so that they do not wait for it."""
        if self.control.intact:
            self.handle(Found(Finding("aborted", reason, self.rank)))

    def close(self) -> None:
        """Report to the other ranks that this member leaves, and close all links."""
        self.handle(Leaving())
        self.closed = True
        if self._due is not None:
            self._due.cancel()
        for end in self._ends:
            end.close()
