"""Control messages: how an abort, a loss, a goodbye or a disagreement on one rank reaches all of them.

    finding   a reason to break the generation                      → the verdict; passed on to all
    calls     what a rank last called, when calls are disputed      → the verdict
    verdict   what a rank has settled on                            → joined by those who have not
    bye       a rank closed or ended as it should
    at        how far a rank has got in a group, with its chain     → compared with one's own calls
    where     a question: what have you called last?
    here      its answer
    tell      a rank's word in a round in which all tell all        → the parley

All are small JSON objects. The thread that reads them hands them to `hear`, and calls `tick` now and then with the
time. Any thread may `report`.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gradwire.errors import Broken
from gradwire.liveness.call_log import SHOWN, Call, CallLog
from gradwire.liveness.verdict import MAX_TEXT, Finding, Verdict
from gradwire.wire import MAX_CONTROL, Header, Kind, WireError, parse_json

if TYPE_CHECKING:
    from gradwire.transports.base import Link

log = logging.getLogger("gradwire.liveness")

ANNOUNCE_SECONDS = 0.5  # between two words on how far this rank has got: whoever reads them is held up in its computing
TICK_SECONDS = 0.3  # at most between two looks at what is due
BEHIND_SECONDS = 0.3  # how long a rank that has not made a disputed call waits for its program to make it
MAX_GROUPS = 4096
MAX_DISPUTES = 16
MAX_SHOWN = 16  # ranks, in one line
MAX_ITEM_BYTES = MAX_CONTROL // 2
MOST_CALLS = 1 << 63
KINDS = frozenset(("finding", "verdict", "calls", "bye", "at", "where", "here", "tell"))


@dataclass(frozen=True, slots=True)
class Position:
    """How far a peer said it has got in a group."""

    sequence: int
    finished: int
    last: str


class Control:
    """This rank's side of the control protocol; `post` sends a message to one world rank, `broke` is told once."""

    def __init__(
        self,
        rank: int,
        names: Iterable[str],
        generation: int,
        post: Callable[[int, bytes], None],
        broke: Callable[[], None],
    ) -> None:
        self.rank = rank
        self._names = list(names)
        self._post = post
        self._broke = broke
        self._lock = threading.RLock()
        self._verdict = Verdict(len(self._names), generation)
        self._told_calls: set[int] = set()  # groups
        self._disputed: set[int] = set()
        self._logs: dict[int, CallLog] = {}
        self._announced: dict[int, bool] = {}
        self._sent: dict[int, int] = {}
        self._announce_at = -math.inf  # not before
        self._reached: dict[tuple[int, int], int] = {}
        self._ahead: dict[tuple[int, int], tuple[int, int]] = {}
        self._positions: dict[tuple[int, int], Position] = {}
        self._answered = threading.Condition(self._lock)
        self._settled = threading.Event()
        self._lost: set[int] = set()
        self.given_up = False  # the others go on without this rank
        self.told: Callable[[int, int, str, Any], None] = lambda peer, number, operation, value: None

    # -- what this rank finds -----------------------------------------------------------------------------------------

    def watch(self, calls: CallLog, *, announced: bool = True) -> None:
        """Compare these calls with those of the others, unless they do that themselves, and tell who asks for them."""
        with self._lock:
            self._logs[calls.group] = calls
            self._announced[calls.group] = announced

    def unwatch(self, calls: CallLog) -> None:
        with self._lock:
            self._announce()  # the others compare its last calls with theirs
            self._logs.pop(calls.group, None)
            self._announced.pop(calls.group, None)
            self._sent.pop(calls.group, None)
            self._reached = {key: number for key, number in self._reached.items() if key[0] != calls.group}
            self._positions = {key: place for key, place in self._positions.items() if key[0] != calls.group}

    def open(self, group: int) -> bool:
        """Whether a group is in use here: neither closed nor unknown."""
        return group in self._logs

    @property
    def sound(self) -> bool:
        return self._verdict.sound

    def report(self, finding: Finding, now: float) -> None:
        """This rank found a reason to break the generation."""
        with self._lock:
            if self._verdict.find(finding, now):
                self.tell_all({"t": "finding", "finding": finding.to_wire()})
                self._broke()
            self._dispute(now)
            self._decide(now)

    def called(self, now: float) -> None:
        """A call was put on record although the generation is broken: it may be the one that others want to see."""
        with self._lock:
            self._dispute(now)
            self._decide(now)

    def lost(self, peer: int, now: float, why: str = "closed its link") -> None:
        """A peer's control link ended; without a goodbye that is a loss."""
        with self._lock:
            if not self.has_left(peer) and peer not in self._lost:
                self._lost.add(peer)
                self.report(Finding("lost", why, peer), now)

    @property
    def complaints(self) -> tuple[int, ...]:
        """The ranks that this rank itself could not reach, whatever the verdict."""
        with self._lock:
            return tuple(sorted(self._lost))

    def missed(self, peer: int, now: float) -> None:
        """Somebody here waits for a peer that has left: now its leaving matters."""
        with self._lock:
            if self.has_left(peer):
                self.report(Finding("lost", "left the job", peer), now)

    def has_left(self, peer: int) -> bool:
        return self._verdict.left_at(peer) is not None

    def left_at(self, peer: int) -> float | None:
        """When a peer said goodbye, if it did."""
        return self._verdict.left_at(peer)

    def introduce(self, peer: int) -> None:
        """A link to this peer was made just now: if the generation broke meanwhile, it has not heard of it."""
        with self._lock:
            for finding in self._verdict.findings:
                self._tell(peer, {"t": "finding", "finding": finding.to_wire()})

    def goodbye(self) -> None:
        self.tell_all({"t": "bye"})

    def confer(self, calls: CallLog, now: float, seconds: float) -> None:
        """Wait a little until all members of a group have told how far they are, or left: they may have disagreed."""
        with self._answered:
            self._announce()
            self._catch_up(now)
            mine, others = calls.sequence, [peer for peer in calls.members if peer != self.rank]

            def told() -> bool:
                return not self.sound or all(
                    self.has_left(peer) or self._reached.get((calls.group, peer), 0) >= mine for peer in others
                )

            self._answered.wait_for(told, seconds)

    # -- what peers say -----------------------------------------------------------------------------------------------

    def hear(self, peer: int, payload: bytes, now: float) -> None:
        """Act on a peer's message; ValueError if it makes no sense. Kinds of a later version are let pass."""
        message = parse_json(payload)
        with self._lock:
            match message:
                case {"t": "finding" | "verdict" as kind, "finding": dict(fields)}:
                    self._hear_finding(kind, Finding.from_wire(fields, len(self._names)), now)
                case {"t": "calls", "g": int(group), "among": list(members), "calls": list(calls)}:
                    self._hear_calls(peer, group, members, [Call.from_wire(fields) for fields in calls[:SHOWN]], now)
                case {"t": "bye"}:
                    self._verdict.leave(peer, now)
                    self._decide(now)
                    self._answered.notify_all()
                case {"t": "at", "g": int(group), "s": int(sequence), "c": int(chain)} if 0 < sequence < MOST_CALLS:
                    self._hear_at(peer, group, sequence, chain, now)
                case {"t": "where", "g": int(group)}:
                    self._answer(peer, group)
                case {"t": "here", "g": int(group), "s": int(sequence), "f": int(finished), "last": str(last)}:
                    if group in self._logs:
                        self._positions[group, peer] = Position(sequence, finished, last[:MAX_TEXT])
                        self._answered.notify_all()
                case {"t": "tell", "n": int(number), "o": str(operation), "v": value}:
                    self.told(peer, number, operation, value)
                case {"t": str(kind)} if kind in KINDS:
                    raise ValueError(f"malformed control message {str(message)[:200]}")
                case _ if not isinstance(message, dict):
                    raise ValueError("a control message is an object")

    def _hear_finding(self, kind: str, finding: Finding, now: float) -> None:
        if finding.culprit == self.rank and finding.kind == "lost":
            # Others have given this rank up: what it finds from here on would only mislead them.
            self.given_up = True
            self._join(Finding("given up", f"was given up by its peers: it {finding.reason}", self.rank), now)
        elif kind == "verdict":
            self._join(finding, now)
        else:
            self.report(finding, now)

    def _hear_calls(self, peer: int, group: int, members: list[Any], calls: list[Call], now: float) -> None:
        among = {rank for rank in members[: len(self._names)] if type(rank) is int and 0 <= rank < len(self._names)}
        if len(among) != len(members):
            raise ValueError("a group of ranks that do not exist, or are in it twice")
        if len(self._disputed) < MAX_DISPUTES or group in self._disputed:
            self._disputed.add(group)
            self._verdict.add_calls(group, members, peer, calls)
        self._decide(now)

    def _hear_at(self, peer: int, group: int, sequence: int, chain: int, now: float) -> None:
        calls = self._logs.get(group)
        if calls is None:
            return
        self._reached[group, peer] = sequence
        self._answered.notify_all()
        mine = calls.chain_at(sequence)
        if mine is None:
            if sequence > calls.sequence and len(self._ahead) < MAX_GROUPS:
                self._ahead[group, peer] = (sequence, chain)
        elif mine != chain:
            self.report(disagreement(calls, sequence), now)

    def _answer(self, peer: int, group: int) -> None:
        calls = self._logs.get(group)
        last = calls.last() if calls else None
        sequence, finished = (calls.sequence, calls.finished) if calls else (0, 0)
        text = f"{last.what} #{last.sequence} at {last.site}" if last else "none"
        self._tell(peer, {"t": "here", "g": group, "s": sequence, "f": finished, "last": text[:MAX_TEXT]})

    # -- in the course of time ----------------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Do what is due; the seconds until the next call."""
        with self._lock:
            if now >= self._announce_at and self._announce():
                self._announce_at = now + ANNOUNCE_SECONDS
            self._catch_up(now)
            self._dispute(now)
            self._decide(now)
            due = self._verdict.due()
            if due is not None:
                return max(0.0, min(due, max(self._verdict.since + BEHIND_SECONDS, now + 0.01)) - now)
            return min(TICK_SECONDS, self._announce_at - now) if now < self._announce_at else TICK_SECONDS

    def _catch_up(self, now: float) -> None:
        """Compare with those who were ahead, as far as this rank has got there."""
        for (group, peer), (sequence, chain) in list(self._ahead.items()):
            calls = self._logs.get(group)
            if calls is None or calls.sequence >= sequence:
                del self._ahead[group, peer]
                if calls is not None:
                    self._hear_at(peer, group, sequence, chain, now)

    def _announce(self) -> bool:
        """Tell each group how far this rank has got, if it has moved."""
        moved = False
        if not self._verdict.sound:
            return False
        for group, calls in self._logs.items():
            sequence = calls.sequence
            chain = calls.chain_at(sequence)
            if chain is not None and self._sent.get(group) != sequence and self._announced[group]:
                moved = True
                self._sent[group] = sequence
                for peer in calls.members:
                    self._tell(peer, {"t": "at", "g": group, "s": sequence, "c": chain})
        return moved

    def _dispute(self, now: float) -> None:
        """Calls are disputed: show everybody one's own, once. Who is about to make the disputed one makes it first."""
        dispute = self._verdict.dispute()
        calls = self._logs.get(dispute.group) if dispute is not None else None
        if dispute is None or calls is None or calls.group in self._told_calls:
            return
        if calls.sequence < dispute.sequence and now < self._verdict.since + BEHIND_SECONDS:
            return
        self._told_calls.add(calls.group)
        recent = _bounded(calls.recent(dispute.sequence))
        self._verdict.add_calls(calls.group, calls.members, self.rank, recent)
        shown = [asdict(call) for call in recent]
        self.tell_all({"t": "calls", "g": calls.group, "among": calls.members, "calls": shown})

    def _decide(self, now: float) -> None:
        if self._verdict.open and self._verdict.decide(now):
            self._settle()

    def _join(self, finding: Finding, now: float) -> None:
        """Settle on a verdict that others have reached."""
        if self._verdict.adopt(finding, now):
            self._settle()
            self._broke()

    def _settle(self) -> None:
        decided = self._verdict.decided
        assert decided is not None
        known = decided.culprit == self.rank and decided.kind in ("aborted", "given up")  # by everybody
        if decided.kind != "mismatch" and not known:  # a mismatch each rank explains by itself, from all the calls
            self.tell_all({"t": "verdict", "finding": decided.to_wire()})
        self._settled.set()

    # -- asking -------------------------------------------------------------------------------------------------------

    def positions(self, calls: CallLog, seconds: float) -> dict[int, Position]:
        """Ask the group's members how far they are, and wait for answers a little; by world rank."""
        asked = [peer for peer in calls.members if peer != self.rank]
        with self._answered:
            for peer in asked:
                self._positions.pop((calls.group, peer), None)
                self._tell(peer, {"t": "where", "g": calls.group})

            def answered() -> bool:
                return all((calls.group, peer) in self._positions or self.has_left(peer) for peer in asked)

            self._answered.wait_for(answered, seconds)
            found = {peer: self._positions.get((calls.group, peer)) for peer in asked}
        return {peer: position for peer, position in found.items() if position is not None}

    def last_heard(self, calls: CallLog, peer: int) -> Call | None:
        """The last call that a peer told of, as this rank made it, if it did: what one knows without asking."""
        with self._lock:
            return calls.call(self._reached.get((calls.group, peer), 0))

    def last_calls(self, group: int, peers: Sequence[int], seconds: float) -> str:
        """What world ranks last called in a group, in words, as far as they answer."""
        calls = self._logs.get(group)
        positions = self.positions(calls, seconds) if calls is not None else {}
        told = [(peer, positions.get(peer)) for peer in peers[:MAX_SHOWN]]
        return "; ".join(
            f"rank {peer}'s last call was {place.last}" if place else f"rank {peer} does not answer"
            for peer, place in told
        )

    def settle(self, seconds: float) -> bool:
        """Wait until the verdict is in. Who waits also decides when it is due: it does not hang on another thread."""
        deadline = time.monotonic() + seconds
        while not self._settled.is_set():
            now = time.monotonic()
            with self._lock:
                self._decide(now)
                due = self._verdict.due()
            if now >= deadline:
                break
            self._settled.wait(max(0.001, min(deadline, due or deadline) - now))
        return self._settled.is_set()

    @property
    def settled(self) -> bool:
        return self._settled.is_set()

    def error(self, operation: str | None, during: str) -> Broken:
        """The verdict as an error; only after it is settled."""
        with self._lock:
            finding = self._verdict.decided
            assert finding is not None
            who = self._names[finding.culprit] if finding.culprit is not None else "a rank"
            return self._verdict.error(operation=operation, during=during, who=who)

    def tell_all(self, message: dict[str, Any]) -> None:
        """Post a message to all peers."""
        data = _encoded(message)
        for peer in range(len(self._names)):
            if peer != self.rank:
                self._post(peer, data)

    def _tell(self, peer: int, message: dict[str, Any]) -> None:
        if peer != self.rank:
            self._post(peer, _encoded(message))


