"""The simulated coordinator: the real rules of calls, with a journal that survives its crashes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, Literal, Protocol

from gradwire.errors import JournalError
from gradwire.membership.coordinator import call_rules
from gradwire.membership.coordinator.call_rules import CallRules
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.types import Change, Claim, Waiting
from gradwire.simulate.coordinator_calls import CallTarget, Denied, Request, Stale, Unreachable
from gradwire.simulate.disk import Disk
from gradwire.simulate.network import Network, nothing
from gradwire.simulate.process import Process
from gradwire.simulate.scenario import Scenario
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


class _Crashed(Exception):
    """The coordinator ended while it answered a call."""


class Observer(Protocol):
    """What the coordinator reports to."""

    def note(self, process: Process | None, text: str, *facts: object) -> None: ...

    def changed(self, change: Change) -> None: ...

    def formed(self, number: int, ids: tuple[str, ...]) -> None: ...

    def resumed(self) -> None: ...


class Coordinator(CallTarget):
    """Answers calls one at a time. What lasts is written before anybody is told of it."""

    def __init__(self, setting: Scenario, network: Network, clock: Clock, random: Random, observer: Observer) -> None:
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
        self._formed = False  # a generation, of which those who wait have not been told
        self._unsynced = 0  # entries that the fsync under way has not made safe
        self._load()

    @property
    def membership(self) -> Membership:
        return self._rules.membership

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
        setting = self._setting
        membership = Membership(
            JOB,
            run_id(self._runs + 1),
            start=setting.start,
            minimum=setting.minimum,
            maximum=setting.maximum,
            lease=setting.lease,
            settle=setting.settle,
        )
        self._rules = CallRules(membership, self._save, self._report)
        if snapshot is not None:
            self._rules.resume(snapshot, self.now)
        else:
            self._runs += 1
            self.disk.save(self._rules.snapshot())

    # -- calls --------------------------------------------------------------------------------------------------------

    def receive(self, request: Request) -> None:
        if request.start != self._start:
            self._answer(request, Stale(self._start))
            return
        if request.sequence <= self._newest.get(request.session, 0):
            return
        self._newest[request.session] = request.sequence
        self._attempt(lambda: self._call(request), lambda: self._answer(request, Unreachable()))

    def _attempt(self, act: Callable[[], None], failed: Callable[[], None] = nothing) -> None:
        """Do something with the membership, and tell those who wait what has become of it. `failed` is called if the
        journal cannot be written; a coordinator that crashes meanwhile does nothing more."""
        try:
            act()
            self._answer_held()
            self._plan_look()
        except JournalError:
            failed()
        except _Crashed:
            pass

    def _call(self, request: Request) -> None:
        match request.method, request.body:
            case "register", Claim() as body:
                claim = replace(body, sequence=self._rules.next_call())
                outcome: Any = self._rules.register(claim, request.ticket, self.now, self.timeline.now)
                if isinstance(outcome, Waiting):
                    self._held.append(_Held(claim, request, self.now + HOLD_SECONDS))
                    self.later(HOLD_SECONDS, self._look)
                    return
            case "beat", (ids, gone, run):
                outcome = self._rules.heartbeat(ids, gone, run, request.ticket, self.now)
            case "leave", (member, run):
                try:
                    outcome = self._rules.leave(member, request.ticket, self.now, run=run)
                except call_rules.Denied as denied:
                    outcome = Denied(str(denied))
            case _:
                raise ValueError(request.method)
        self._answer(request, outcome)

    def _answer(self, request: Request, outcome: Any) -> None:
        self.do(lambda: self._network.call(self, request.caller, lambda: request.answer(outcome)))

    def _answer_held(self) -> None:
        """Answer those whom a new generation concerns, and those who have waited long enough."""
        formed, self._formed = self._formed, False
        for held in [held for held in self._held if formed or self.now >= held.until]:
            self._held.remove(held)
            self._answer(held.request, self._rules.outcome(held.claim, self.now))

    def _save(self, changes: Sequence[Change], snapshot: Mapping[str, Any]) -> None:
        """Write an entry of the journal. While the disk is slow, nobody is told anything."""
        if self._doomed == "unwritten":
            self._fall("with a change unwritten")
            raise _Crashed
        try:
            seconds = self.disk.save(snapshot)
        except JournalError as error:
            self._fail(error)
            raise
        if seconds and not self.frozen:
            self._observer.note(self, "waits %.2f s for its disk", seconds)
            self.freeze()
            self.timeline.after(seconds, partial(self._synced, self._start))
        self._unsynced += self.frozen

    def _report(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self.do(partial(self._observer.changed, change))
        if any(change.kind == "formed" for change in changes):
            self._formed = True
            self.do(partial(self._observer.formed, self.membership.generation, self.member_ids))
        if self._doomed == "untold" and any(change.lasting for change in changes):
            self._fall("with a change untold")
            raise _Crashed

    def _synced(self, start: int) -> None:
        if self._start == start:
            self._unsynced = 0
            self.thaw()

    def _look(self) -> None:
        self._attempt(lambda: self._rules.tick(self.now))

    def _plan_look(self) -> None:
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
        self.alive = True
        self._start += 1
        self._newest.clear()
        self._held.clear()
        self._formed = False
        self._observer.resumed()
        self._plan_look()


def run_id(number: int) -> bytes:
    """The id of the run that was begun as this one; others may begin in its place before the next."""
    return (1000 * number).to_bytes(8, "big") + bytes(8)
