"""Simulate the coordinator: it runs the shipped rules for calls, with a journal that survives its crashes."""

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

HOLD_SECONDS = 1.0  # longest time for which the coordinator holds a call that has to wait
RESTART_SECONDS = 1.0  # between the end of a coordinator whose journal failed and its next start

Moment = Literal["now", "unwritten", "unreported"]
"""When the coordinator crashes: at once, before it writes the next lasting change, or after it has written the change
and before it reports it."""


@dataclass(slots=True)
class _Held:
    claim: Claim
    request: Request
    until: float


class _Crashed(Exception):
    """The coordinator ended while it answered a call."""


class Observer(Protocol):
    """Receives the coordinator's reports."""

    def note(self, process: Process | None, text: str, *facts: object) -> None: ...

    def changed(self, change: Change) -> None: ...

    def formed(self, number: int, ids: tuple[str, ...]) -> None: ...

    def resumed(self) -> None: ...


class Coordinator(CallTarget):
    """Answers one call at a time. A lasting change is written to the journal before it is reported."""

    def __init__(self, scenario: Scenario, network: Network, clock: Clock, random: Random, observer: Observer) -> None:
        super().__init__("coordinator", "elsewhere", network.timeline, clock)
        self._scenario = scenario
        self._network = network
        self._random = random
        self._observer = observer
        self.disk = Disk(scenario.durable)
        self._runs = 0  # the number of starts without a journal
        self._start = 1
        self._newest: dict[int, int] = {}  # by session: the last call received, so that doubled calls are ignored
        self._held: list[_Held] = []
        self._crash_moment: Moment | None = None
        self._due: Event | None = None
        self._formed = False  # a generation has formed, and held calls have not been answered yet
        self._unsynced = 0  # entries whose fsync has not finished
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

    def is_member(self, name: str, session: bytes) -> bool:
        """Return whether the process with this session registered as this member of the current generation."""
        record = self.membership.roster.records.get(name)
        return record is not None and record.session == session

    def _load(self) -> None:
        """Resume from the journal. Without a journal, begin a new run."""
        snapshot = self.disk.load()
        scenario = self._scenario
        membership = Membership(
            JOB,
            run_id(self._runs + 1),
            start=scenario.start,
            minimum=scenario.minimum,
            maximum=scenario.maximum,
            lease=scenario.lease,
            settle=scenario.settle,
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
        """Change the membership, then answer the held calls that are due. If the journal cannot be written, call
        `failed`. If the coordinator crashes meanwhile, stop."""
        try:
            act()
            self._answer_held()
            self._schedule_tick()
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
                    self.later(HOLD_SECONDS, self._tick)
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
        """Answer all held calls if a generation has formed, otherwise those that were held for `HOLD_SECONDS`."""
        formed, self._formed = self._formed, False
        for held in [held for held in self._held if formed or self.now >= held.until]:
            self._held.remove(held)
            self._answer(held.request, self._rules.outcome(held.claim, self.now))

    def _save(self, changes: Sequence[Change], snapshot: Mapping[str, Any]) -> None:
        """Write an entry of the journal. While the disk is slow, the coordinator is frozen and answers no call."""
        if self._crash_moment == "unwritten":
            self._crash("with a change unwritten")
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
        if self._crash_moment == "unreported" and any(change.lasting for change in changes):
            self._crash("with a change unreported")
            raise _Crashed

    def _synced(self, start: int) -> None:
        if self._start == start:
            self._unsynced = 0
            self.resume()

    def _tick(self) -> None:
        self._attempt(lambda: self._rules.tick(self.now))

    def _schedule_tick(self) -> None:
        if self._due is not None:
            self._due.cancel()
        due = self.membership.due()
        self._due = self.later(max(0.0, due - self.now), self._tick) if due is not None else None

    # -- crashes ------------------------------------------------------------------------------------------------------

    def crash_at(self, moment: Moment) -> None:
        """Crash now, or at the next lasting change."""
        if moment == "now":
            self._crash("at once")
        else:
            self._crash_moment = moment

    def lose_power(self, random: Random) -> None:
        """Crash because the host loses its power."""
        self._crash("its host lost its power", random)
        self.disk.lose_power(random)

    def _fail(self, error: JournalError) -> None:
        """End and restart the process, because the journal cannot be written. Until then it answers no call."""
        self._observer.note(self, "%s", error)

        def end(start: int = self._start) -> None:
            if self._start == start and self.alive:
                self._crash("because its journal failed")
                self.timeline.after(RESTART_SECONDS, lambda: self.restart(self.clock))

        self.timeline.after(0.1, end)

    def _crash(self, how: str, random: Random | None = None) -> None:
        self._observer.note(self, "crashes, %s", how)
        self._crash_moment = None
        if self._unsynced:  # the first entry may have reached the disk; the fsync of the others had not begun
            first = (random or self._random).randint(0, 1)
            self.disk.drop(self._unsynced - first)
        self._unsynced = 0
        self.crash()

    def restart(self, clock: Clock, *, without_journal: bool = False) -> None:
        """Start the coordinator again, from its journal or without it, with a clock that has another origin."""
        self._crash_moment = None
        if self.alive and not without_journal:
            return
        if self.alive:
            self._crash("to be started without its journal")
        if without_journal:
            self.disk.remove()
        self.clock = clock
        try:
            self._load()
        except JournalError as error:
            self._observer.note(self, "does not start: %s", error)
            if self.disk.full:
                self.timeline.after(RESTART_SECONDS, lambda: self.restart(clock))
            return
        self.alive = True
        self._start += 1
        self._newest.clear()
        self._held.clear()
        self._formed = False
        self._observer.resumed()
        self._schedule_tick()


def run_id(number: int) -> bytes:
    """Return the id of the number-th run that began without a journal. Gaps leave room for runs that replace it."""
    return (1000 * number).to_bytes(8, "big") + bytes(8)
