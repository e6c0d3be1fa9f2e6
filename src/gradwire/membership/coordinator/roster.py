"""Where each member is: in the present generation, back from it, or waiting to join. Moves only, no rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradwire.membership.coordinator.clock import Clock
from gradwire.membership.types import Cause, Change, Claim, Kind, Member

LAPSE = 5.0  # seconds; much longer than the pause between two claims of a waiting member
LAPSE_FOR_EACH = 0.005  # seconds for each that waits, if that is more: where many do, they are to ask less often
BACKOFF = 5.0  # seconds before a member that others could not reach may join again; doubled each time
LONGEST_BACKOFF = 300.0

_WHY: dict[Cause, str] = {
    "left": "has left",
    "gone": "has died",
    "silent": "was not heard of for the time of its lease",
    "accused": "could not be reached by others",
    "replaced": "gave its place up: its id asks for a new one",
}


@dataclass(slots=True)
class Place:
    """Of one that waits."""

    claim: Claim
    asked: float
    told: bool = False
    complaints: frozenset[str] = frozenset()


@dataclass(slots=True)
class MemberRecord:
    """Of one that is in the present generation, with what must be kept of its claim."""

    member: Member  # with the rank that it got
    wish: int | None  # the rank that it asked for
    session: bytes
    came_from: int  # the generation that it was in before
    transport: str  # that it asked for
    asked: float
    heard: float
    told: bool = False

    def claimed(self) -> Member:
        """The member as it described itself."""
        return replace(self.member, rank=self.wish)


@dataclass(frozen=True, slots=True)
class Outsider:
    """A member that was dropped, and may live all the same: it knows the state of a generation."""

    member: Member
    generation: int
    since: float


class Roster:
    """Members by id: `records` in rank order, `back` and `line` in the order of arrival; `out` are records given up.

    What is asked at each event is kept up to date instead of being counted: jobs have thousands of members.
    """

    def __init__(self, clock: Clock) -> None:
        self.generation = 0
        self.records: dict[str, MemberRecord] = {}
        self.members: tuple[Member, ...] = ()
        self.out: dict[str, Cause] = {}
        self.back: dict[str, Place] = {}
        self.over = False  # somebody has come back: for the present generation that is the end
        self.line: dict[str, Place] = {}
        self.outside: dict[str, Outsider] = {}  # for some minutes
        self.expected: dict[str, None] = {}  # members at work, neither out nor back
        self.insists = False  # some member of the present generation insists on shared memory
        self.arrived = 0.0  # when somebody last came
        self.stirred = 0.0  # when somebody last came or went who matters to the next generation
        self.changes: list[Change] = []
        self._clock = clock
        self._wishes: list[int | None] | None = None  # as long as nobody comes or goes
        self._accused: Counter[str] = Counter()  # by how many of those who are back
        self._rests: dict[str, tuple[float, float]] = {}  # by id: how long, and until when
        self._joined: set[str] = set()  # members that came without the state; not known after a restart
        self._lapse_at = 0.0  # no place lapses before
        self._silent_at = 0.0  # no lease runs out before

    # -- who is where

    def place(self, name: str) -> Place | None:
        return self.back.get(name) or self.line.get(name)

    @property
    def exchanging(self) -> bool | None:
        """Whether those who are here use gradwire's data plane: all do or none does; None if nobody is here."""
        if self.records:
            return bool(next(iter(self.records.values())).transport)
        first = next(iter(self.line.values()), None)
        return None if first is None else bool(first.claim.transport)

    def live(self) -> dict[str, MemberRecord]:
        return {name: record for name, record in self.records.items() if name not in self.out}

    def alive(self, name: str) -> bool:
        return name in self.records and name not in self.out

    def returnable(self, name: str) -> bool:
        """Whether it is a member of the present generation that lives, for all we know, or was only silent."""
        return name in self.records and self.out.get(name, "silent") == "silent"

    def known(self, name: str) -> Member | None:
        """Whoever goes by this id now, at work or waiting."""
        place = self.place(name)
        if place is not None:
            return place.claim.member
        return self.records[name].member if self.returnable(name) else None

    def size(self) -> int:
        """How many live members the present generation has."""
        return len(self.records) - len(self.out)

    def absent(self) -> list[str]:
        """Those whom somebody who is back could not reach, and who are not back themselves; in rank order."""
        absent = [name for name in self._accused if name in self.expected]
        return sorted(absent, key=lambda name: self.records[name].member.rank or 0)

    def awaited(self) -> int:
        """How many members of the present generation may still come back."""
        return len(self.expected) - len(self.absent())

    def ready(self) -> Iterator[str]:
        """Those in line who may join, in their order."""
        return (name for name in self.line if not self.rest(name))

    def rest(self, name: str) -> float:
        """Seconds before it may join again."""
        _, until = self._rests.get(name, (0.0, 0.0))
        return 0.0 if self._clock.reached(until) else until - self._clock.time

    def dropped_again(self, name: str) -> bool:
        """Whether it rests, and not for the first time."""
        return self.rest(name) > 0 and self._rests[name][0] > BACKOFF

    def rests_until(self) -> list[float]:
        return [until for _, until in self._rests.values()]

    def unseen(self) -> list[str]:
        """Members of the present generation that are out, but may live all the same."""
        return [name for name, cause in self.out.items() if cause in ("silent", "accused")]

    def wishes(self) -> list[int | None]:
        """The ranks that those in line asked for."""
        if self._wishes is None:
            self._wishes = [place.claim.member.rank for place in self.line.values()]
        return self._wishes

    def uninformed(self) -> bool:
        """Whether somebody who still asks has not been told how it ended."""
        asking: list[MemberRecord | Place] = [*self.records.values(), *self.back.values(), *self.line.values()]
        return any(not one.told and not self._clock.reached(one.asked + LAPSE) for one in asking)

    # -- moves of those who wait

    def come(self, claim: Claim, places: dict[str, Place], complaints: frozenset[str] = frozenset()) -> None:
        """A claim takes a place in `places`, or holds it."""
        name, now = claim.member.id, self._clock.time
        place = places.get(name)
        if place is None:
            place = places[name] = Place(claim, now, complaints=complaints)
            self.arrived = now
            self._stir(places)
            back = places is self.back
            self.note("came", name, f"{claim.member} has come{' back' if back else ''}", lasting=back and not self.over)
            self.over = self.over or back
            if back:
                self.expected.pop(name, None)
                self._accused.update(complaints)
        elif place.claim.session != claim.session or place.claim.sequence <= claim.sequence:
            if place.complaints != complaints:
                self._stir(places)
                self._withdraw_complaints(place)
                self._accused.update(complaints)
            place.claim, place.complaints = claim, complaints
        place.asked = now

    def free(self, name: str, why: str) -> None:
        """Whoever waited there no longer does."""
        place = self._leave_back(name)
        if place is not None:
            self.stirred = self._clock.time
            self.expected[name] = None
        else:
            place = self.line.pop(name, None)
            self._stir(self.line)
        if place is not None:
            self.note("went", name, f"{place.claim.member} {why}", lasting=False)

    def let_lapse(self) -> None:
        if not self._clock.reached(self._lapse_at):
            return
        lapse = max(LAPSE, LAPSE_FOR_EACH * (len(self.back) + len(self.line)))
        for name in [name for name, place in self._waiting() if self._clock.reached(place.asked + lapse)]:
            self.free(name, "no longer asks")
        self._lapse_at = LAPSE + min((place.asked for _, place in self._waiting()), default=self._clock.time)

    def send_to_line(self, name: str) -> None:
        """A member that others cannot reach starts over at the end of the line.

        A link that is cut stays cut for a while: without a rest, all would regroup for it again and again.
        """
        self.line[name] = self.back[name]
        self._leave_back(name)
        self._must_rest(name)
        self.strike(name, "accused")

    def strike_accused(self, name: str) -> None:
        """Strike off a member that others cannot reach and that is not back. One that has just joined must rest before
        it may join again: otherwise it could break one generation after the other."""
        if name in self._joined:
            self._must_rest(name)
        self.strike(name, "accused")

    # -- moves of those who are at work

    def strike(self, name: str, cause: Cause) -> None:
        """A member is out of the present generation."""
        self._leave_back(name)
        self.expected.pop(name, None)
        self.out[name] = cause
        self.records[name].told = True
        self.stirred = self._clock.time
        self.note(cause, name, f"{self.records[name].member} {_WHY[cause]}")

    def end(self, name: str, cause: Cause) -> None:
        """A process is no more, wherever it was."""
        self.free(name, _WHY[cause])
        self._rests.pop(name, None)
        outsider = self.outside.pop(name, None)
        if outsider is not None:  # or a restarted coordinator would wait for it
            self.note("went", name, f"{outsider.member} {_WHY[cause]}, having been dropped before")
        if self.returnable(name):
            self.strike(name, cause)

    def hear(self, name: str) -> None:
        """A member lives. If it had only been silent, and nobody went on without it, it is in again."""
        record = self.records.get(name)
        if record is None:
            return
        record.heard = self._clock.time
        if self.out.get(name) == "silent":
            del self.out[name]
            self.expected[name] = None
            self.stirred = self._clock.time
            self.note("returned", name, f"{record.member} is heard of again")

    def silent(self, lease: float) -> list[str]:
        """Those whose lease has run out. Who is back asks all the time, and needs none."""
        if not self._clock.reached(self._silent_at):
            return []
        live = self.live()
        silent = [n for n, record in live.items() if n not in self.back and self._clock.reached(record.heard + lease)]
        self._silent_at = lease + min(
            (record.heard for name, record in live.items() if name not in silent), default=self._clock.time
        )
        return silent

    def record(self, order: Sequence[str]) -> None:
        """The next generation: these, from back and line, in this order. Who is not among them stays in line."""
        places = {name: self.back.get(name) or self.line[name] for name in order}
        kept = {name: one for name, one in self.outside.items() if not self._clock.reached(one.since + LONGEST_BACKOFF)}
        kept |= {name: Outsider(self.records[name].member, self.generation, self._clock.time) for name in self.unseen()}
        self.outside = {name: one for name, one in kept.items() if name not in places}
        claims = {name: place.claim for name, place in places.items()}
        self._joined = {n for n, one in claims.items() if one.stranger or one.generation < self.generation}
        self.generation += 1
        self.records, self.out, self.over = {}, {}, False
        for rank, (name, place) in enumerate(places.items()):
            claim = place.claim
            member = replace(claim.member, rank=rank)
            self.records[name] = MemberRecord(
                member,
                claim.member.rank,
                claim.session,
                claim.generation,
                claim.transport,
                place.asked,
                self._clock.time,
            )
            self._leave_back(name)
            self.line.pop(name, None)
        self._know_members()

    # -- the record

    def note(self, kind: Kind, name: str | None, text: str, *, lasting: bool = True) -> None:
        self.changes.append(Change(kind, self.generation, name, text, lasting))

    def snapshot(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "members": [_to_json(record) for record in self.records.values()],
            "out": dict(self.out),
            "over": self.over,
            "outside": [[_described(one.member), one.generation] for one in self.outside.values()],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        now = self._clock.time
        self.generation = snapshot["generation"]
        self.records = {fields["id"]: _from_json(fields, now) for fields in snapshot["members"]}
        self.out, self.over = dict(snapshot["out"]), snapshot["over"]
        outside = [Outsider(Member(**fields), number, now) for fields, number in snapshot.get("outside", [])]
        self.outside = {one.member.id: one for one in outside}
        self._know_members()
        self.arrived = self.stirred = now

    def _must_rest(self, name: str) -> None:
        self._rests = {n: rest for n, rest in self._rests.items() if not self._clock.reached(rest[1] + LONGEST_BACKOFF)}
        length = min(LONGEST_BACKOFF, 2 * self._rests[name][0]) if name in self._rests else BACKOFF
        self._rests[name] = (length, self._clock.time + length)

    def _waiting(self) -> Iterator[tuple[str, Place]]:
        yield from self.back.items()
        yield from self.line.items()

    def _know_members(self) -> None:
        self.members = tuple(record.member for record in self.records.values())
        self.expected = dict.fromkeys(self.live())
        self.insists = any(record.transport == "shm" for record in self.records.values())

    def _leave_back(self, name: str) -> Place | None:
        place = self.back.pop(name, None)
        if place is not None:
            self._withdraw_complaints(place)
        return place

    def _withdraw_complaints(self, place: Place) -> None:
        for accused in place.complaints:
            self._accused[accused] -= 1
            if not self._accused[accused]:
                del self._accused[accused]
        place.complaints = frozenset()

    def _stir(self, places: dict[str, Place]) -> None:
        """Those who are back do not wait for comings and goings in the line; if nobody is, the line settles too."""
        self._wishes = None
        if places is self.back or not self.back:
            self.stirred = self._clock.time


_FIELDS = ("id", "rank", "host", "hostname", "pid", "address", "started")


def _described(member: Member) -> dict[str, Any]:
    return {name: getattr(member, name) for name in _FIELDS}


def _to_json(record: MemberRecord) -> dict[str, Any]:
    claimed = {"wish": record.wish, "session": record.session.hex(), "came_from": record.came_from}
    return _described(record.member) | claimed | {"transport": record.transport}


def _from_json(fields: Mapping[str, Any], now: float) -> MemberRecord:
    member = Member(**{name: fields[name] for name in _FIELDS})
    session = bytes.fromhex(fields["session"])
    return MemberRecord(member, fields["wish"], session, fields["came_from"], fields["transport"], now, now, told=True)
