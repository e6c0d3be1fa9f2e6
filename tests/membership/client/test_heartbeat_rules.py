"""Tests of the members and the run that a launcher's heartbeats name."""

from __future__ import annotations

from gradwire.identity import new_run, next_run
from gradwire.membership.client.heartbeat_rules import Heartbeat, HeartbeatRules
from gradwire.membership.types import News

RUN = new_run()


def news(run: bytes = RUN, *, unknown: tuple[str, ...] = ()) -> News:
    return News(1, 0, (), None, run=run, unknown=unknown)


def answered(*ids: str) -> HeartbeatRules:
    rules = HeartbeatRules(ids)
    rules.answered(rules.next(), news())
    return rules


def test_next_names_live_members_and_omits_frozen_ones() -> None:
    rules = answered("a", "b")
    assert rules.next(frozen=["b"]) == Heartbeat(("a",), (), RUN)


def test_end_is_reported_until_it_is_confirmed() -> None:
    rules = answered("a", "b")
    rules.end(["b"])
    assert rules.next().gone == rules.next().gone == ("b",)
    assert rules.unconfirmed
    rules.answered(rules.next(), news())
    assert not rules.unconfirmed
    assert rules.next() == Heartbeat(("a",), (), RUN)


def test_end_of_a_member_before_the_reply_is_reported_in_the_next_heartbeat() -> None:
    rules = answered("a", "b")
    sent = rules.next()
    rules.end(["b"])
    rules.answered(sent, news())
    assert rules.next().gone == ("b",)


def test_next_for_a_coordinator_of_another_run_omits_members_of_the_old_run() -> None:
    rules = answered("a", "b")
    assert rules.answered(rules.next(), news(new_run(after=RUN), unknown=("a", "b"))) == "a"
    rules.watch(["c"])
    rules.end(["b"])
    sent = rules.next()
    assert (sent.ids, sent.gone, sent.unreported) == (("c",), (), ("b",))
    rules.answered(sent, news(sent.run, unknown=("c",)))
    assert not rules.unconfirmed


def test_next_for_a_replacement_run_names_all_members() -> None:
    rules = answered("a", "b")
    rules.end(["b"])
    assert rules.answered(rules.next(), news(next_run(RUN), unknown=("a",))) is None
    assert rules.next() == Heartbeat(("a",), ("b",), next_run(RUN))
