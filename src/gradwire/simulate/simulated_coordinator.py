"""The simulated coordinator: the real membership behind calls, with a journal that survives its crashes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, Literal, Protocol

from gradwire.errors import JournalError
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.types import Change, Claim, News, Outcome, Refusal, Waiting
from gradwire.security.tokens import Gate
from gradwire.simulate.coordinator_calls import CallTarget, Denied, Request, Stale, Unreachable
from gradwire.simulate.disk import Disk
from gradwire.simulate.network import Network
from gradwire.simulate.process import Process
from gradwire.simulate.scenario import Setting
from gradwire.simulate.time import Clock, Event
from gradwire.simulate.worker_profile import JOB

HOLD_SECONDS = 1.0  # in which a call that has to wait is held back
KEEPER_SECONDS = 1.0  # from the end of a coordinator whose journal failed to its next start

Moment = Literal["now", "unwritten", "untold"]
"""When it crashes: at once; at the next change that lasts, before that is written; or when it is, before it is told."""


@dataclass(slots=True)
class _Held:
    claim: Claim
    request: Request
    until: float


class Observer(Protocol):
    """What the coordinator reports to."""

    def note(self, process: Process | None, text: str, *facts: object) -> None: ...

    def changed(self, change: Change) -> None: ...

    def formed(self, number: int, ids: tuple[str, ...]) -> None: ...

    def resumed(self) -> None: ...


class Coordinator(CallTarget):
    """Answers calls one at a time. What lasts is written before anybody is told of it."""

    def __init__(self, setting: Setting, network: Network, clock: Clock, random: Random, observer: Observer) -> None:
        super().__init__("coordinator", "elsewhere", network.timeline, clock)
        self._setting = setting
        self._network = network
        self._random = random
        self._observer = observer
        self.disk = Disk(setting.durable)
        self._runs = 0  # how many were begun without a journal
        self._start = 1
        self._newest: dict[int, int] = {}  # by session: the last call heard, so that nothing is heard twice
        self._held: list[_Held] = []
        self._doomed: Moment | None = None
        self._due: Event | None = None
        self._failed = False  # the journal could not be written: nobody is told anything any more
        self._gate_changed = False
        self._unsynced = 0  # entries that the fsync under way has not made safe
        self._load()

    @property
    def run(self) -> bytes:
        return self.membership.terms.run

    @property
    def previous_run(self) -> bytes:
        return self.membership.terms.previous_run

    @property
    def member_ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.membership.members)

    def _load(self) -> None:
        """Go on from the journal; without one this is a new run."""
        snapshot = self.disk.load()
        self._gate = Gate(JOB)
        if snapshot is not None:
            self.membership = Membership.restore(snapshot, self.now)
            self._gate.restore(snapshot["tokens"])
            return
        setting = self._setting
        self._runs += 1
        self.membership = Membership(
            JOB,
            run_id(self._runs),
            start=setting.start,
            minimum=setting.minimum,
            maximum=setting.maximum,
            lease=setting.lease,
            settle=setting.settle,
        )
        self.disk.save(self._snapshot())

    def _snapshot(self) -> dict[str, Any]:
        return self.membership.snapshot() | {"tokens": self._gate.snapshot()}

    # -- calls --------------------------------------------------------------------------------------------------------

    def receive(self, request: Request) -> None:
        if request.start != self._start:
            self._answer(request, Stale(self._start))
            return
        if request.sequence <= self._newest.get(request.session, 0):
            return
        self._newest[request.session] = request.sequence
        if self._failed:
            self._answer(request, Unreachable())
            return
        claim, outcome = self._event(request)
        if self._write():
            if claim is not None and isinstance(outcome, Waiting):
                self._held.append(_Held(claim, request, self.now + HOLD_SECONDS))
                self.later(HOLD_SECONDS, self._look)
            else:
                self._answer(request, outcome)
            self._answer_held()
            self._plan_look()

    def _event(self, request: Request) -> tuple[Claim | None, Any]:
        """Tell the membership; the claim, if the call made one, and what it answers."""
        match request.method, request.body:
            case "register", Claim() as body:
                claim = replace(body, sequence=request.sequence)
                return claim, self._register(claim, request.ticket)
            case "beat", (ids, gone, run):
                return None, self._beat(ids, gone, run, request.ticket)
            case "leave", (member, run):
                if not self._gate.speaks_for(request.ticket, member.id):
                    return None, Denied(f"its join token has not let {member.id} in")
                return None, self.membership.leave(member, self.now, run=run)
        raise ValueError(request.method)

    def _register(self, claim: Claim, ticket: bytes) -> Outcome:
        """As `CoordinatorServicer` does: a use of a join token counts only if the membership has accepted the claim."""
        name, now = claim.member.id, self.timeline.now
        reason = self._gate.refusal(ticket, name, now, self.membership.knows) if ticket else None
        if reason is not None:
            return Refusal(reason)
        outcome = self.membership.register(claim, self.now)
        if not isinstance(outcome, Refusal) and self._gate.admit(ticket, name):
            self._gate_changed = True
        return outcome

    def _beat(self, ids: list[str], gone: list[str], run: bytes, ticket: bytes) -> News:
        """As `CoordinatorServicer` does: ids for which a join token does not speak are ignored."""
        theirs = [name for name in ids if self._gate.speaks_for(ticket, name)]
        gone = [name for name in gone if self._gate.speaks_for(ticket, name)]
        if gone:
            self.membership.gone(gone, self.now, run)
        news = self.membership.beat(theirs, self.now, run)
        return replace(news, unknown=(*news.unknown, *set(ids).difference(theirs)))

    def _answer(self, request: Request, outcome: Any) -> None:
        self.do(lambda: self._network.call(self, request.caller, lambda: request.answer(outcome)))

    def _answer_held(self) -> None:
        """Tell those who wait what has become of it."""
        for held in list(self._held):
            outcome = self.membership.outcome(held.claim, self.now)
            if not self._write():
                return
            if not isinstance(outcome, Waiting) or self.now >= held.until:
                self._held.remove(held)
                self._answer(held.request, outcome)

    def _write(self) -> bool:
        """Put what lasts into the journal; False if it ended over that. While the disk is slow, nobody is told."""
        changes = self.membership.changes()
        if any(change.kind == "formed" for change in changes):
            self._gate.registered(self.member_ids)
        for change in changes:
            if change.kind == "went" and change.member and not self.membership.knows(change.member):
                self._gate_changed |= self._gate.release(change.member)
        lasting = self._gate_changed or any(change.lasting for change in changes)
        self._gate_changed = False
        if lasting:
            if self._doomed == "unwritten":
                self._fall("with a change unwritten")
                return False
            if not self._save():
                return False
        for change in changes:
            self.do(partial(self._observer.changed, change))
        if any(change.kind == "formed" for change in changes):
            number, ids = self.membership.generation, self.member_ids
            self.do(lambda: self._observer.formed(number, ids))
        if self._doomed == "untold" and lasting:
            self._fall("with a change untold")
            return False
        return True

    def _save(self) -> bool:
        try:
            seconds = self.disk.save(self._snapshot())
        except JournalError as error:
            self._fail(error)
            return False
        if seconds and not self.frozen:
            self._observer.note(self, "waits %.2f s for its disk", seconds)
            self.freeze()
            self.timeline.after(seconds, partial(self._synced, self._start))
        self._unsynced += self.frozen
        return True

    def _synced(self, start: int) -> None:
        if self._start == start:
            self._unsynced = 0
            self.thaw()

    def _look(self) -> None:
        if self._failed:
            return
        self.membership.tick(self.now)
        if self._write():
            self._answer_held()
            self._plan_look()

    def _plan_look(self) -> None:
        if not self.alive or self._failed:
            return
        if self._due is not None:
            self._due.cancel()
        due = self.membership.due()
        self._due = self.later(max(0.0, due - self.now), self._look) if due is not None else None

    # -- crashes ------------------------------------------------------------------------------------------------------

    def fall(self, moment: Moment) -> None:
        """Crash, now or at the next opportunity."""
        if moment == "now":
            self._fall("at once")
        else:
            self._doomed = moment

    def lose_power(self, random: Random) -> None:
        """Crash together with the host."""
        self._fall("its host has no power any more", random)
        self.disk.lose_power(random)

    def _fail(self, error: JournalError) -> None:
        """The journal cannot be written: the process answers nothing more, ends, and is started again."""
        self._observer.note(self, "%s", error)
        self._failed = True

        def end(start: int = self._start) -> None:
            if self._start == start and self.alive:
                self._fall("because its journal failed")
                self.timeline.after(KEEPER_SECONDS, lambda: self.rise(self.clock))

        self.timeline.after(0.1, end)

    def _fall(self, how: str, random: Random | None = None) -> None:
        self._observer.note(self, "crashes, %s", how)
        self._doomed = None
        if self._unsynced:  # those after the first had not even begun
            first = (random or self._random).randint(0, 1)
            self.disk.drop(self._unsynced - first)
        self._unsynced = 0
        self.crash()

    def rise(self, clock: Clock, *, anew: bool = False) -> None:
        """Start again from the journal, or without it; its clock begins anywhere."""
        self._doomed = None
        if self.alive and not anew:
            return
        if self.alive:
            self._fall("to be started without its journal")
        if anew:
            self.disk.remove()
        self.clock = clock
        try:
            self._load()
        except JournalError as error:
            self._observer.note(self, "does not start: %s", error)
            if self.disk.full:
                self.timeline.after(KEEPER_SECONDS, lambda: self.rise(clock))
            return
        self.alive, self._failed = True, False
        self._start += 1
        self._newest.clear()
        self._held.clear()
        self._observer.resumed()
        self._plan_look()


def run_id(number: int) -> bytes:
    """The id of the run that was begun as this one; others may begin in its place before the next."""
    return (1000 * number).to_bytes(8, "big") + bytes(8)
