"""Stores where each member is: in the current generation, returning from it, or queued. It contains no rules.

A *returning* member is one of the current generation that has registered for the next one. All other processes that
wait are in the *queue*. A *removed* member is still listed in the current generation, but no longer counts in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradwire.membership.coordinator.clock import Clock
from gradwire.membership.types import Cause, Change, Claim, Kind, Member

LAPSE = 5.0  # seconds without a claim after which a waiting member loses its place; much more than between two claims
LAPSE_FOR_EACH = 0.005  # seconds per waiting member, if that gives more: with many of them, each asks less often
BACKOFF = 5.0  # seconds before a member that others could not reach may join again; doubled each time
LONGEST_BACKOFF = 300.0

_WHY: dict[Cause, str] = {
    "left": "has left",
    "gone": "has died",
    "silent": "sent no heartbeat during its lease",
    "accused": "could not be reached by other members",
    "replaced": "was replaced by a new registration of its id",
}


@dataclass(slots=True)
class Place:
    """The place of a process that waits."""

    claim: Claim
    last_asked: float
    informed: bool = False  # whether it has received its final answer
    lost: frozenset[str] = frozenset()  # members that it could not reach


@dataclass(slots=True)
class MemberRecord:
    """The record of a member of the current generation, with the lasting parts of its claim."""

    member: Member  # with the assigned rank
    wanted_rank: int | None  # the rank in its claim
    session: bytes
    came_from: int  # the generation that it was in before
    transport: str  # the transport in its claim
    last_asked: float
    last_seen: float
    informed: bool = False

    def claimed(self) -> Member:
        """Return the member as described in its claim."""
        return replace(self.member, rank=self.wanted_rank)


@dataclass(frozen=True, slots=True)
class DroppedMember:
    """A member of `generation` that may be alive, although the next generation formed without it."""

    member: Member
    generation: int
    since: float


class Roster:
    """Members by id: `records` in rank order, of which some are `removed`; `returning` and `queue` by order of arrival.

    Values that every event needs are kept up to date instead of being computed: a job may have thousands of members.
    """

    def __init__(self, clock: Clock) -> None:
        self.generation = 0
        self.records: dict[str, MemberRecord] = {}
        self.members: tuple[Member, ...] = ()
        self.removed: dict[str, Cause] = {}
        self.returning: dict[str, Place] = {}
        self.over = False  # a member has returned: the current generation has ended
        self.queue: dict[str, Place] = {}
        self.dropped: dict[str, DroppedMember] = {}  # kept for some minutes
        self.expected: dict[str, None] = {}  # members that are neither removed nor returning
        self.requires_shm = False  # a member of the current generation requires shared memory
        self.last_arrival = 0.0  # the time of the last new claim
        self.last_change = 0.0  # the time of the last event that affects the next generation
        self.changes: list[Change] = []
        self._clock = clock
        self._wanted_ranks: list[int | None] | None = None  # cached until the queue changes
        self._reported_lost: Counter[str] = Counter()  # how many returning members could not reach each member
        self._backoffs: dict[str, tuple[float, float]] = {}  # by id: length and end
        self._joined: set[str] = set()  # members that joined without the state; not known after a restart
        self._lapse_at = 0.0  # no place lapses before this time
        self._silent_at = 0.0  # no lease expires before this time

    # -- where each member is

    def place(self, name: str) -> Place | None:
        return self.returning.get(name) or self.queue.get(name)

    @property
    def uses_data_plane(self) -> bool | None:
        """Whether the members use gradwire's data plane: all do or none does. None if there are no members."""
        if self.records:
            return bool(next(iter(self.records.values())).transport)
        first = next(iter(self.queue.values()), None)
        return None if first is None else bool(first.claim.transport)

    def live(self) -> dict[str, MemberRecord]:
        return {name: record for name, record in self.records.items() if name not in self.removed}

    def alive(self, name: str) -> bool:
        return name in self.records and name not in self.removed

    def returnable(self, name: str) -> bool:
        """Return whether this is a member of the current generation that is not removed, or only because of silence."""
        return name in self.records and self.removed.get(name, "silent") == "silent"

    def known(self, name: str) -> Member | None:
        """Return the member that has this id now, in the generation or waiting."""
        place = self.place(name)
        if place is not None:
            return place.claim.member
        return self.records[name].member if self.returnable(name) else None

    def size(self) -> int:
        """Return how many members of the current generation are not removed."""
        return len(self.records) - len(self.removed)

    def unreachable(self) -> list[str]:
        """Return the members, by rank, that a returning member could not reach and that do not return themselves."""
        names = [name for name in self._reported_lost if name in self.expected]
        return sorted(names, key=lambda name: self.records[name].member.rank or 0)

    def awaited(self) -> int:
        """Return how many members of the current generation may still return."""
        return len(self.expected) - len(self.unreachable())

    def ready(self) -> Iterator[str]:
        """Yield the queued processes that may join now, in their order."""
        return (name for name in self.queue if not self.backoff(name))

    def backoff(self, name: str) -> float:
        """Return the seconds before a member may join again."""
        _, until = self._backoffs.get(name, (0.0, 0.0))
        return 0.0 if self._clock.reached(until) else until - self._clock.time

    def dropped_again(self, name: str) -> bool:
        """Return whether a member is in a back-off that is not its first."""
        return self.backoff(name) > 0 and self._backoffs[name][0] > BACKOFF

    def backoff_ends(self) -> list[float]:
        return [until for _, until in self._backoffs.values()]

    def maybe_alive(self) -> list[str]:
        """Return the removed members of the current generation whose processes may be alive."""
        return [name for name, cause in self.removed.items() if cause in ("silent", "accused")]

    def wanted_ranks(self) -> list[int | None]:
        """Return the ranks that queued processes asked for."""
        if self._wanted_ranks is None:
            self._wanted_ranks = [place.claim.member.rank for place in self.queue.values()]
        return self._wanted_ranks

    def uninformed(self) -> bool:
        """Return whether a process that still asks has not received its final answer."""
        asking: list[MemberRecord | Place] = [*self.records.values(), *self.returning.values(), *self.queue.values()]
        return any(not entry.informed and not self._clock.reached(entry.last_asked + LAPSE) for entry in asking)

    # -- changes for processes that wait

    def place_claim(self, claim: Claim, places: dict[str, Place], lost: frozenset[str] = frozenset()) -> None:
        """Give a claim a place in `places` (`returning` or `queue`), or renew the place that it has."""
        name, now = claim.member.id, self._clock.time
        place = places.get(name)
        if place is None:
            place = places[name] = Place(claim, now, lost=lost)
            self.last_arrival = now
            self._mark_changed(places)
            returns = places is self.returning
            text = f"{claim.member} has registered{' for the next generation' if returns else ''}"
            self.note("came", name, text, lasting=returns and not self.over)
            self.over = self.over or returns
            if returns:
                self.expected.pop(name, None)
                self._reported_lost.update(lost)
        elif place.claim.session != claim.session or place.claim.sequence <= claim.sequence:
            if place.lost != lost:
                self._mark_changed(places)
                self._withdraw_lost(place)
                self._reported_lost.update(lost)
            place.claim, place.lost = claim, lost
        place.last_asked = now

    def free_place(self, name: str, why: str) -> None:
        """Free the place of a process that no longer waits."""
        place = self._pop_returning(name)
        if place is not None:
            self.last_change = self._clock.time
            self.expected[name] = None
        else:
            place = self.queue.pop(name, None)
            self._mark_changed(self.queue)
        if place is not None:
            self.note("went", name, f"{place.claim.member} {why}", lasting=False)

    def drop_lapsed(self) -> None:
        if not self._clock.reached(self._lapse_at):
            return
        lapse = max(LAPSE, LAPSE_FOR_EACH * (len(self.returning) + len(self.queue)))
        for name in [name for name, place in self._waiting() if self._clock.reached(place.last_asked + lapse)]:
            self.free_place(name, "stopped asking for a place")
        self._lapse_at = LAPSE + min((place.last_asked for _, place in self._waiting()), default=self._clock.time)

    def move_to_queue(self, name: str) -> None:
        """Move a returning member that others cannot reach to the end of the queue.

        A broken link often stays broken for a while. Without a back-off, all members would form one generation after
        another because of it.
        """
        self.queue[name] = self.returning[name]
        self._pop_returning(name)
        self._start_backoff(name)
        self.remove(name, "accused")

    def remove_unreachable(self, name: str) -> None:
        """Remove a member that others cannot reach and that does not return.

        If the member has only just joined, it gets a back-off. Otherwise it could break one generation after another.
        """
        if name in self._joined:
            self._start_backoff(name)
        self.remove(name, "accused")

    # -- changes for members of the current generation

    def remove(self, name: str, cause: Cause) -> None:
        """Remove a member from the current generation."""
        self._pop_returning(name)
        self.expected.pop(name, None)
        self.removed[name] = cause
        self.records[name].informed = True
        self.last_change = self._clock.time
        self.note(cause, name, f"{self.records[name].member} {_WHY[cause]}")

    def end(self, name: str, cause: Cause) -> None:
        """Record that a process has ended or left, wherever it was."""
        self.free_place(name, _WHY[cause])
        self._backoffs.pop(name, None)
        dropped = self.dropped.pop(name, None)
        if dropped is not None:  # this must be in the journal: a restarted coordinator would wait for the member
            self.note("went", name, f"{dropped.member}, which had been dropped before, {_WHY[cause]}")
        if self.returnable(name):
            self.remove(name, cause)

    def mark_alive(self, name: str) -> None:
        """Record that a member is alive. If it was removed only because of silence, it is no longer removed."""
        record = self.records.get(name)
        if record is None:
            return
        record.last_seen = self._clock.time
        if self.removed.get(name) == "silent":
            del self.removed[name]
            self.expected[name] = None
            self.last_change = self._clock.time
            self.note("returned", name, f"{record.member} is no longer silent")

    def silent(self, lease: float) -> list[str]:
        """Return the members whose lease has expired. Returning members need no lease, because they repeat claims."""
        if not self._clock.reached(self._silent_at):
            return []
        live = self.live()
        silent = [
            n for n, record in live.items() if n not in self.returning and self._clock.reached(record.last_seen + lease)
        ]
        self._silent_at = lease + min(
            (record.last_seen for name, record in live.items() if name not in silent), default=self._clock.time
        )
        return silent

    def record(self, order: Sequence[str]) -> None:
        """Begin the next generation with these members, in this order. Other queued processes stay in the queue."""
        places = {name: self.returning.get(name) or self.queue[name] for name in order}
        kept = {name: one for name, one in self.dropped.items() if not self._clock.reached(one.since + LONGEST_BACKOFF)}
        kept |= {
            name: DroppedMember(self.records[name].member, self.generation, self._clock.time)
            for name in self.maybe_alive()
        }
        self.dropped = {name: one for name, one in kept.items() if name not in places}
        claims = {name: place.claim for name, place in places.items()}
        self._joined = {n for n, one in claims.items() if one.lacks_state or one.generation < self.generation}
        self.generation += 1
        self.records, self.removed, self.over = {}, {}, False
        for rank, (name, place) in enumerate(places.items()):
            claim = place.claim
            member = replace(claim.member, rank=rank)
            self.records[name] = MemberRecord(
                member,
                claim.member.rank,
                claim.session,
                claim.generation,
                claim.transport,
                place.last_asked,
                self._clock.time,
            )
            self._pop_returning(name)
            self.queue.pop(name, None)
        self._update_members()

    # -- the log and the journal

    def note(self, kind: Kind, name: str | None, text: str, *, lasting: bool = True) -> None:
        self.changes.append(Change(kind, self.generation, name, text, lasting))

    def snapshot(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "members": [_to_json(record) for record in self.records.values()],
            "out": dict(self.removed),
            "over": self.over,
            "outside": [[_described(one.member), one.generation] for one in self.dropped.values()],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        now = self._clock.time
        self.generation = snapshot["generation"]
        self.records = {fields["id"]: _from_json(fields, now) for fields in snapshot["members"]}
        self.removed, self.over = dict(snapshot["out"]), snapshot["over"]
        dropped = [DroppedMember(Member(**fields), number, now) for fields, number in snapshot.get("outside", [])]
        self.dropped = {one.member.id: one for one in dropped}
        self._update_members()
        self.last_arrival = self.last_change = now

    def _start_backoff(self, name: str) -> None:
        self._backoffs = {
            n: backoff for n, backoff in self._backoffs.items() if not self._clock.reached(backoff[1] + LONGEST_BACKOFF)
        }
        length = min(LONGEST_BACKOFF, 2 * self._backoffs[name][0]) if name in self._backoffs else BACKOFF
        self._backoffs[name] = (length, self._clock.time + length)

    def _waiting(self) -> Iterator[tuple[str, Place]]:
        yield from self.returning.items()
        yield from self.queue.items()

    def _update_members(self) -> None:
        self.members = tuple(record.member for record in self.records.values())
        self.expected = dict.fromkeys(self.live())
        self.requires_shm = any(record.transport == "shm" for record in self.records.values())

    def _pop_returning(self, name: str) -> Place | None:
        place = self.returning.pop(name, None)
        if place is not None:
            self._withdraw_lost(place)
        return place

    def _withdraw_lost(self, place: Place) -> None:
        for name in place.lost:
            self._reported_lost[name] -= 1
            if not self._reported_lost[name]:
                del self._reported_lost[name]
        place.lost = frozenset()

    def _mark_changed(self, places: dict[str, Place]) -> None:
        """Record a change in `places`. While members return, changes of the queue do not delay the next generation."""
        self._wanted_ranks = None
        if places is self.returning or not self.returning:
            self.last_change = self._clock.time


_FIELDS = ("id", "rank", "host", "hostname", "pid", "address", "started")


def _described(member: Member) -> dict[str, Any]:
    return {name: getattr(member, name) for name in _FIELDS}


def _to_json(record: MemberRecord) -> dict[str, Any]:
    claimed = {"wish": record.wanted_rank, "session": record.session.hex(), "came_from": record.came_from}
    return _described(record.member) | claimed | {"transport": record.transport}


def _from_json(fields: Mapping[str, Any], now: float) -> MemberRecord:
    member = Member(**{name: fields[name] for name in _FIELDS})
    session = bytes.fromhex(fields["session"])
    return MemberRecord(
        member, fields["wish"], session, fields["came_from"], fields["transport"], now, now, informed=True
    )
