"""Implements the calls to the coordinator: join tokens, the membership, and the journal before each answer.

This module does no I/O and has no clock and no locks: the journal is a function that is passed in, and time is an
argument. `CoordinatorServicer` uses it with gRPC, SQLite and threads, the simulator with simulated calls and a
simulated disk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gradwire.errors import JournalError
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.types import Change, CheckpointStatus, Claim, Member, News, Outcome, Refusal
from gradwire.security.tokens import TokenGate

T = TypeVar("T")
Save = Callable[[Sequence[Change], Mapping[str, Any]], None]
Report = Callable[[Sequence[Change]], None]


class Denied(Exception):
    """The caller may not make calls for the member that it names."""


class CallRules:
    """Answers calls. When a method returns, its changes are in the journal, so the answer may be sent.

    `save` writes an entry or raises `JournalError`. After that error no call is answered any more, because an answer
    must stay true after a restart of the coordinator. `report` is called with changes that are in the journal.
    """

    def __init__(self, membership: Membership, save: Save, report: Report) -> None:
        self.membership = membership
        self.failure: JournalError | None = None
        self._gate = TokenGate(membership.terms.job)
        self._gate_changed = False
        self._save = save
        self._report = report
        self._calls = itertools.count(1)

    def resume(self, snapshot: Mapping[str, Any], now: float) -> None:
        """Continue from the state in a journal. The lease is that of this start, not the one in the journal."""
        terms = self.membership.terms
        self.membership = Membership.restore(snapshot, now)
        self.membership.terms = replace(self.membership.terms, lease=terms.lease, lasting=terms.lasting)
        self._gate = TokenGate(self.membership.terms.job)
        self._gate.restore(snapshot["tokens"], [member.id for member in self.membership.members])

    def snapshot(self) -> dict[str, Any]:
        """Return the state that the journal must hold."""
        return self.membership.snapshot() | {"tokens": self._gate.snapshot()}

    # -- calls

    def next_call(self) -> int:
        """Return the sequence number for a new claim. Later numbers are greater."""
        return next(self._calls)

    def register(self, claim: Claim, ticket: bytes, now: float, time_of_day: float) -> Outcome:
        """Register a claim that proved the job's secret, or a join token's key if there is a `ticket`.

        A use of the token counts only if the claim is accepted.
        """
        self._check_journal()
        name = claim.member.id
        reason = self._gate.refusal(ticket, name, time_of_day, self.membership.knows) if ticket else None
        if reason is not None:
            return Refusal(reason)
        outcome = self.membership.register(claim, now)
        if not isinstance(outcome, Refusal):
            self._gate_changed |= self._gate.admit(ticket, name)
        return self._recorded(outcome)

    def outcome(self, claim: Claim, now: float) -> Outcome:
        """Return the current answer to a claim whose reply was delayed."""
        self._check_journal()
        return self._recorded(self.membership.outcome(claim, now))

    def withdraw(self, claim: Claim) -> None:
        """Free the place of a claim whose caller disconnected during the delay."""
        self._check_journal()
        self.membership.withdraw(claim)
        self._recorded(None)

    def leave(self, member: Member, ticket: bytes, now: float, *, finished: bool = False, run: bytes = b"") -> bool:
        """Record that a member leaves. Return False if there is no member that is exactly this process."""
        self._check_journal()
        self._check_caller(ticket, member.id)
        return self._recorded(self.membership.leave(member, now, finished=finished, run=run))

    def heartbeat(self, ids: Iterable[str], gone: Iterable[str], run: bytes, ticket: bytes, now: float) -> News:
        """Process a heartbeat that names live members of `run` and members that are gone, and return the news.

        Ids that the caller's join token does not cover are ignored, and the news lists them as unknown: they may be
        about to register.
        """
        self._check_journal()
        ids = list(ids)
        covered, covered_gone = ([n for n in names if self._gate.may_act_for(ticket, n)] for names in (ids, gone))
        if covered_gone:
            self.membership.gone(covered_gone, now, run)
        news = self.membership.heartbeat(covered, now, run)
        others = sorted(set(ids).difference(covered))
        return self._recorded(replace(news, unknown=(*news.unknown, *others)) if others else news)

    def start_checkpoint(self, epoch: int, name: str, ticket: bytes, now: float) -> CheckpointStatus | Refusal:
        self._check_journal()
        self._check_caller(ticket, name)
        return self._recorded(self.membership.start_checkpoint(epoch, name, now))

    def end_checkpoint(self, epoch: int, name: str, ticket: bytes, now: float) -> CheckpointStatus | Refusal:
        self._check_journal()
        self._check_caller(ticket, name)
        return self._recorded(self.membership.end_checkpoint(epoch, name, now))

    def tick(self, now: float) -> None:
        """Process the passing of time. Call this when the membership is `due`."""
        self._check_journal()
        self.membership.tick(now)
        self._recorded(None)

    # -- rules

    def _check_journal(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _check_caller(self, ticket: bytes, name: str) -> None:
        if not self._gate.may_act_for(ticket, name):
            raise Denied(f"{name} did not join with the caller's join token")

    def _recorded(self, answer: T) -> T:
        """Write lasting changes to the journal, then return the answer."""
        changes = self.membership.changes()
        self._count_uses(changes)
        if self._gate_changed or any(change.lasting for change in changes):
            self._gate_changed = False
            try:
                self._save(changes, self.snapshot())
            except JournalError as error:
                self.failure = error
                raise
        if changes:
            self._report(changes)
        return answer

    def _count_uses(self, changes: Sequence[Change]) -> None:
        """Count a use of a join token when its member is in a generation, but not if the member left before that."""
        if any(change.kind == "formed" for change in changes):
            self._gate.registered(member.id for member in self.membership.members)
        for change in changes:
            if change.kind == "went" and change.member and not self.membership.knows(change.member):
                self._gate_changed |= self._gate.release(change.member)
