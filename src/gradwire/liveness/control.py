"""Connects the control protocol with bytes, links and waiting threads.

The thread that reads control links passes their messages to `receive`, and calls `tick` when it is due. Any thread may
call the other methods. Instructions are carried out under one lock, in the protocol's order, so that peers get messages
in the order of the decisions.
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
    Decided,
    Deliver,
    Event,
    Found,
    Leaving,
    Linked,
    Lost,
    Missed,
    Received,
    Send,
    Share,
    Tick,
    Unwatched,
    Watched,
)
from gradwire.liveness.verdict import Finding
from gradwire.transports.base import Link
from gradwire.wire import MAX_CONTROL, Header, Kind, WireError

MAX_SHOWN = 16  # ranks in one line of text


class Control:
    """This rank's control protocol. Thread-safe."""

    def __init__(
        self,
        rank: int,
        names: Iterable[str],
        generation: int,
        post: Callable[[int, bytes], None],
        broke: Callable[[], None],
        deliver: Callable[[int, int, str, object], None] = lambda peer, number, operation, value: None,
    ) -> None:
        """Store the callbacks. All of them are called with the lock held.

        `post(rank, data)` sends a message to a world rank. `broke()` is called for each reason to break the generation.
        `deliver(peer, number, operation, value)` is called for each value of a gather.
        """
        names = list(names)
        self.rank = rank
        self.intact = True  # False as soon as there is a reason to break the generation
        self._size = len(names)
        self._protocol = ControlProtocol(rank, names, generation)
        self._post = post
        self._broke = broke
        self._deliver = deliver
        self._lock = threading.RLock()
        self._answered = threading.Condition(self._lock)
        self._decided = threading.Event()

    def _handle(self, event: Event, now: float) -> None:
        with self._lock:
            instructions = self._protocol.handle(event, now)
            self.intact = self._protocol.intact
            for instruction in instructions:
                match instruction:
                    case Send(peers, message):
                        data = control_messages.encode(message)
                        for peer in peers:
                            self._post(peer, data)
                    case Break():
                        self._broke()
                    case Decided():
                        self._decided.set()
                    case Answered():
                        self._answered.notify_all()
                    case Deliver(peer, value):
                        self._deliver(peer, value.number, value.operation, value.value)

    # -- events on this rank ------------------------------------------------------------------------------------------

    def watch(self, calls: CallLog, *, announced: bool = True) -> None:
        """Watch the calls of a group, so that peers can ask for them.

        With `announced` this rank also reports its progress to the peers, which compare it with their own calls.
        """
        self._handle(Watched(calls, announced), time.monotonic())

    def unwatch(self, calls: CallLog) -> None:
        """Stop watching the calls of a group that was closed."""
        self._handle(Unwatched(calls), time.monotonic())

    def open(self, group: int) -> bool:
        """Whether this rank has this group and has not closed it."""
        return self._protocol.watches(group) is not None

    def report(self, finding: Finding, now: float) -> None:
        """Report a reason to break the generation that this rank found."""
        self._handle(Found(finding), now)

    def called(self, now: float) -> None:
        """Note that a call was recorded after the generation broke. The peers may need it to explain a mismatch."""
        self._handle(Called(), now)

    def lost(self, peer: int, now: float, why: str = "closed its link") -> None:
        """Report that a peer's control link ended, or that it is silent. Without a goodbye the peer is lost."""
        self._handle(Lost(peer, why), now)

    def missed(self, peer: int, now: float) -> None:
        """Report that an operation of this rank waits for a peer. If the peer has left, it now counts as lost."""
        self._handle(Missed(peer), now)

    def linked(self, peer: int) -> None:
        """Note a new control link. If the generation broke before, the peer gets the reasons now."""
        self._handle(Linked(peer), time.monotonic())

    def goodbye(self) -> None:
        """Send a goodbye to all ranks, because this rank closes the generation."""
        self._handle(Leaving(), time.monotonic())

    def share(self, number: int, operation: str, value: object) -> None:
        """Send this rank's value of a gather to all ranks."""
        self._handle(Share(GatherValue(number, operation, value)), time.monotonic())

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def declared_lost(self) -> bool:
        """Whether the other ranks declared this rank lost, and continue without it."""
        return self._protocol.declared_lost

    @property
    def unreachable_peers(self) -> tuple[int, ...]:
        """The ranks that this rank itself could not reach, independent of the verdict."""
        with self._lock:
            return self._protocol.unreachable_peers

    def has_left(self, peer: int) -> bool:
        return self._protocol.has_left(peer)

    def left_at(self, peer: int) -> float | None:
        """Return the time of a peer's goodbye, or None."""
        return self._protocol.left_at(peer)

    def last_known_call(self, calls: CallLog, peer: int) -> Call | None:
        """Return this rank's record of the last call that a peer has reported, without asking the peer; or None."""
        with self._lock:
            return calls.call(self._protocol.reached(calls.group, peer))

    # -- the thread that serves control links -------------------------------------------------------------------------

    def receive(self, peer: int, payload: bytes, now: float) -> None:
        """Handle a peer's message; raise ValueError if it is malformed. Types of a later version are ignored."""
        message = control_messages.decode(payload, self._size)
        if message is not None:
            self._handle(Received(peer, message), now)

    def tick(self, now: float) -> float:
        """Do what is due, and return the seconds until the next call."""
        with self._lock:
            self._handle(Tick(), now)
            return self._protocol.pause(now)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def compare_calls(self, calls: CallLog, now: float, seconds: float) -> None:
        """Report this rank's progress, and wait until all members of a group have reported as much or have left.

        A mismatch between their last calls is found then. The wait ends after `seconds` at most.
        """
        with self._answered:
            self._handle(Compare(), now)
            protocol, group, mine = self._protocol, calls.group, calls.sequence
            others = [peer for peer in calls.members if peer != self.rank]

            def reported() -> bool:
                return not protocol.intact or all(
                    protocol.has_left(peer) or protocol.reached(group, peer) >= mine for peer in others
                )

            self._answered.wait_for(reported, seconds)

    def positions(self, calls: CallLog, seconds: float) -> dict[int, Position]:
        """Ask the group's members for their positions, and return the answers that arrive in time, by world rank."""
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
        """Return a text with the last call of each of these world ranks in a group, or that it does not answer."""
        calls = self._protocol.watches(group)
        positions = self.positions(calls, seconds) if calls is not None else {}
        shown = [(peer, positions.get(peer)) for peer in peers[:MAX_SHOWN]]
        return "; ".join(
            f"rank {peer}'s last call was {place.last}" if place else f"rank {peer} does not answer"
            for peer, place in shown
        )

    def await_verdict(self, seconds: float) -> bool:
        """Wait for the verdict; False if there is none after `seconds`.

        The waiting thread makes the decision itself when it is due, so it depends on no other thread.
        """
        deadline = time.monotonic() + seconds
        while not self._decided.is_set():
            now = time.monotonic()
            with self._lock:
                self._handle(Decide(), now)
                due = self._protocol.decide_at()
            if now >= deadline:
                break
            self._decided.wait(max(0.001, min(deadline, due or deadline) - now))
        return self._decided.is_set()

    @property
    def decided(self) -> bool:
        """Whether there is a verdict."""
        return self._decided.is_set()

    def error(self, operation: str | None, during: str) -> Broken:
        """Return the verdict as an error. Call it only when there is a verdict."""
        with self._lock:
            return self._protocol.error(operation, during)


class ControlSink:
    """Passes control messages to `Control.receive` as they are read. `check` refuses those of another generation."""

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
