"""Decides the membership of a job, as a state machine: claims, deaths and the time go in, answers come out.

    register(claim)  →  Waiting    registered; the reason says what the claim waits for
                        Refusal    refused, with the reason
                        Assembly   the members of the next generation, and the claimant's own rank

A waiting process keeps its place by repeating its claim. A place without a claim for `LAPSE` seconds is freed, and a
place that is held is never given to another process. The first generation forms when `start` members have registered.
A static job has only this generation: its members may ask for it again, and all others are refused. Its members renew
leases if they have no data plane of gradwire, or if the coordinator lasts as long as the job.

An elastic job can have more generations. A member of the current generation that registers for a newer one is
*returning*. All other waiting processes are in the *queue*. The next generation forms when each member of the current
one is returning or *removed*: it left, it died, its lease expired, or a returning member could not reach it. Survivors
keep their order, members from the queue follow, and the size stays between the minimum and the maximum.

This module does no I/O and has no clock and no locks: time is an argument. The caller must call `tick` when it is
`due`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from gradwire.identity import next_run, replaces
from gradwire.membership.coordinator import admission_rules
from gradwire.membership.coordinator.admission_rules import DEFAULT_LEASE, Terms
from gradwire.membership.coordinator.checkpoints import Checkpoints
from gradwire.membership.coordinator.clock import Clock
from gradwire.membership.coordinator.election import cut_off, initial_order, missing
from gradwire.membership.coordinator.roster import Roster
from gradwire.membership.types import Assembly, Change, CheckpointStatus, Claim, Member, News, Outcome, Refusal, Waiting

NEWCOMER_SECONDS = 30.0  # if no process registers for this long, the minimum size is enough for a first generation
TICK = 1.0  # seconds between two ticks at most
FINISHED = "all work of this job is done; no process can join any more"
# Seconds for members that are reported lost to return, if the returning members are not the majority.
MINORITY_GRACE = 1.0
# Seconds beyond its lease for which a silent member may still be at work, if no other member has the training state.
SILENT_GRACE = 60.0


class Membership:
    """The members of a job. Each method that takes the time is an event. `changes` returns what the events changed."""

    def __init__(
        self,
        job: str,
        run: bytes,
        *,
        start: int,
        minimum: int | None = None,
        maximum: int | None = None,
        lease: float = DEFAULT_LEASE,
        lasting: bool = False,
        settle: float = 0.1,
    ) -> None:
        self.terms = Terms(
            job, run, start=start, minimum=minimum, maximum=maximum, lease=lease, lasting=lasting, settle=settle
        )
        self._clock = Clock()
        self._roster = Roster(self._clock)
        self._checkpoints = Checkpoints()
        self._stopped: str | None = None
        self._finished = False

    @property
    def generation(self) -> int:
        """The number of the current generation; 0 before the first."""
        return self._roster.generation

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the current generation in rank order, including removed ones."""
        return self._roster.members

    @property
    def roster(self) -> Roster:
        """Where each member is. Callers must not change it."""
        return self._roster

    @property
    def finished(self) -> bool:
        """Whether a member has reported that all work is done."""
        return self._finished

    @property
    def ended(self) -> bool:
        """Whether the job has had a generation and no process can continue it.

        All members have left or are lost, and none waits. In an elastic job a member that is only silent or unreachable
        may return with the training state, so the job has not ended.
        """
        roster = self._roster
        may_return = self.terms.elastic and (roster.maybe_alive() or roster.dropped)
        return roster.generation > 0 and not roster.size() and not self.waiting and not may_return

    @property
    def waiting(self) -> int:
        """The number of processes that wait."""
        return len(self._roster.returning) + len(self._roster.queue)

    # -- processes that wait

    def register(self, claim: Claim, now: float) -> Outcome:
        """Claim a place, or renew a claim. A refused claim changes nothing."""
        self._advance(now)
        reason = admission_rules.objection(claim, self.terms, self._roster)
        if reason is not None:
            return Refusal(reason, other_run=admission_rules.is_of_another_run(claim, self.terms, self._roster))
        if self._finished and not admission_rules.is_survivor(claim, self._roster):
            return Refusal(FINISHED, finished=True)
        if self._stopped is None and (
            self._missed_the_end(claim) or not admission_rules.is_current_member(claim, self.terms, self._roster)
        ):
            self._admit(claim)
        return self.outcome(claim, now)

    def outcome(self, claim: Claim, now: float) -> Outcome:
        """Return the current answer to a claim that was not refused."""
        self.tick(now)
        name, roster = claim.member.id, self._roster
        if name not in roster.returning and admission_rules.is_current_member(claim, self.terms, roster):
            record = roster.records[name]
            record.last_asked, record.informed = self._clock.time, True
            roster.mark_alive(name)
            rank, terms = record.member.rank or 0, self.terms
            previous = claim.run if replaces(terms.run, claim.run) else terms.previous_run
            lease = terms.lease if terms.all_renew or not record.transport else 0.0
            return Assembly(
                terms.job, roster.generation, rank, roster.members, terms.run, previous_run=previous, lease=lease
            )
        if self._stopped is not None:
            place = roster.place(name)
            if place is not None and place.claim.session == claim.session:
                place.informed = True
            return Refusal(self._stopped)
        if self._finished and name not in roster.returning:
            return Refusal(FINISHED, finished=True)
        gaps = () if roster.generation else missing(roster.wanted_ranks(), self.terms.start)
        return Waiting(gaps, self._reason(name))

    def withdraw(self, claim: Claim) -> Member | None:
        """Free the place of a process that disconnected while it waited, unless it has claimed again since."""
        place = self._roster.place(claim.member.id)
        if place is None or (place.claim.session, place.claim.sequence) != (claim.session, claim.sequence):
            return None
        self._roster.free_place(claim.member.id, "disconnected while it waited")
        return place.claim.member

    def stop(self, reason: str) -> None:
        """Stop admitting processes. All that wait are refused with `reason`."""
        self._stopped = reason

    def uninformed(self, now: float) -> bool:
        """Return whether a process that still asks has not received its final answer."""
        self._advance(now)
        return self._roster.uninformed()

    # -- members of the current generation

    def leave(self, member: Member, now: float, *, finished: bool = False, run: bytes = b"") -> bool:
        """Record that a member leaves. Return False if there is no member that is exactly this process.

        With `finished`, the member also reports that all work is done. Only a member of the current generation can do
        that. From then on no process can join, because it would begin the work again. The current members stay.
        """
        self._advance(now)
        known = self._roster.known(member.id)
        other = self._is_another_run(run) and not replaces(self.terms.run, run)
        if known is None or not admission_rules.same_process(known, member) or other:
            return False
        self._roster.mark_alive(member.id)
        self._finished = self._finished or (finished and self._roster.alive(member.id))
        self._roster.end(member.id, "left")
        self._form_if_ready()
        return True

    def gone(self, names: Iterable[str], now: float, run: bytes = b"") -> None:
        """Record that the processes of these members have ended. Reports about another `run` are ignored."""
        self._advance(now)
        for name in () if self._is_another_run(run) else names:
            self._roster.end(name, "gone")
        self._form_if_ready()

    def heartbeat(self, names: Iterable[str], now: float, run: bytes = b"") -> News:
        """Renew the leases of these members and return the news.

        Ids that are not members of this `run` are ignored, and the news lists them as unknown: such a process may be
        about to join, or is a member of another run.
        """
        self._advance(now)
        names = list(names)
        unknown = names if self._is_another_run(run) else [name for name in names if name not in self._roster.records]
        for name in set(names).difference(unknown):
            self._roster.mark_alive(name)
        self._form_if_ready()
        return replace(self.news(), unknown=tuple(unknown))

    def knows(self, name: str) -> bool:
        """Return whether an id belongs to a member of this run, a waiting process, or a dropped member."""
        roster = self._roster
        return name in roster.records or name in roster.dropped or roster.place(name) is not None

    def _is_another_run(self, run: bytes) -> bool:
        return run not in (b"", self.terms.run)

    def news(self) -> News:
        roster = self._roster
        open_to_joiners = self.terms.elastic and roster.generation and not self._finished
        room = self.terms.largest - roster.size() if open_to_joiners else 0
        joiners = sum(1 for _ in islice(roster.ready(), room))
        evicted = tuple(name for name, cause in roster.removed.items() if cause != "left")
        epoch = self._checkpoints.epoch
        size, run = roster.size(), self.terms.run
        lease = self.terms.lease
        return News(roster.generation, joiners, evicted, epoch, roster.over, size, self._finished, run, lease=lease)

    def start_checkpoint(self, epoch: int, name: str, now: float) -> CheckpointStatus | Refusal:
        """Begin the checkpoint of `epoch` for a member, or return its progress if it has begun."""
        return self._checkpoint(epoch, name, now, begin=True)

    def end_checkpoint(self, epoch: int, name: str, now: float) -> CheckpointStatus | Refusal:
        """Record that a member has written its part. Repeat the call to poll the progress of the others."""
        return self._checkpoint(epoch, name, now, begin=False)

    def _checkpoint(self, epoch: int, name: str, now: float, *, begin: bool) -> CheckpointStatus | Refusal:
        self.tick(now)
        if not self._roster.alive(name):
            return Refusal(f"{name!r} is not a live member of generation {self.generation}")
        if self._checkpoints.begin(epoch, self._roster.live()) if begin else self._checkpoints.report(epoch, name):
            action = "begun" if begin else "written its part of"
            self._roster.note("checkpoint", name, f"{name} has {action} the checkpoint of epoch {epoch}")
        self._close_checkpoint()
        return self._checkpoints.status(epoch, self._roster.alive)

    def _close_checkpoint(self) -> None:
        if self._checkpoints.end_if_complete(self._roster.alive):
            self._roster.note("checkpoint", None, f"the checkpoint of epoch {self._checkpoints.last} is complete")

    # -- time

    def tick(self, now: float) -> None:
        """Process the passing of time."""
        self._advance(now)
        self._form_if_ready()

    def due(self) -> float | None:
        """Return the time by which `tick` must be called; None if no decision depends on the time."""
        roster = self._roster
        if not (self.waiting or (roster.generation and self._renewing)):
            return None
        deadlines = [roster.last_arrival + NEWCOMER_SECONDS, self._ready_at(), *roster.backoff_ends()]
        ahead = [deadline for deadline in deadlines if not self._clock.reached(deadline)]
        return self._clock.outside(min([self._clock.time + TICK, *ahead]))

    def _advance(self, now: float) -> None:
        self._clock.advance(now)
        self._roster.drop_lapsed()
        if self._renewing:
            for name in self._roster.silent(self.terms.lease):
                self._roster.remove(name, "silent")

    @property
    def _renewing(self) -> bool:
        """Whether the members of the current generation renew leases: all of them do, or none."""
        return self.terms.all_renew or self._roster.uses_data_plane is False

    # -- the next generation

    def _admit(self, claim: Claim) -> None:
        name, roster = claim.member.id, self._roster
        if self._missed_the_end(claim):
            roster.mark_alive(name)
            roster.place_claim(claim, roster.returning)
        elif admission_rules.is_survivor(claim, roster):
            roster.mark_alive(name)
            roster.queue.pop(name, None)
            roster.place_claim(claim, roster.returning, frozenset(claim.lost) & roster.records.keys() - {name})
        else:
            if roster.returnable(name):
                roster.remove(name, "replaced")
            for other in admission_rules.displaced(claim, roster):
                roster.free_place(other, "has no data address, and other members of this job have one")
            roster.place_claim(claim, roster.queue)

    def _missed_the_end(self, claim: Claim) -> bool:
        """Return whether a member asks for the current generation after others have already registered for the next.

        The current generation is over then, so the member must wait for the next one.
        """
        roster = self._roster
        return self.terms.elastic and roster.over and admission_rules.is_current_member(claim, self.terms, roster)

    def _form_if_ready(self) -> None:
        """Form the next generation if all conditions are met. Called after each event."""
        roster = self._roster
        self._close_checkpoint()
        if self._stopped is not None:
            return
        if not roster.generation:
            few = len(roster.queue) >= self.terms.smallest and self._clock.reached(
                roster.last_arrival + NEWCOMER_SECONDS
            )
            if few or len(roster.queue) >= self.terms.start:
                self._form(initial_order([place.claim.member for place in roster.queue.values()]))
        elif self.terms.elastic and not roster.awaited() and self._clock.reached(self._ready_at()):
            self._regroup()

    def _ready_at(self) -> float:
        """Return when to form the next generation without unreachable members, if nothing changes before."""
        roster = self._roster
        unreachable = len(roster.unreachable())
        if not roster.returning:
            return roster.last_change + (0.0 if len(roster.queue) >= self.terms.start else self.terms.settle)
        if not unreachable:
            return roster.last_change
        grace = 0.0 if len(roster.returning) > unreachable else MINORITY_GRACE
        return roster.last_change + max(self.terms.settle, grace)

    def _regroup(self) -> None:
        """Remove unreachable members, and form the next generation if enough members remain."""
        roster = self._roster
        for name in roster.unreachable():
            roster.remove_unreachable(name)
        order = [name for name in roster.records if name in roster.returning]
        # A member that was stopped for a moment was reported lost, but has returned. Reports about it are ignored: if
        # it really cannot be reached, it is reported again in the next generation.
        resumed = {name for name in order if roster.returning[name].claim.stood_still}
        lost = {name: roster.returning[name].lost - resumed for name in order}
        stateless = {name for name in order if not self._has_state(roster.returning[name].claim)}
        for name in cut_off(order, lost, stateless):
            roster.move_to_queue(name)
        survivors = [name for name in order if name in roster.returning]
        joiners = [] if self._finished else self._joiners(survivors)
        if joiners is not None and len(survivors) + len(joiners) >= self.terms.smallest:
            self._form(survivors + joiners)

    def _joiners(self, survivors: list[str]) -> list[str] | None:
        """Return the queued processes to admit, in order; None if the next generation must not form yet.

        If a survivor has the training state, these are the processes that are ready to join. Otherwise the state must
        come from queued processes that were in a generation, the latest generation first. They are admitted even during
        a back-off, unless they were dropped more than once.

        If no queued process has the state of the current generation, a silent or dropped member may still be at work
        with it. A generation without that member would begin the work again beside it. So none forms until that member
        is given up.
        """
        roster, room = self._roster, self.terms.largest - len(survivors)
        if any(self._has_state(roster.returning[name].claim) for name in survivors):
            return list(islice(roster.ready(), room))
        if self._unaccounted() and not self._state_holder_queues():
            return None
        experienced = (name for name, place in roster.queue.items() if place.claim.generation)
        first = [name for name in experienced if not roster.dropped_again(name)]
        first.sort(key=lambda name: -roster.queue[name].claim.generation)
        return [*first, *(name for name in roster.ready() if name not in first)][:room]

    def _has_state(self, claim: Claim) -> bool:
        """Return whether a returning member has the training state.

        It does not if it joined the generation but did not receive the state, or not even its Assembly.
        """
        return not claim.lacks_state and self.generation - claim.generation <= 1

    def _state_holder_queues(self) -> bool:
        """Return whether a queued process has the state of the current generation, from which it was removed."""
        return any(map(self._has_current_state, self._roster.queue))

    def _has_current_state(self, name: str) -> bool:
        """Return whether a waiting process has the state of the current generation."""
        if name in self._roster.returning:
            return self._has_state(self._roster.returning[name].claim)
        claim, record = self._roster.queue[name].claim, self._roster.records.get(name)
        was_member = record is not None and admission_rules.same_process(record.member, claim.member)
        return was_member and claim.generation == self.generation and not claim.lacks_state

    def _unaccounted(self) -> dict[Member, float]:
        """Return members that may be alive, do not wait, and have a later state than the waiting processes.

        They were removed from the current generation or dropped before. The values are the seconds until they are given
        up.
        """
        roster = self._roster
        claims = [place.claim for place in roster.queue.values()]
        latest = max((claim.generation for claim in claims if not claim.lacks_state), default=0)
        since = {one.member: one.since for one in roster.dropped.values() if one.generation > latest}
        since |= {roster.records[name].member: roster.records[name].last_seen for name in roster.maybe_alive()}
        left = {member: at + self.terms.lease + SILENT_GRACE - self._clock.time for member, at in since.items()}
        return {member: seconds for member, seconds in left.items() if seconds > 0 and roster.place(member.id) is None}

    def _form(self, order: list[str]) -> None:
        """Form the next generation.

        If no member has the state of the current generation, a new run begins. Members that were given up may have
        committed further steps, and must not return into a different history.
        """
        roster = self._roster
        new_run = roster.generation > 0 and not any(self._has_current_state(name) for name in order)
        run = self.terms.run
        self.terms = replace(self.terms, run=next_run(run) if new_run else run, previous_run=run if new_run else b"")
        roster.record(order)
        for name in [name for name, place in roster.queue.items() if new_run and place.claim.generation]:
            roster.free_place(name, "is a member of the previous run")
        text = f"generation {self.generation} of job {self.terms.job} has {len(order)} members"
        if new_run:
            text += f" and begins run {self.terms.run.hex()}: no member has the state of the previous generation"
        self._roster.note("formed", None, text)

    def _reason(self, name: str) -> str:
        """Return what a waiting process waits for."""
        roster, terms = self._roster, self.terms
        if not roster.generation:
            enough = f"; {terms.smallest} are enough if no other registers for {NEWCOMER_SECONDS:g} s"
            return f"{len(roster.queue)} of {terms.start} members have registered" + (
                enough if terms.smallest < terms.start else ""
            )
        if name not in roster.returning:
            if roster.backoff(name):
                return f"other members could not reach it; it may join again in {roster.backoff(name):.0f} s"
            ahead = next((ahead for ahead, other in enumerate(roster.ready()) if other == name), len(roster.queue))
            if roster.size() + ahead >= terms.largest:
                full = f"the job is full ({roster.size()} of at most {terms.largest} members)"
                return f"{full}; {ahead} processes are before it in the queue"
            if roster.size() and not roster.returning:
                at_work = f"generation {roster.generation} is at work with {roster.size()} members"
                return f"{at_work}; it can join between two steps"
        if roster.awaited():
            unreachable = set(roster.unreachable())
            late = islice((name for name in roster.expected if name not in unreachable), 4)
            names = ", ".join(str(roster.records[name].member) for name in late)
            more = f" and {roster.awaited() - 4} more" if roster.awaited() > 4 else ""
            return f"waits for {names}{more} of generation {roster.generation} to register again"
        has_state = any(self._has_state(place.claim) for place in roster.returning.values())
        unaccounted = {} if has_state or self._state_holder_queues() else self._unaccounted()
        if unaccounted:
            names = ", ".join(map(str, islice(unaccounted, 4)))
            left = max(unaccounted.values())
            return f"waits up to {left:.0f} s for {names}: no other has the state of generation {roster.generation}"
        count = len(roster.returning) + sum(1 for _ in roster.ready())
        return f"{count} of at least {terms.smallest} members have registered"

    # -- the log and the journal

    def changes(self) -> list[Change]:
        """Return the changes since the last call."""
        changes, self._roster.changes = self._roster.changes, []
        return changes

    def snapshot(self) -> dict[str, Any]:
        """Return the lasting state, in JSON's types. Waiting processes are not in it, because they ask again."""
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
        """Return a membership that continues from `snapshot`. Its live members get a new lease."""
        terms = {name: snapshot[name] for name in _TERMS}
        membership = cls(run=bytes.fromhex(snapshot["run"]), **terms)
        membership.terms = replace(membership.terms, previous_run=bytes.fromhex(snapshot["previous_run"]))
        membership._clock.advance(now)
        membership._roster.restore(snapshot)
        membership._checkpoints = Checkpoints.restore(snapshot["checkpoints"])
        membership._finished = snapshot["finished"]
        return membership


_TERMS = ("job", "start", "minimum", "maximum", "lease", "settle")
