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
size stays between the minimum and the maximum.

No I/O, no clock, no locks: time is an argument. Whoever drives this calls `tick` when it is `due`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from gradwire.identity import next_run, replaces
from gradwire.membership.coordinator import admission_rules
from gradwire.membership.coordinator.admission_rules import Terms
from gradwire.membership.coordinator.checkpoints import Checkpoints
from gradwire.membership.coordinator.clock import Clock
from gradwire.membership.coordinator.election import cut_off, initial_order, missing
from gradwire.membership.coordinator.roster import Roster
from gradwire.membership.types import Assembly, Change, CheckpointStatus, Claim, Member, News, Outcome, Refusal, Waiting

NEWCOMER_SECONDS = 30.0  # seconds without a newcomer, after which a first generation makes do with the minimum
TICK = 1.0  # seconds between two ticks at most
FINISHED = "the work of this job is done; there is nothing left to join"
MINORITY_GRACE = 1.0  # seconds in which those whom no majority calls lost can come and say otherwise
SILENT_GRACE = (
    60.0  # seconds beyond its lease in which a silent member may still be at work, where nobody else knows the state
)


class Membership:
    """Who is in the job. Each method that takes the time is an event; `changes` tells what came of them."""

    def __init__(
        self,
        job: str,
        run: bytes,
        *,
        start: int,
        minimum: int | None = None,
        maximum: int | None = None,
        lease: float = 10.0,
        settle: float = 0.1,
    ) -> None:
        self.terms = Terms(job, run, start=start, minimum=minimum, maximum=maximum, lease=lease, settle=settle)
        self._clock = Clock()
        self._roster = Roster(self._clock)
        self._checkpoints = Checkpoints()
        self._stopped: str | None = None
        self._finished = False

    @property
    def generation(self) -> int:
        """The present one; 0 before the first."""
        return self._roster.generation

    @property
    def members(self) -> tuple[Member, ...]:
        """Of the present generation, in rank order. Some may be out already."""
        return self._roster.members

    @property
    def roster(self) -> Roster:
        """Where each member is; to be read, never changed."""
        return self._roster

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._roster.back) + len(self._roster.line)

    # -- those who wait

    def register(self, claim: Claim, now: float) -> Outcome:
        """Claim a place, or claim it again. Whoever is refused has changed nothing."""
        self._advance(now)
        reason = admission_rules.objection(claim, self.terms, self._roster)
        if reason is not None:
            return Refusal(reason, other_run=admission_rules.is_of_another_run(claim, self.terms, self._roster))
        if self._finished and not admission_rules.survives(claim, self._roster):
            return Refusal(FINISHED, finished=True)
        if self._stopped is None and (
            self._missed(claim) or not admission_rules.is_current_member(claim, self.terms, self._roster)
        ):
            self._admit(claim)
        return self.outcome(claim, now)

    def outcome(self, claim: Claim, now: float) -> Outcome:
        """The present answer to a claim that was not refused."""
        self.tick(now)
        name, roster = claim.member.id, self._roster
        if name not in roster.back and admission_rules.is_current_member(claim, self.terms, roster):
            record = roster.records[name]
            record.asked, record.told = self._clock.time, True
            roster.hear(name)
            rank, terms = record.member.rank or 0, self.terms
            previous = claim.run if replaces(terms.run, claim.run) else terms.previous_run
            return Assembly(terms.job, roster.generation, rank, roster.members, terms.run, previous_run=previous)
        if self._stopped is not None:
            place = roster.place(name)
            if place is not None and place.claim.session == claim.session:
                place.told = True
            return Refusal(self._stopped)
        if self._finished and name not in roster.back:
            return Refusal(FINISHED, finished=True)
        gaps = () if roster.generation else missing(roster.wishes(), self.terms.start)
        return Waiting(gaps, self._reason(name))

    def withdraw(self, claim: Claim) -> Member | None:
        """The process behind a claim went away while it waited: frees its place, unless it has claimed again since."""
        place = self._roster.place(claim.member.id)
        if place is None or (place.claim.session, place.claim.sequence) != (claim.session, claim.sequence):
            return None
        self._roster.free(claim.member.id, "went away while it waited")
        return place.claim.member

    def stop(self, reason: str) -> None:
        """Nobody gets in any more; those who wait are refused for `reason`."""
        self._stopped = reason

    def uninformed(self, now: float) -> bool:
        """Whether a member that still asks has not been told how it ended."""
        self._advance(now)
        return self._roster.uninformed()

    # -- those who are at work

    def leave(self, member: Member, now: float, *, finished: bool = False, run: bytes = b"") -> bool:
        """A member takes its leave; False if there is none that is exactly this process.

        With `finished` all work is done: nobody joins any more, who would begin it anew. The present members stay. Only
        a member of the present generation can know that.
        """
        self._advance(now)
        known = self._roster.known(member.id)
        other = self._of_another(run) and not replaces(self.terms.run, run)
        if known is None or not admission_rules.same_process(known, member) or other:
            return False
        self._roster.hear(member.id)
        self._finished = self._finished or (finished and self._roster.alive(member.id))
        self._roster.end(member.id, "left")
        self._go_on()
        return True

    def gone(self, names: Iterable[str], now: float, run: bytes = b"") -> None:
        """Somebody who must know saw these processes die. What is said of members of another `run` is ignored."""
        self._advance(now)
        for name in () if self._of_another(run) else names:
            self._roster.end(name, "gone")
        self._go_on()

    def heartbeat(self, names: Iterable[str], now: float, run: bytes = b"") -> News:
        """These members live: their leases begin anew, unless they are members of another `run`. An id that is no
        member is ignored, and the news says so: it may be about to become one, or is a member of another run."""
        self._advance(now)
        names = list(names)
        unknown = names if self._of_another(run) else [name for name in names if name not in self._roster.records]
        for name in set(names).difference(unknown):
            self._roster.hear(name)
        self._go_on()
        return replace(self.news(), unknown=tuple(unknown))

    def knows(self, name: str) -> bool:
        """Whether an id is that of a member of this run, of one that waits to be, or of one that was dropped and may
        come back."""
        roster = self._roster
        return name in roster.records or name in roster.outside or roster.place(name) is not None

    def _of_another(self, run: bytes) -> bool:
        return run not in (b"", self.terms.run)

    def news(self) -> News:
        roster = self._roster
        takes = self.terms.elastic and roster.generation and not self._finished
        room = self.terms.largest - roster.size() if takes else 0
        joiners = sum(1 for _ in islice(roster.ready(), room))
        evicted = tuple(name for name, cause in roster.out.items() if cause != "left")
        epoch = self._checkpoints.epoch
        size, run = roster.size(), self.terms.run
        return News(roster.generation, joiners, evicted, epoch, roster.over, size, self._finished, run)

    def start_checkpoint(self, epoch: int, name: str, now: float) -> CheckpointStatus | Refusal:
        """A worker begins the checkpoint of `epoch`, or finds it begun."""
        return self._checkpoint(epoch, name, now, "begun")

    def end_checkpoint(self, epoch: int, name: str, now: float) -> CheckpointStatus | Refusal:
        """A worker has written its part. May be asked again, to see how far the others are."""
        return self._checkpoint(epoch, name, now, "written")

    def _checkpoint(self, epoch: int, name: str, now: float, what: str) -> CheckpointStatus | Refusal:
        self.tick(now)
        if not self._roster.alive(name):
            return Refusal(f"{name!r} is no live member of generation {self.generation}")
        begin = what == "begun"
        if self._checkpoints.begin(epoch, self._roster.live()) if begin else self._checkpoints.report(epoch, name):
            self._roster.note("checkpoint", name, f"the checkpoint of epoch {epoch} was {what} by {name}")
        self._settle_checkpoint()
        return self._checkpoints.status(epoch, self._roster.alive)

    def _settle_checkpoint(self) -> None:
        if self._checkpoints.settle(self._roster.alive):
            self._roster.note("checkpoint", None, f"the checkpoint of epoch {self._checkpoints.last} is complete")

    # -- time

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._advance(now)
        self._go_on()

    def due(self) -> float | None:
        """When `tick` should be called at the latest; None if nothing waits for the time."""
        roster = self._roster
        if not (self.waiting or (self.terms.elastic and roster.generation)):
            return None
        deadlines = [roster.arrived + NEWCOMER_SECONDS, self._settled_at(), *roster.rests_until()]
        ahead = [deadline for deadline in deadlines if not self._clock.reached(deadline)]
        return self._clock.outside(min([self._clock.time + TICK, *ahead]))

    def _advance(self, now: float) -> None:
        self._clock.advance(now)
        self._roster.let_lapse()
        if self.terms.elastic:
            for name in self._roster.silent(self.terms.lease):
                self._roster.strike(name, "silent")

    # -- the next generation

    def _admit(self, claim: Claim) -> None:
        name, roster = claim.member.id, self._roster
        if self._missed(claim):
            roster.hear(name)
            roster.come(claim, roster.back)
        elif admission_rules.survives(claim, roster):
            roster.hear(name)
            roster.line.pop(name, None)
            roster.come(claim, roster.back, frozenset(claim.lost) & roster.records.keys() - {name})
        else:
            if roster.returnable(name):
                roster.strike(name, "replaced")
            for other in admission_rules.ousted(claim, roster):
                roster.free(other, "has no data address, and others of this job have one")
            roster.come(claim, roster.line)

    def _missed(self, claim: Claim) -> bool:
        """Whether a member asks for a generation that others are back from already: it is over, and the next is due."""
        roster = self._roster
        return self.terms.elastic and roster.over and admission_rules.is_current_member(claim, self.terms, roster)

    def _go_on(self) -> None:
        """After each event: form the next generation if it is time."""
        roster = self._roster
        self._settle_checkpoint()
        if self._stopped is not None:
            return
        if not roster.generation:
            few = len(roster.line) >= self.terms.smallest and self._clock.reached(roster.arrived + NEWCOMER_SECONDS)
            if few or len(roster.line) >= self.terms.start:
                self._form(initial_order([place.claim.member for place in roster.line.values()]))
        elif self.terms.elastic and not roster.awaited() and self._clock.reached(self._settled_at()):
            self._regroup()

    def _settled_at(self) -> float:
        """When it is time to go on without those who are absent, if nothing stirs until then."""
        roster = self._roster
        absent = len(roster.absent())
        if not roster.back:
            return roster.stirred + (0.0 if len(roster.line) >= self.terms.start else self.terms.settle)
        if not absent:
            return roster.stirred
        return roster.stirred + max(self.terms.settle, 0.0 if len(roster.back) > absent else MINORITY_GRACE)

    def _regroup(self) -> None:
        """Nobody is awaited any more: whoever cannot be reached goes, and if enough are left, they go on."""
        roster = self._roster
        for name in roster.absent():
            roster.strike_accused(name)
        order = [name for name in roster.records if name in roster.back]
        # Whoever stood still was missed, and is back: that keeps nobody apart. If something does, they say so again.
        back = {name for name in order if roster.back[name].claim.stood_still}
        complaints = {name: roster.back[name].complaints - back for name in order}
        strangers = {name for name in order if not self._knows(roster.back[name].claim)}
        for name in cut_off(order, complaints, strangers):
            roster.send_to_line(name)
        survivors = [name for name in order if name in roster.back]
        joiners = [] if self._finished else self._joiners(survivors)
        if joiners is not None and len(survivors) + len(joiners) >= self.terms.smallest:
            self._form(survivors + joiners)

    def _joiners(self, survivors: list[str]) -> list[str] | None:
        """Those in line for whom it is time, in their order; None if nobody can go on yet.

        Where no survivor knows the state, those in line who have been at work do, the last ones best: they are needed,
        rested or not, unless they were dropped again and again. If none of them is of the present generation, it must
        have ended: whoever of it is merely not heard of may work on out of our sight, and the others would begin anew
        beside it. So may those who were dropped before: they know an earlier state.
        """
        roster, room = self._roster, self.terms.largest - len(survivors)
        if any(self._knows(roster.back[name].claim) for name in survivors):
            return list(islice(roster.ready(), room))
        if self._out_of_sight() and not self._returned():
            return None
        worked = (name for name, place in roster.line.items() if place.claim.generation)
        known = [name for name in worked if not roster.dropped_again(name)]
        known.sort(key=lambda name: -roster.line[name].claim.generation)
        return [*known, *(name for name in roster.ready() if name not in known)][:room]

    def _knows(self, claim: Claim) -> bool:
        """Whether a member that is back has the state of the training: not if it joined, and was not handed it yet, or
        has not even heard that it was let in."""
        return not claim.stranger and self.generation - claim.generation <= 1

    def _returned(self) -> bool:
        """Whether somebody in line was at work in the present generation, and dropped from it."""
        return any(map(self._holds_state, self._roster.line))

    def _holds_state(self, name: str) -> bool:
        """Whether one that waits has the state of the present generation, back from it or dropped from it."""
        if name in self._roster.back:
            return self._knows(self._roster.back[name].claim)
        claim, record = self._roster.line[name].claim, self._roster.records.get(name)
        dropped = record is not None and admission_rules.same_process(record.member, claim.member)
        return dropped and claim.generation == self.generation and not claim.stranger

    def _out_of_sight(self) -> dict[Member, float]:
        """Members that may live, do not wait anew, and know more than those who wait, with the seconds after which they
        are given up: they are out of the present generation, or were dropped before."""
        roster = self._roster
        claims = [place.claim for place in roster.line.values()]
        known = max((claim.generation for claim in claims if not claim.stranger), default=0)
        since = {one.member: one.since for one in roster.outside.values() if one.generation > known}
        since |= {roster.records[name].member: roster.records[name].heard for name in roster.unseen()}
        left = {member: at + self.terms.lease + SILENT_GRACE - self._clock.time for member, at in since.items()}
        return {one: seconds for one, seconds in left.items() if seconds > 0 and roster.place(one.id) is None}

    def _form(self, order: list[str]) -> None:
        """Form the next generation. Where nobody in it holds the state of the present one, it begins a new run: members
        that were out of sight may have committed more, and must not come back into a history that differs."""
        roster = self._roster
        anew = roster.generation > 0 and not any(self._holds_state(name) for name in order)
        run = self.terms.run
        self.terms = replace(self.terms, run=next_run(run) if anew else run, previous_run=run if anew else b"")
        roster.record(order)
        for name in [name for name, place in roster.line.items() if anew and place.claim.generation]:
            roster.free(name, "is a member of the run before")
        text = f"generation {self.generation} of job {self.terms.job} has {len(order)} members"
        if anew:
            text += f", and begins run {self.terms.run.hex()}: nobody in it holds the state of the generation before"
        self._roster.note("formed", None, text)

    def _reason(self, name: str) -> str:
        """What a member waits for."""
        roster, terms = self._roster, self.terms
        if not roster.generation:
            enough = f"; {terms.smallest} are enough if nobody comes for {NEWCOMER_SECONDS:g} s"
            return f"{len(roster.line)} of {terms.start} members are here" + (
                enough if terms.smallest < terms.start else ""
            )
        if name not in roster.back:
            if roster.rest(name):
                return f"others could not reach it; it may join again in {roster.rest(name):.0f} s"
            ahead = next((ahead for ahead, other in enumerate(roster.ready()) if other == name), len(roster.line))
            if roster.size() + ahead >= terms.largest:
                turn = "you are first in line" if ahead == 0 else f"{ahead} are before you in line"
                return f"the job is full: {roster.size()} of at most {terms.largest}; {turn}"
            if roster.size() and not roster.back:
                at_work = f"generation {roster.generation} is at work with {roster.size()} members"
                return f"{at_work}; you join between two steps"
        if roster.awaited():
            absent = set(roster.absent())
            late = islice((name for name in roster.expected if name not in absent), 4)
            names = ", ".join(str(roster.records[name].member) for name in late)
            more = f" and {roster.awaited() - 4} more" if roster.awaited() > 4 else ""
            return f"waits for {names}{more} of generation {roster.generation} to come back"
        knowing = any(self._knows(place.claim) for place in roster.back.values())
        hidden = {} if knowing or self._returned() else self._out_of_sight()
        if hidden:
            who = ", ".join(map(str, islice(hidden, 4)))
            left = max(hidden.values())
            return f"waits {left:.0f} s to hear of {who}: nobody else knows the state of generation {roster.generation}"
        return f"{len(roster.back) + sum(1 for _ in roster.ready())} of at least {terms.smallest} members are here"

    # -- what lasts

    def changes(self) -> list[Change]:
        """What happened since this was last asked."""
        changes, self._roster.changes = self._roster.changes, []
        return changes

    def snapshot(self) -> dict[str, Any]:
        """All that a restarted coordinator must know, in JSON's types. Whoever waits asks again, and is not in it."""
        terms = {name: getattr(self.terms, name) for name in _TERMS}
        kept = {
            "run": self.terms.run.hex(),
            "previous_run": self.terms.previous_run.hex(),
            "checkpoints": self._checkpoints.snapshot(),
            "finished": self._finished,
        }
        return terms | kept | self._roster.snapshot()

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any], now: float) -> Membership:
        """A membership that goes on from `snapshot`; its live members get a fresh lease."""
        terms = {name: snapshot[name] for name in _TERMS}
        membership = cls(run=bytes.fromhex(snapshot["run"]), **terms)
        membership.terms = replace(membership.terms, previous_run=bytes.fromhex(snapshot["previous_run"]))
        membership._clock.advance(now)
        membership._roster.restore(snapshot)
        membership._checkpoints = Checkpoints.restore(snapshot["checkpoints"])
        membership._finished = snapshot["finished"]
        return membership


_TERMS = ("job", "start", "minimum", "maximum", "lease", "settle")