class ControlSink:
    """Control messages, as they are read, go to `Control.hear`; `check` knows whose they may be."""

    def __init__(self, control: Control, check: Callable[[Header], None]) -> None:
        self._control = control
        self._check = check

    def begin(self, link: Link, header: Header) -> memoryview:
        self._check(header)
        if header.kind != Kind.CONTROL or header.nbytes > MAX_CONTROL:
            raise WireError(f"kind {header.kind}, {header.nbytes} bytes, on the control channel")
        return memoryview(bytearray(header.nbytes))

    def finish(self, link: Link, header: Header, payload: memoryview) -> None:
        self._control.hear(link.peer, bytes(payload), time.monotonic())


def disagreement(calls: CallLog, sequence: int, reason: str = "ranks called different things") -> Finding:
    """Ranks of a group called different things, at this call or before it."""
    last = calls.last()
    operation = last.what.partition("(")[0] if last else None
    return Finding("mismatch", reason[:MAX_TEXT], None, None, operation, calls.group, sequence)


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def _bounded(calls: Sequence[Call]) -> list[Call]:
    """Calls cut to what fits into a control message; the newest keep most of their items."""
    room, kept = MAX_ITEM_BYTES, []
    for call in reversed(calls):
        items: list[str] = []
        for item in call.items:
            room -= len(item) + 8
            if room < 0:
                break
            items.append(item)
        kept.append(Call(call.sequence, call.fingerprint, call.what[:500], call.site[:200], tuple(items)))
    return kept[::-1]
