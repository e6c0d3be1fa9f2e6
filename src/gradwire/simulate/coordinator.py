"""The simulated coordinator: the real membership behind calls, with a journal that survives its crashes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from gradwire.membership.answers import Claim, Waiting
from gradwire.membership.state import Membership
from gradwire.simulate.calls import Request, Stale
from gradwire.simulate.process import Process
from gradwire.simulate.time import Clock, Event

if TYPE_CHECKING:
    from gradwire.simulate.world import World

HOLD_SECONDS = 1.0  # in which a call that has to wait is held back

Moment = Literal["now", "unwritten", "untold"]
"""When it crashes: at once; at the next change that lasts, before that is written; or when it is, before it is told."""


@dataclass(slots=True)
class _Held:
    claim: Claim
    request: Request
    until: float


class Coordinator(Process):
    """Answers calls one at a time. What lasts is written before anybody is told of it."""

    def __init__(self, world: World, clock: Clock) -> None:
        super().__init__("coordinator", "elsewhere", world.timeline, clock)
        self._world = world
        setting = world.setting
        self.membership = Membership(
            "simulated",
            bytes(16),
            start=setting.start,
            minimum=setting.minimum,
            maximum=setting.maximum,
            lease=setting.lease,
            settle=setting.settle,
        )
        self._start = 1
        self._journal = json.dumps(self.membership.snapshot())
        self._newest: dict[int, int] = {}  # by session: the last call heard, so that nothing is heard twice
        self._held: list[_Held] = []
        self._doomed: Moment | None = None
        self._due: Event | None = None

    # -- calls --------------------------------------------------------------------------------------------------------

    def receive(self, request: Request) -> None:
        if request.start != self._start:
            self._answer(request, Stale(self._start))
            return
        if request.sequence <= self._newest.get(request.session, 0):
            return
        self._newest[request.session] = request.sequence
        claim = None
        match request.method, request.body:
            case "register", Claim() as body:
                claim = replace(body, sequence=request.sequence)
                outcome: Any = self.membership.register(claim, self.now)
            case "beat", (ids, gone):
                if gone:
                    self.membership.gone(gone, self.now)
                outcome = self.membership.beat(ids, self.now)
            case "leave", member:
                outcome = self.membership.leave(member, self.now)
        if self._write():
            if claim is not None and isinstance(outcome, Waiting):
                self._held.append(_Held(claim, request, self.now + HOLD_SECONDS))
                self.later(HOLD_SECONDS, self._look)
            else:
                self._answer(request, outcome)
            self._answer_held()
            self._plan_look()

    def _answer(self, request: Request, outcome: Any) -> None:
        self._world.network.call(self, request.caller, lambda: request.answer(outcome))

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
        """Put what lasts into the journal; False if it crashed over that."""
        changes = self.membership.changes()
        if any(change.lasting for change in changes):
            if self._doomed == "unwritten":
                self._fall("with a change unwritten")
                return False
            self._journal = json.dumps(self.membership.snapshot())
        for change in changes:
            self._world.changed(change)
        if self._doomed == "untold" and any(change.lasting for change in changes):
            self._fall("with a change untold")
            return False
        return True

    def _look(self) -> None:
        self.membership.tick(self.now)
        if self._write():
            self._answer_held()
            self._plan_look()

    def _plan_look(self) -> None:
        if not self.alive:
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

    def _fall(self, how: str) -> None:
        self._world.note(self, "crashes, %s", how)
        self._doomed = None
        self.crash()

    def rise(self, clock: Clock) -> None:
        """Start again from the journal; its clock begins anywhere."""
        self._doomed = None
        if self.alive:
            return
        self.alive, self.clock = True, clock
        self._start += 1
        self._newest.clear()
        self._held.clear()
        self.membership = Membership.restore(json.loads(self._journal), self.now)
        self._world.note(self, "is back, and knows generation %d", self.membership.generation)
        self._plan_look()
