"""The control protocol: it spreads an abort, a loss, a goodbye or a mismatch from one rank to all ranks.

`handle` takes an event and the time, and returns instructions. The protocol has no links, threads, locks or clock.
`Control` and the simulator carry out its instructions. The call logs that it watches grow between events; it reads them
whenever it handles an event.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradwire.errors import Broken
from gradwire.liveness.call_log import Call, CallLog
from gradwire.liveness.control_messages import (
    CallsReport,
    FindingReport,
    GatherValue,
    Goodbye,
    Message,
    Position,
    PositionQuery,
    Progress,
    VerdictReport,
)
from gradwire.liveness.verdict import MAX_TEXT, Finding, Verdict, disagreement
from gradwire.wire import MAX_CONTROL

ANNOUNCE_SECONDS = 0.5  # between progress messages: reading them costs the receiver time
TICK_SECONDS = 0.3  # longest time between two ticks
BEHIND_SECONDS = 3.0  # after a mismatch, how long a rank waits for its own program to make the disputed call
MAX_GROUPS = 4096
MAX_DISPUTES = 16
MAX_ITEM_BYTES = MAX_CONTROL // 2


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A peer sent a message."""

    peer: int
    message: Message


@dataclass(frozen=True, slots=True)
class Found:
    """This rank found a reason to break the generation."""

    finding: Finding


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer's control link ended, or the peer is silent. Without a goodbye it is lost."""

    peer: int
    why: str = "closed its link"


@dataclass(frozen=True, slots=True)
class Missed:
    """An operation of this rank waits for a peer. If the peer has left, it now counts as lost."""

    peer: int


@dataclass(frozen=True, slots=True)
class Linked:
    """A control link was opened. If the generation broke before, the peer does not know the reasons yet."""

    peer: int


@dataclass(frozen=True, slots=True)
class Watched:
    """A group was opened. Its calls are shown when a peer asks. If `announced`, its progress is also reported."""

    calls: CallLog
    announced: bool = True


@dataclass(frozen=True, slots=True)
class Unwatched:
    """A group was closed."""

    calls: CallLog


@dataclass(frozen=True, slots=True)
class Called:
    """A call was recorded after the generation broke. The peers may need it to explain a mismatch."""


@dataclass(frozen=True, slots=True)
class Compare:
    """Report this rank's progress now, and compare it with the peers' progress."""


@dataclass(frozen=True, slots=True)
class AskPositions:
    """Ask the members of a group for their positions. Earlier answers are dropped."""

    calls: CallLog


@dataclass(frozen=True, slots=True)
class Share:
    """Send this rank's value of a gather to all ranks."""

    value: GatherValue


@dataclass(frozen=True, slots=True)
class Leaving:
    """This rank closes the generation."""


