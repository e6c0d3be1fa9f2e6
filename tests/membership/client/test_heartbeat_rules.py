"""What a launcher's heartbeats say about the members of its host, run by run."""

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


def test_next_names_living_members_and_leaves_out_frozen_ones() -> None:
    rules = answered("a", "b")
    assert rules.next(frozen=["b"]) == Heartbeat(("a",), (), RUN)


def test_end_is_repeated_until_it_is_answered() -> None:
    rules = answered("a", "b")
    rules.end(["b"])
    assert rules.next().gone == rules.next().gone == ("b",)
    assert rules.unconfirmed
    rules.answered(rules.next(), news())
    assert not rules.unconfirmed
    assert rules.next() == Heartbeat(("a",), (), RUN)


def test_member_that_ended_while_the_answer_was_on_its_way_is_named_in_the_next_heartbeat() -> None:
    rules = answered("a", "b")
    sent = rules.next()
    rules.end(["b"])
    rules.answered(sent, news())
    assert rules.next().gone == ("b",)


def test_coordinator_of_another_run_hears_nothing_of_members_of_the_old_one() -> None:
    rules = answered("a", "b")
    assert rules.answered(rules.next(), news(new_run(after=RUN), unknown=("a", "b"))) == "a"
    rules.watch(["c"])
    rules.end(["b"])
    sent = rules.next()
    assert (sent.ids, sent.gone, sent.unreported) == (("c",), (), ("b",))
    rules.answered(sent, news(sent.run, unknown=("c",)))
    assert not rules.unconfirmed


def test_run_that_was_begun_in_place_of_another_is_asked_about_all_members() -> None:
    rules = answered("a", "b")
    rules.end(["b"])
    assert rules.answered(rules.next(), news(next_run(RUN), unknown=("a",))) is None
    assert rules.next() == Heartbeat(("a",), ("b",), next_run(RUN))
