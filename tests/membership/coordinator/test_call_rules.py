"""Tests of the coordinator's calls: changes are journaled before the answer, and join tokens cover few members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from gradwire.errors import JournalError
from gradwire.membership.coordinator.call_rules import CallRules, Denied
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.types import Assembly, Change, Claim, Member, Refusal, Waiting
from gradwire.security.tokens import Ticket

JOB = "job"
TICKET = Ticket(JOB, 100, 1, Random(1).randbytes(12)).pack()


class Harness:
    """Records the order of journal entries and log lines."""

    def __init__(self, start: int = 2) -> None:
        self.order: list[str] = []
        self.saved: list[Mapping[str, Any]] = []
        self.full = False
        membership = Membership(JOB, bytes(16), start=start, minimum=1, maximum=4)
        self.rules = CallRules(membership, self.save, self.report)

    def save(self, changes: Sequence[Change], snapshot: Mapping[str, Any]) -> None:
        if self.full:
            raise JournalError("its disk is full")
        self.order.append("saved")
        self.saved.append(snapshot)

    def report(self, changes: Sequence[Change]) -> None:
        self.order += [change.kind for change in changes]

    def register(self, name: str, ticket: bytes = b"", now: float = 1.0, **facts: Any) -> object:
        return self.rules.register(replace(self.claim(name), **facts), ticket, now, time_of_day=now)

    def claim(self, name: str) -> Claim:
        member = Member(name, None, "host", "host", 1, "127.0.0.1:1")
        return Claim(member, None, None, name.encode().ljust(16), self.rules.next_call(), transport="auto")


def test_generation_is_saved_before_it_is_reported() -> None:
    harness = Harness()
    assert isinstance(harness.register("a"), Waiting)
    assert isinstance(harness.register("b"), Assembly)
    assert harness.order.index("saved") < harness.order.index("formed")
    assert harness.saved[-1]["generation"] == 1


def test_calls_after_a_journal_failure_are_not_answered() -> None:
    harness = Harness()
    harness.register("a")
    harness.full = True
    with pytest.raises(JournalError):
        harness.register("b")
    harness.full = False
    with pytest.raises(JournalError, match="its disk is full"):
        harness.register("c")
    with pytest.raises(JournalError, match="its disk is full"):
        harness.rules.heartbeat(["a"], [], b"", b"", 2.0)
    assert "formed" not in harness.order


def test_use_of_a_join_token_counts_when_its_claim_is_accepted() -> None:
    harness = Harness()
    harness.register("a")
    assert isinstance(harness.register("a", TICKET), Refusal), "the id is taken by a member with the secret"
    assert isinstance(harness.register("b", TICKET), Assembly)
    assert isinstance(harness.register("c", TICKET), Refusal)


def test_join_token_covers_only_members_that_joined_with_it() -> None:
    harness = Harness()
    harness.register("a")
    harness.register("b", TICKET)
    news = harness.rules.heartbeat(["a", "b"], ["a"], b"", TICKET, 2.0)
    assert (news.unknown, news.evicted) == (("a",), ())
    with pytest.raises(Denied, match="a did not join with the caller's join token"):
        harness.rules.leave(harness.claim("a").member, TICKET, 2.0)
    assert harness.rules.leave(harness.claim("b").member, TICKET, 2.0)


def test_join_token_that_took_a_free_id_covers_only_its_own_process() -> None:
    """A coordinator without its journal knows no ids, so a guest can register with the id of a member that waits."""
    harness = Harness()
    harness.register("b", TICKET, session=bytes(16))
    harness.register("a")
    news = harness.rules.heartbeat([], ["b"], b"", TICKET, 2.0)
    assert news.evicted == ("b",), "the guest has reported its own process as gone"
    assert isinstance(harness.register("b", now=3.0), Waiting), "the member with this id has come"
    again = harness.register("a", now=4.0, generation=1, run=bytes(16))
    assert isinstance(again, Assembly)
    assert [member.id for member in again.members] == ["a", "b"]
    news = harness.rules.heartbeat(["b"], ["b"], b"", TICKET, 5.0)
    assert (news.unknown, news.evicted) == (("b",), ())
    with pytest.raises(Denied):
        harness.rules.leave(harness.claim("b").member, TICKET, 5.0)


def test_resume_restores_members_and_tokens() -> None:
    harness = Harness()
    harness.register("a")
    harness.register("b", TICKET)
    again = Harness()
    again.rules.resume(harness.saved[-1], 5.0)
    assert again.rules.membership.generation == 1
    assert isinstance(again.register("c", TICKET, 6.0), Refusal)
