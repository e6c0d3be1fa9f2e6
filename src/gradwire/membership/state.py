"""The membership of a job as a state machine: claims, deaths and the time come in, answers go out.

    register(claim)  →  Waiting    registered; the reason says what it waits for
                        Refusal    turned away, with the reason
                        Assembly   the members of the next generation, and its own rank

A member that waits holds its place by asking again; a place that nobody has asked for in `LAPSE` seconds is free, and a
place that is held is never given to anybody else. The first generation forms when `start` members have come. In a
static job that is all: its members may ask for it again, everybody else is refused.

An elastic job goes on. A member of the present generation that registers for a newer one has come *back*; everybody
else stands in *line*. The next generation forms when each member of the present one is back or *out*: it left, it died,
its lease ran out, or those who are back could not reach it. Survivors keep their order, those in line follow, and the
size stays between `minimum` and `maximum`.

No I/O, no clock, no locks. Time in which nothing came in, not even a `tick`, was this machine's own pause: nobody's
lease runs out for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import islice
from typing import Any

from gradwire.membership import entry
from gradwire.membership.answers import (
    Cause,
    Change,
    CheckpointStatus,
    Claim,
    Kind,
    News,
    Outcome,
    Refusal,
    Waiting,
)
from gradwire.membership.checkpoints import Checkpoints
from gradwire.membership.election import cut_off, missing, seated
from gradwire.membership.members import Assembly, Member

LAPSE = 5.0  # seconds; much longer than the pause between two claims of a waiting member
PATIENCE = 30.0  # seconds without a newcomer, after which a first generation makes do with the minimum
TICK = 1.0  # seconds between two ticks at most
STALL = 2.0  # seconds between two events; what is beyond counts for nobody
OUTNUMBERED = 1.0  # seconds in which those whom a minority calls lost can come and say otherwise
REST = 5.0  # seconds before a member that others could not reach may join again; doubled each time
LONGEST_REST = 300.0
_CLOSE = 1e-6  # seconds; a deadline so near has been reached: sums of floats are not exact

_WHY: dict[Cause, str] = {
    "left": "left",
    "gone": "died",
    "silent": "was not heard of for the time of its lease, and is struck off",
    "accused": "could not be reached by others, and is struck off",
    "replaced": "asks anew without having been told of its place",
}


@dataclass(slots=True)
class _Place:
    """Of one that waits."""

    claim: Claim
    asked: float
    told: bool = False
    complaints: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Seat:
    """Of one that is in the present generation; `claimed` is the member as it described itself."""

    claimed: Member
    member: Member
    session: bytes
    asked: float
    heard: float
    told: bool = False


@dataclass
class Membership:
    """Who is in the job. Every method that takes the time is an event; `changes` tells what came of them."""

    job: str
    run: bytes
    _: KW_ONLY
    start: int
    minimum: int | None = None
    maximum: int | None = None
    lease: float = 10.0
    settle: float = 0.1
    generation: int = field(default=0, init=False)
    _seats: dict[str, _Seat] = field(default_factory=dict, init=False)  # the present generation, in rank order
    _members: tuple[Member, ...] = field(default=(), init=False)
    _out: dict[str, Cause] = field(default_factory=dict, init=False)  # of its members
    _back: dict[str, _Place] = field(default_factory=dict, init=False)
    _line: dict[str, _Place] = field(default_factory=dict, init=False)  # in the order of arrival
    _rests: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)  # by id: how long, until when
    _checkpoints: Checkpoints = field(default_factory=Checkpoints, init=False)
    _changes: list[Change] = field(default_factory=list, init=False)
    _stopped: str | None = field(default=None, init=False)
    _now: float | None = field(default=None, init=False)  # of the last event
    _paused: float = field(default=0.0, init=False)  # seconds that did not count
    _stirred: float = field(default=0.0, init=False)  # when somebody last came, went or complained
    _arrived: float = field(default=0.0, init=False)  # when somebody new last came
    _places_until: float = field(default=0.0, init=False)  # no place lapses before
    _leases_until: float = field(default=0.0, init=False)  # no lease runs out before

    def __post_init__(self) -> None:
        entry.check_job(self.job, self.run, self.start, self.smallest, self.largest)

    @property
    def elastic(self) -> bool:
        return self.minimum is not None or self.maximum is not None

    @property
    def smallest(self) -> int:
        return self.start if self.minimum is None else self.minimum

    @property
    def largest(self) -> int:
        return self.start if self.maximum is None else self.maximum

    @property
    def members(self) -> tuple[Member, ...]:
        """Of the present generation, in rank order; some may be out already."""
        return self._members

    @property
    def waiting(self) -> int:
        return len(self._back) + len(self._line)

    # -- events

    def register(self, claim: Claim, now: float) -> Outcome:
        """Claim a place, or claim it again. Whoever is refused has changed nothing."""
        self._advance(now)
        reason = self._objection(claim)
        if reason is not None:
            return Refusal(reason)
        if self._stopped is None and not self._seated(claim):
            self._take_place(claim)
        return self.outcome(claim, now)

    def outcome(self, claim: Claim, now: float) -> Outcome:
        """The present answer to a claim that was not refused."""
        self._advance(now)
        self._go_on()
        name = claim.member.id
        if self._seated(claim):
            seat = self._seats[name]
            seat.asked = seat.heard = self._time
            seat.told = True
            return Assembly(self.job, self.generation, seat.member.rank or 0, self._members, self.run)
        place = self._back.get(name) or self._line.get(name)
        if self._stopped is not None:
            if place is not None and place.claim.session == claim.session:
                place.told = True
            return Refusal(self._stopped)
        if not self.generation:
            gaps = missing([place.claim.member for place in self._line.values()], self.start)
            return Waiting(gaps, self._reason(name))
        return Waiting((), self._reason(name))

    def withdraw(self, claim: Claim) -> Member | None:
        """The process behind a claim is gone while it waited: frees its place, unless it has claimed again since."""
        name = claim.member.id
        place = self._back.get(name) or self._line.get(name)
        if place is None or (place.claim.session, place.claim.sequence) != (claim.session, claim.sequence):
            return None
        self._free(name, "went away while it waited")
        return place.claim.member

    def leave(self, member: Member, now: float) -> bool:
        """A member takes its leave; False if there is none that is exactly this process."""
        self._advance(now)
        name = member.id
        place = self._back.get(name) or self._line.get(name)
        seat = None if name in self._out else self._seats.get(name)
        known = place.claim.member if place is not None else seat.member if seat is not None else None
        if known is None or not entry.same_process(known, member):
            return False
        self._end(name, "left")
        self._go_on()
        return True

    def gone(self, names: Iterable[str], now: float) -> None:
        """Somebody who must know saw these processes die."""
        self._advance(now)
        for name in names:
            self._end(name, "gone")
        self._go_on()

    def beat(self, names: Iterable[str], now: float) -> News:
        """These members live: their leases begin anew."""
        self._advance(now)
        for name in names:
            seat = self._seats.get(name)
            if seat is not None:
                seat.heard = self._time
                self._reinstate(name)
        self._go_on()
        return self.news()

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._advance(now)
        self._go_on()

    def due(self) -> float | None:
        """When `tick` should be called at the latest; None if nothing waits for the time."""
        if self._now is None or not (self._line or self._back or (self._seats and self.elastic)):
            return None
        deadlines = [until for _, until in self._rests.values()]
        if not self.generation:
            deadlines.append(self._arrived + PATIENCE)
        elif not self._awaited():
            deadlines.append(self._settled_at())
        ahead = (deadline for deadline in deadlines if not self._reached(deadline))
        return min([self._time + TICK, *ahead]) + self._paused

    def news(self) -> News:
        room = self.largest - (len(self._seats) - len(self._out))
        joiners = sum(1 for _ in islice(self._ready(), room)) if self.generation and self.elastic else 0
        evicted = tuple(name for name, cause in self._out.items() if cause != "left")
        return News(self.generation, joiners, evicted, self._checkpoints.epoch, bool(self._back))

    def stop(self, reason: str) -> None:
        """Nobody gets in any more; those who wait are refused for `reason`."""
        self._stopped = reason

    def uninformed(self, now: float) -> bool:
        """Whether a member that still asks has not been told how it ended."""
        self._advance(now)
        asking: list[_Seat | _Place] = [*self._seats.values(), *self._line.values(), *self._back.values()]
        return any(not one.told and not self._reached(one.asked + LAPSE) for one in asking)

    # -- checkpoints

    def start_checkpoint(self, epoch: int, name: str, now: float) -> CheckpointStatus | Refusal:
        """A worker begins the checkpoint of `epoch`, or finds it begun."""
        return self._checkpoint(epoch, name, now, ended=False)

    def end_checkpoint(self, epoch: int, name: str, now: float) -> CheckpointStatus | Refusal:
        """A worker has written its part. May be asked again to see how far the others are."""
        return self._checkpoint(epoch, name, now, ended=True)

    def _checkpoint(self, epoch: int, name: str, now: float, *, ended: bool) -> CheckpointStatus | Refusal:
        self._advance(now)
        self._go_on()
        live = self._live()
        if name not in live:
            return Refusal(f"{name!r} is not a live member of generation {self.generation}")
        before = self._checkpoints.snapshot()
        status = self._checkpoints.report(epoch, name, live) if ended else self._checkpoints.begin(epoch, live)
        if self._checkpoints.snapshot() != before:
            self._note("checkpoint", name, f"checkpoint of epoch {epoch}: {'written' if ended else 'begun'} by {name}")
        return status

    # -- what lasts

    def changes(self) -> list[Change]:
        """What happened since this was last asked."""
        changes, self._changes = self._changes, []
        return changes

    def snapshot(self) -> dict[str, Any]:
        """All that a restarted coordinator must know, in JSON's types. Whoever waits asks again, and is not in it."""
        return {
            "job": self.job,
            "run": self.run.hex(),
            "start": self.start,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "lease": self.lease,
            "settle": self.settle,
            "generation": self.generation,
            "members": [entry.to_json(seat.member, seat.claimed.rank, seat.session) for seat in self._seats.values()],
            "out": dict(self._out),
            "checkpoints": self._checkpoints.snapshot(),
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any], now: float) -> Membership:
        """A membership that goes on from `snapshot`; its live members get a fresh lease."""
        names = ("start", "minimum", "maximum", "lease", "settle")
        membership = cls(snapshot["job"], bytes.fromhex(snapshot["run"]), **{name: snapshot[name] for name in names})
        membership._advance(now)
        membership.generation = snapshot["generation"]
        for member, claimed, session in map(entry.from_json, snapshot["members"]):
            membership._seats[member.id] = _Seat(claimed, member, session, now, now, told=True)
        membership._members = tuple(seat.member for seat in membership._seats.values())
        membership._out = dict(snapshot["out"])
        membership._checkpoints = Checkpoints.restore(snapshot["checkpoints"])
        membership._stirred = membership._arrived = now
        membership._leases_until = now + membership.lease
        return membership

    # -- who may come in

    def _seated(self, claim: Claim) -> bool:
        """Whether the claim is of a member of the present generation that asks for this very one (again)."""
        seat = self._seats.get(claim.member.id)
        held = seat is not None and seat.session == claim.session and claim.generation < self.generation
        return held and not (self.elastic and claim.member.id in self._out)

    def _survives(self, claim: Claim) -> bool:
        """Whether the claim is of a member of the present generation that asks for the next one."""
        seat = self._seats.get(claim.member.id)
        if seat is None or claim.generation != self.generation or not entry.same_process(seat.member, claim.member):
            return False
        return self._out.get(claim.member.id, "silent") == "silent"

    def _objection(self, claim: Claim) -> str | None:
        return (
            entry.nonsense(claim)
            or entry.disagreement(claim, self.job, self.start)
            or self._fence(claim)
            or self._conflict(claim)
        )

    def _fence(self, claim: Claim) -> str | None:
        if claim.generation > self.generation:
            return (
                f"{claim.member} comes from generation {claim.generation}, and this coordinator knows of "
                f"{self.generation}: was it started anew without its journal?"
            )
        if claim.generation and not self.elastic:
            return "this job is static: it has one generation; start it with a minimum size to go on after a loss"
        return None

    def _conflict(self, claim: Claim) -> str | None:
        member = claim.member
        seat = self._seats.get(member.id)
        if seat is not None and not (self.elastic and member.id in self._out):
            if self._seated(claim):
                return None if seat.claimed == member else f"{seat.member} came back as something else, {member}"
            if not (self.elastic and entry.same_process(seat.member, member)):
                return f"the id {member.id!r} is taken by {seat.member}"
        place = self._back.get(member.id) or self._line.get(member.id)
        if place is not None:
            known = place.claim.member
            if place.claim.session == claim.session:
                return None if known == member else f"{known} came back as something else, {member}"
            return (
                None
                if self.elastic and entry.same_process(known, member)
                else f"the id {member.id!r} is taken by {known}"
            )
        return self._rank_taken(member)

    def _rank_taken(self, member: Member) -> str | None:
        if self.generation and self.elastic:
            return None  # a wish for the first generation only
        if self.generation and member.rank is None:
            return "all ranks of this job are taken"
        holders = self._members or (place.claim.member for place in self._line.values())
        holder = next((holder for holder in holders if member.rank is not None and holder.rank == member.rank), None)
        return None if holder is None else f"rank {member.rank} is taken by {holder}"

    # -- places

    def _take_place(self, claim: Claim) -> None:
        name = claim.member.id
        if self._survives(claim):
            self._reinstate(name)
            self._seats[name].heard = self._time
            self._line.pop(name, None)
            places, lost = self._back, frozenset(claim.lost) & self._seats.keys() - {name}
        else:
            if name in self._seats and name not in self._out:
                self._strike(name, "replaced")
            places, lost = self._line, frozenset()
        place = places.get(name)
        if place is None:
            place = places[name] = _Place(claim, self._time)
            self._arrived = self._time
            self._note(
                "came", name, f"{claim.member} has come" + (" back" if places is self._back else ""), lasting=False
            )
            self._stir(places)
        elif place.complaints != lost:
            self._stir(places)
        place.claim, place.asked, place.complaints = claim, self._time, lost

    def _stir(self, places: dict[str, _Place]) -> None:
        """Those who are back do not wait for comings and goings in the line; if nobody is, the line settles too."""
        if places is self._back or not self._back:
            self._stirred = self._time

    def _free(self, name: str, why: str) -> None:
        places = self._back if name in self._back else self._line
        place = places.pop(name, None)
        if place is not None:
            self._stir(places)
            self._note("went", name, f"{place.claim.member} {why}", lasting=False)

    def _end(self, name: str, cause: Cause) -> None:
        """A process is no more, wherever it was."""
        self._free(name, _WHY[cause])
        self._rests.pop(name, None)
        if name in self._seats and self._out.get(name, "silent") == "silent":
            self._strike(name, cause)

    def _strike(self, name: str, cause: Cause) -> None:
        """A member is out of the present generation."""
        self._back.pop(name, None)
        self._out[name] = cause
        self._stirred = self._time
        self._seats[name].told = True
        self._note(cause, name, f"{self._seats[name].member} {_WHY[cause]}")
        self._settle_checkpoint()

    def _reinstate(self, name: str) -> None:
        """Whoever was only silent, and is heard of before the others went on without it, is in again."""
        if self._out.get(name) == "silent":
            del self._out[name]
            self._stirred = self._time
            self._note("returned", name, f"{self._seats[name].member} is heard of again")

    def _note(self, kind: Kind, name: str | None, text: str, *, lasting: bool = True) -> None:
        self._changes.append(Change(kind, self.generation, name, text, lasting))

    def _live(self) -> dict[str, _Seat]:
        return {name: seat for name, seat in self._seats.items() if name not in self._out}

    def _settle_checkpoint(self) -> None:
        if self._checkpoints.epoch is not None and self._checkpoints.settle(self._live()):
            self._note("checkpoint", None, f"the checkpoint of epoch {self._checkpoints.last} is complete")

    # -- time

    @property
    def _time(self) -> float:
        return (self._now or 0.0) - self._paused

    def _reached(self, deadline: float) -> bool:
        return self._time >= deadline - _CLOSE

    def _advance(self, now: float) -> None:
        if self._now is None:
            self._now = now
        self._paused += max(0.0, now - self._now - STALL)
        self._now = max(self._now, now)
        if self._reached(self._places_until):
            for places in (self._back, self._line):
                for name in [name for name, place in places.items() if self._reached(place.asked + LAPSE)]:
                    self._free(name, "no longer asks")
            asked = [place.asked for places in (self._back, self._line) for place in places.values()]
            self._places_until = min(asked, default=self._time) + LAPSE
        if self.elastic and self._reached(self._leases_until):
            holders = {name: seat for name, seat in self._live().items() if name not in self._back}
            for name in [name for name, seat in holders.items() if self._reached(seat.heard + self.lease)]:
                self._strike(name, "silent")
            self._leases_until = min((seat.heard for seat in self._live().values()), default=self._time) + self.lease

    # -- the next generation

    def _go_on(self) -> None:
        """Form the next generation if it is time."""
        if self._stopped is not None:
            return
        if not self.generation:
            few = self.elastic and len(self._line) >= self.smallest and self._reached(self._arrived + PATIENCE)
            if len(self._line) >= self.start or few:
                self._form(seated([place.claim.member for place in self._line.values()]))
        elif self.elastic and not self._awaited():
            self._regroup()

    def _absent(self) -> list[str]:
        """Those whom somebody who is back could not reach, and who have not come back themselves."""
        accused = set[str]().union(*(place.complaints for place in self._back.values() if place.complaints))
        return [name for name in accused if name not in self._back and name not in self._out]

    def _awaited(self) -> int:
        """How many members of the present generation may still come back."""
        return len(self._seats) - len(self._out) - len(self._back) - len(self._absent())

    def _settled_at(self) -> float:
        """When those who are back, or the line if nobody is, can go on without those who are absent."""
        if not self._back:
            return self._stirred + (0.0 if len(self._line) >= self.start else self.settle)
        absent = len(self._absent())
        if not absent:
            return self._stirred
        return self._stirred + (self.settle if len(self._back) > absent else max(self.settle, OUTNUMBERED))

    def _ready(self) -> Iterator[str]:
        """Those in line who may join, in their order."""
        return (name for name in self._line if name not in self._rests or self._reached(self._rests[name][1]))

    def _regroup(self) -> None:
        if not self._reached(self._settled_at()):
            return
        for name in self._absent():
            self._strike(name, "accused")
        order = [name for name in self._seats if name in self._back]
        for name in cut_off(order, {name: self._back[name].complaints for name in order}):
            place = self._line[name] = self._back[name]
            place.complaints = frozenset()
            self._let_rest(name)
            self._strike(name, "accused")
        survivors = [name for name in order if name in self._back]
        joiners = list(islice(self._ready(), self.largest - len(survivors)))
        if len(survivors) + len(joiners) >= self.smallest:
            self._form(survivors + joiners)

    def _let_rest(self, name: str) -> None:
        """A link that is cut stays cut for a while: without a rest, the others would regroup again and again for it."""
        self._rests = {n: rest for n, rest in self._rests.items() if not self._reached(rest[1] + LONGEST_REST)}
        length = min(LONGEST_REST, 2 * self._rests[name][0]) if name in self._rests else REST
        self._rests[name] = (length, self._time + length)

    def _form(self, order: list[str]) -> None:
        places = {name: self._back.get(name) or self._line[name] for name in order}
        self.generation += 1
        self._seats, self._out = {}, {}
        for rank, (name, place) in enumerate(places.items()):
            claimed = place.claim.member
            member = replace(claimed, rank=rank)
            self._seats[name] = _Seat(claimed, member, place.claim.session, place.asked, self._time)
            self._back.pop(name, None)
            self._line.pop(name, None)
        self._members = tuple(seat.member for seat in self._seats.values())
        self._note("formed", None, f"generation {self.generation} of job {self.job} has {len(order)} members")
        self._settle_checkpoint()

    # -- what those who wait are told

    def _reason(self, name: str) -> str:
        if not self.generation:
            enough = f"; {self.smallest} are enough if nobody comes for {PATIENCE:g} s"
            return f"{len(self._line)} of {self.start} members are here" + (
                enough if self.smallest < self.start else ""
            )
        live, length_until = len(self._seats) - len(self._out), self._rests.get(name)
        if name not in self._back:
            if length_until is not None and not self._reached(length_until[1]):
                return f"others could not reach it; it may join again in {length_until[1] - self._time:.0f} s"
            ahead = next((ahead for ahead, other in enumerate(self._line) if other == name), len(self._line))
            if live + ahead >= self.largest:
                turn = "you are first in line" if ahead == 0 else f"{ahead} are before you in line"
                return f"the job is full: {live} of at most {self.largest}; {turn}"
            if live and not self._back:
                return f"generation {self.generation} is at work with {live} members; others join between two steps"
        unaccounted = self._seats.keys() - self._out.keys() - self._back.keys() - set(self._absent())
        if unaccounted:
            names = sorted((self._seats[name].member for name in unaccounted), key=lambda member: member.rank or 0)
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            return f"of generation {self.generation}, {', '.join(map(str, names[:4]))}{more} have not come back"
        return f"{len(self._back) + sum(1 for _ in self._ready())} of at least {self.smallest} members are here"
