"""The edge of the control protocol in a running process: bytes, links, and threads that wait.

The thread that reads control links hands what it reads to `receive`, and calls `tick` when it is due. Any thread may do
the rest. Instructions are carried out under one lock, in the protocol's order, so that peers get messages in the order
of the decisions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from gradwire.errors import Broken
from gradwire.liveness import control_messages
from gradwire.liveness.call_log import Call, CallLog
from gradwire.liveness.control_messages import GatherValue, Position
from gradwire.liveness.control_protocol import (
    Answered,
    AskPositions,
    Break,
    Called,
    Compare,
    ControlProtocol,
    Decide,
    Deliver,
    Event,
    Found,
    Leaving,
    Linked,
    Lost,
    Missed,
    Received,
    Send,
    Settled,
    Share,
    Tick,
    Unwatched,
    Watched,
)
from gradwire.liveness.verdict import Finding
from gradwire.transports.base import Link
from gradwire.wire import MAX_CONTROL, Header, Kind, WireError

MAX_SHOWN = 16  # ranks, in one line


class Control:
    """This rank's control protocol, for all its threads."""

    def __init__(
        self,
        rank: int,
        names: Iterable[str],
        generation: int,
        post: Callable[[int, bytes], None],
        broke: Callable[[], None],
        deliver: Callable[[int, int, str, object], None] = lambda peer, number, operation, value: None,
    ) -> None:
        """`post` sends a message to one world rank; `broke` is called with each reason to break the generation, and
        `deliver` with each value of a round: peer, number, operation, value. All are called with the lock held."""
        names = list(names)
        self.rank = rank
        self.sound = True  # whether there is no reason to break the generation
        self._size = len(names)
        self._protocol = ControlProtocol(rank, names, generation)
        self._post = post
        self._broke = broke
        self._deliver = deliver
        self._lock = threading.RLock()
        self._answered = threading.Condition(self._lock)
        self._settled = threading.Event()

    def _handle(self, event: Event, now: float) -> None:
        with self._lock:
            instructions = self._protocol.handle(event, now)
            self.sound = self._protocol.sound
            for instruction in instructions:
                match instruction:
                    case Send(peers, message):
                        data = control_messages.encode(message)
                        for peer in peers:
                            self._post(peer, data)
                    case Break():
                        self._broke()
                    case Settled():
                        self._settled.set()
                    case Answered():
                        self._answered.notify_all()
                    case Deliver(peer, value):
                        self._deliver(peer, value.number, value.operation, value.value)

    # -- what this rank finds -----------------------------------------------------------------------------------------

    def watch(self, calls: CallLog, *, announced: bool = True) -> None:
        """Compare these calls with those of the others, unless they do that themselves, and show them when asked."""
        self._handle(Watched(calls, announced), time.monotonic())

    def unwatch(self, calls: CallLog) -> None:
        """The group of these calls was closed."""
        self._handle(Unwatched(calls), time.monotonic())

    def open(self, group: int) -> bool:
        """Whether a group is in use here: neither closed nor unknown."""
        return self._protocol.watches(group) is not None

    def report(self, finding: Finding, now: float) -> None:
        """This rank found a reason to break the generation."""
        self._handle(Found(finding), now)

    def called(self, now: float) -> None:
        """A call was recorded although the generation is broken: it may be the one that others want to see."""
        self._handle(Called(), now)

    def lost(self, peer: int, now: float, why: str = "closed its link") -> None:
        """A peer's control link ended, or it is silent; without a goodbye that is a loss."""
        self._handle(Lost(peer, why), now)

    def missed(self, peer: int, now: float) -> None:
        """An operation here waits for a peer that has left: now its leaving matters."""
        self._handle(Missed(peer), now)

    def introduce(self, peer: int) -> None:
        """A link to this peer was made just now: if the generation broke meanwhile, it has not been told."""
        self._handle(Linked(peer), time.monotonic())

    def goodbye(self) -> None:
        """Tell all that this rank closes the generation."""
        self._handle(Leaving(), time.monotonic())

    def share(self, number: int, operation: str, value: object) -> None:
        """Send this rank's value of a round to all."""
        self._handle(Share(GatherValue(number, operation, value)), time.monotonic())

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def given_up(self) -> bool:
        """Whether the others go on without this rank."""
        return self._protocol.given_up

    @property
    def complaints(self) -> tuple[int, ...]:
        """The ranks that this rank itself could not reach, whatever the verdict."""
        with self._lock:
            return self._protocol.complaints

    def has_left(self, peer: int) -> bool:
        return self._protocol.has_left(peer)

    def left_at(self, peer: int) -> float | None:
        """When a peer said goodbye, if it did."""
        return self._protocol.left_at(peer)

    def last_heard(self, calls: CallLog, peer: int) -> Call | None:
        """The last call that a peer told of, as this rank made it, if it did: what is known without asking."""
        with self._lock:
            return calls.call(self._protocol.reached(calls.group, peer))

    # -- the thread that serves control links -------------------------------------------------------------------------

    def receive(self, peer: int, payload: bytes, now: float) -> None:
        """Act on a peer's message; ValueError if it makes no sense. Kinds of a later version are ignored."""
        message = control_messages.decode(payload, self._size)
        if message is not None:
            self._handle(Received(peer, message), now)

    def tick(self, now: float) -> float:
        """Do what is due; the seconds until the next call."""
        with self._lock:
            self._handle(Tick(), now)
            return self._protocol.pause(now)

    # -- threads that wait --------------------------------------------------------------------------------------------

    def confer(self, calls: CallLog, now: float, seconds: float) -> None:
        """Wait a little until all members of a group have told how far they are, or left: they may have disagreed."""
        with self._answered:
            self._handle(Compare(), now)
            protocol, group, mine = self._protocol, calls.group, calls.sequence
            others = [peer for peer in calls.members if peer != self.rank]

            def told() -> bool:
                return not protocol.sound or all(
                    protocol.has_left(peer) or protocol.reached(group, peer) >= mine for peer in others
                )

            self._answered.wait_for(told, seconds)

    def positions(self, calls: CallLog, seconds: float) -> dict[int, Position]:
        """Ask the group's members how far they are, and wait for answers a little; by world rank."""
        asked = [peer for peer in calls.members if peer != self.rank]
        with self._answered:
            self._handle(AskPositions(calls), time.monotonic())
            protocol, group = self._protocol, calls.group

            def answered() -> bool:
                return all(protocol.position(group, peer) is not None or protocol.has_left(peer) for peer in asked)

            self._answered.wait_for(answered, seconds)
            found = {peer: protocol.position(group, peer) for peer in asked}
        return {peer: position for peer, position in found.items() if position is not None}

    def last_calls(self, group: int, peers: Sequence[int], seconds: float) -> str:
        """What world ranks last called in a group, in words, as far as they answer."""
        calls = self._protocol.watches(group)
        positions = self.positions(calls, seconds) if calls is not None else {}
        told = [(peer, positions.get(peer)) for peer in peers[:MAX_SHOWN]]
        return "; ".join(
            f"rank {peer}'s last call was {place.last}" if place else f"rank {peer} does not answer"
            for peer, place in told
        )

    def settle(self, seconds: float) -> bool:
        """Wait until the verdict is in. A thread that waits also decides when it is due: it needs no other thread."""
        deadline = time.monotonic() + seconds
        while not self._settled.is_set():
            now = time.monotonic()
            with self._lock:
                self._handle(Decide(), now)
                due = self._protocol.decide_at()
            if now >= deadline:
                break
            self._settled.wait(max(0.001, min(deadline, due or deadline) - now))
        return self._settled.is_set()

    @property
    def settled(self) -> bool:
        """Whether the verdict is in."""
        return self._settled.is_set()

    def error(self, operation: str | None, during: str) -> Broken:
        """The verdict as an error; only after it is settled."""
        with self._lock:
            return self._protocol.error(operation, during)


class ControlSink:
    """Control messages, as they are read, go to `Control.receive`; `check` knows which ranks may send them."""

    def __init__(self, control: Control, check: Callable[[Header], None]) -> None:
        self._control = control
        self._check = check

    def begin(self, link: Link, header: Header) -> memoryview:
        self._check(header)
        if header.kind != Kind.CONTROL or header.nbytes > MAX_CONTROL:
            raise WireError(f"kind {header.kind}, {header.nbytes} bytes, on the control channel")
        return memoryview(bytearray(header.nbytes))

    def finish(self, link: Link, header: Header, payload: memoryview) -> None:
        self._control.receive(link.peer, bytes(payload), time.monotonic())