@dataclass(frozen=True, slots=True)
class Decide:
    """A thread waits for the verdict. Decide if the time has come."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Received
    | Found
    | Lost
    | Missed
    | Linked
    | Watched
    | Unwatched
    | Called
    | Compare
    | AskPositions
    | Share
    | Leaving
    | Decide
    | Tick
)


# -- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to some peers."""

    peers: tuple[int, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class Break:
    """The generation is broken, or has one more reason to be. Wake the waiting threads."""


@dataclass(frozen=True, slots=True)
class Decided:
    """There is a verdict."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A peer has reported its progress or its position, or has left. Wake the threads that wait for that."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Deliver a peer's value of a gather."""

    peer: int
    value: GatherValue


Instruction = Send | Break | Decided | Answered | Deliver


class ControlProtocol:
    """This rank's side of the protocol."""

    def __init__(self, rank: int, names: Iterable[str], generation: int) -> None:
        """`names` are the names of all ranks, as errors show them."""
        self.rank = rank
        self.declared_lost = False  # the other ranks continue without this one
        self._names = list(names)
        self._others = tuple(peer for peer in range(len(self._names)) if peer != rank)
        self._verdict = Verdict(len(self._names), generation)
        self._lost: set[int] = set()
        self._logs: dict[int, CallLog] = {}  # by group, or by (group, peer), like all dictionaries here
        self._announced: dict[int, bool] = {}
        self._sent: dict[int, int] = {}  # the last sequence number that was reported to the peers
        self._announce_at = -math.inf  # earliest time of the next progress messages
        self._reached: dict[tuple[int, int], int] = {}
        self._ahead: dict[tuple[int, int], Progress] = {}
        self._positions: dict[tuple[int, int], Position] = {}
        self._shown: set[int] = set()  # disputed groups for which this rank has sent its calls
        self._disputed: set[int] = set()
        self._instructions: list[Instruction] = []

    def handle(self, event: Event, now: float) -> Sequence[Instruction]:
        """Handle an event, and return the instructions to carry out, in order."""
        match event:
            case Tick():
                self._tick(now)
            case Received(peer, message):
                self._receive(peer, message, now)
            case Found(finding):
                self._find(finding, now)
            case Lost(peer, why):
                if not self.has_left(peer) and peer not in self._lost:
                    self._lost.add(peer)
                    self._find(Finding("lost", why, peer), now)
            case Missed(peer):
                if self.has_left(peer):
                    self._find(Finding("lost", "left the job", peer), now)
            case Called():
                self._dispute(now)
                self._decide(now)
            case Compare():
                self._announce()
                self._catch_up(now)
            case Decide():
                self._decide(now)
            case Linked(peer):
                for finding in self._verdict.findings:
                    self._send(FindingReport(finding), (peer,))
            case AskPositions(calls):
                self._ask(calls)
            case Share(value):
                self._send(value)
            case Leaving():
                self._send(Goodbye())
            case Watched(calls, announced):
                self._logs[calls.group] = calls
                self._announced[calls.group] = announced
            case Unwatched(calls):
                self._unwatch(calls)
        instructions, self._instructions = self._instructions, []
        return instructions

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def intact(self) -> bool:
        return self._verdict.intact

    @property
    def decided(self) -> bool:
        """Whether there is a verdict."""
        return self._verdict.decided is not None

    @property
    def unreachable_peers(self) -> tuple[int, ...]:
        """The ranks that this rank itself could not reach, independent of the verdict."""
        return tuple(sorted(self._lost))

    def has_left(self, peer: int) -> bool:
        return self._verdict.left_at(peer) is not None

    def left_at(self, peer: int) -> float | None:
        """Return the time of a peer's goodbye, or None."""
        return self._verdict.left_at(peer)

    def watches(self, group: int) -> CallLog | None:
        """Return the calls of a group; None if this rank does not have the group or has closed it."""
        return self._logs.get(group)

    def reached(self, group: int, peer: int) -> int:
        """Return the last call in a group that a peer has reported; 0 if there was none."""
        return self._reached.get((group, peer), 0)

    def position(self, group: int, peer: int) -> Position | None:
        """Return a peer's position in a group, if it has answered; or None."""
        return self._positions.get((group, peer))

    def error(self, operation: str | None, during: str) -> Broken:
        """Return the verdict as an error. Call it only when there is a verdict."""
        finding = self._verdict.decided
        assert finding is not None
        who = self._names[finding.culprit] if finding.culprit is not None else "a rank"
        return self._verdict.error(operation=operation, during=during, who=who)

    def decide_at(self) -> float | None:
        """Return the time at which a thread that waits for the verdict should send `Decide`; None if none is due."""
        return self._verdict.due()

    def pause(self, now: float) -> float:
        """Return the seconds until the next tick is due."""
        due = self._verdict.due()
        if due is not None:
            return max(0.0, min(due, max(self._verdict.since + BEHIND_SECONDS, now + 0.01)) - now)
        return min(TICK_SECONDS, self._announce_at - now) if now < self._announce_at else TICK_SECONDS

    # -- messages from peers ------------------------------------------------------------------------------------------

    def _receive(self, peer: int, message: Message, now: float) -> None:
        match message:
            case FindingReport(finding) | VerdictReport(finding):
                self._receive_finding(finding, isinstance(message, VerdictReport), now)
            case CallsReport(group, members, calls):
                if len(self._disputed) < MAX_DISPUTES or group in self._disputed:
                    self._disputed.add(group)
                    self._verdict.add_calls(group, members, peer, calls)
                self._decide(now)
            case Goodbye():
                self._verdict.mark_left(peer, now)
                self._decide(now)
                self._instructions.append(Answered())
            case Progress():
                self._compare(peer, message, now)
            case PositionQuery(group):
                self._send(self._own_position(group), (peer,))
            case Position(group):
                if group in self._logs:
                    self._positions[group, peer] = message
                    self._instructions.append(Answered())
            case GatherValue():
                self._instructions.append(Deliver(peer, message))

    def _receive_finding(self, finding: Finding, decided: bool, now: float) -> None:
        if finding.culprit == self.rank and finding.kind == "lost":
            # The peers declared this rank lost. Its own findings from now on would only mislead them.
            self.declared_lost = True
            self._adopt(Finding("given up", f"was declared lost by its peers: it {finding.reason}", self.rank), now)
        elif decided:
            self._adopt(finding, now)
        else:
            self._find(finding, now)

    def _own_position(self, group: int) -> Position:
        calls = self._logs.get(group)
        last = calls.last() if calls else None
        sequence, finished = (calls.sequence, calls.finished) if calls else (0, 0)
        text = f"{last.what} #{last.sequence} at {last.site}" if last else "none"
        return Position(group, sequence, finished, text[:MAX_TEXT])

    def _ask(self, calls: CallLog) -> None:
        asked = tuple(peer for peer in calls.members if peer != self.rank)
        for peer in asked:
            self._positions.pop((calls.group, peer), None)
        self._send(PositionQuery(calls.group), asked)

    # -- comparing calls ----------------------------------------------------------------------------------------------

    def _compare(self, peer: int, progress: Progress, now: float) -> None:
        """Compare the chain of a peer's calls with this rank's, now or when this rank has made as many calls."""
        group, sequence = progress.group, progress.sequence
        calls = self._logs.get(group)
        if calls is None:
            return
        self._reached[group, peer] = sequence
        self._instructions.append(Answered())
        mine = calls.chain_at(sequence)
        if mine is None:
            if sequence > calls.sequence and len(self._ahead) < MAX_GROUPS:
                self._ahead[group, peer] = progress
        elif mine != progress.chain:
            self._find(disagreement(calls, sequence), now)

    def _catch_up(self, now: float) -> None:
        """Compare with the peers that were ahead, if this rank has made as many calls by now."""
        for (group, peer), progress in list(self._ahead.items()):
            calls = self._logs.get(group)
            if calls is None or calls.sequence >= progress.sequence:
                del self._ahead[group, peer]
                if calls is not None:
                    self._compare(peer, progress, now)

    def _announce(self) -> bool:
        """Report this rank's progress to the members of each group in which it made calls. Return whether it did."""
        moved = False
        if not self._verdict.intact:
            return False
        for group, calls in self._logs.items():
            sequence = calls.sequence
            chain = calls.chain_at(sequence)
            if chain is not None and self._sent.get(group) != sequence and self._announced[group]:
                moved = True
                self._sent[group] = sequence
                self._send(Progress(group, sequence, chain), calls.members)
        return moved

    def _unwatch(self, calls: CallLog) -> None:
        self._announce()  # the peers compare the group's last calls with theirs
        self._logs.pop(calls.group, None)
        self._announced.pop(calls.group, None)
        self._sent.pop(calls.group, None)
        self._reached = {key: number for key, number in self._reached.items() if key[0] != calls.group}
        self._positions = {key: place for key, place in self._positions.items() if key[0] != calls.group}

    # -- breaking and deciding ----------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        if now >= self._announce_at and self._announce():
            self._announce_at = now + ANNOUNCE_SECONDS
        self._catch_up(now)
        self._dispute(now)
        self._decide(now)

    def _find(self, finding: Finding, now: float) -> None:
        if self._verdict.add(finding, now):
            self._send(FindingReport(finding))
            self._instructions.append(Break())
        self._dispute(now)
        self._decide(now)

    def _dispute(self, now: float) -> None:
        """If there is a mismatch, send this rank's calls to all ranks, once.

        A rank that has not made the disputed call yet waits for it, up to `BEHIND_SECONDS`.
        """
        dispute = self._verdict.dispute()
        calls = self._logs.get(dispute.group) if dispute is not None else None
        if dispute is None or calls is None or calls.group in self._shown:
            return
        if calls.sequence < dispute.sequence and now < self._verdict.since + BEHIND_SECONDS:
            return
        self._shown.add(calls.group)
        recent = _bounded(calls.recent(dispute.sequence))
        self._verdict.add_calls(calls.group, calls.members, self.rank, recent)
        self._send(CallsReport(calls.group, calls.members, recent))

    def _decide(self, now: float) -> None:
        if self._verdict.open and self._verdict.decide(now):
            self._announce_verdict()

    def _adopt(self, finding: Finding, now: float) -> None:
        """Adopt a verdict that a peer has reached."""
        if self._verdict.adopt(finding, now):
            self._announce_verdict()
            self._instructions.append(Break())

    def _announce_verdict(self) -> None:
        decided = self._verdict.decided
        assert decided is not None
        known = decided.culprit == self.rank and decided.kind in ("aborted", "given up")  # the peers know it already
        if decided.kind != "mismatch" and not known:  # each rank explains a mismatch itself, from the calls of all
            self._send(VerdictReport(decided))
        self._instructions.append(Decided())

    def _send(self, message: Message, peers: Sequence[int] | None = None) -> None:
        """Send a message to these peers; None means to all."""
        chosen = self._others if peers is None else tuple(peer for peer in peers if peer != self.rank)
        self._instructions.append(Send(chosen, message))


def _bounded(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Return the calls, with items dropped until they fit into a control message. Items of old calls go first."""
    room, shortened = MAX_ITEM_BYTES, []
    for call in reversed(calls):
        items: list[str] = []
        for item in call.items:
            room -= len(item) + 8
            if room < 0:
                break
            items.append(item)
        shortened.append(Call(call.sequence, call.fingerprint, call.what[:500], call.site[:200], tuple(items)))
    return tuple(shortened[::-1])
