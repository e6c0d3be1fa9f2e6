"""Tests of an elastic job with a generation that sends no heartbeats but may still be at work."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gradwire.membership.coordinator.state_machine import SILENT_GRACE, Membership
from gradwire.membership.types import Assembly, Waiting
from support.membership_claims import RUN, order, pass_time, waits, worker

LEASE = 10.0


def at_work(names: str) -> Membership:
    """Return a job whose first generation has just formed, and whose members have received their Assembly."""
    state = Membership("job", RUN, start=len(names), minimum=1, maximum=4, lease=LEASE)
    for name in names:
        state.register(worker(name), 0.0)
    for name in names:
        assert isinstance(state.register(worker(name), 0.0), Assembly)
    return state


def wait_in_queue(state: Membership, name: str, since: float, until: float) -> None:
    """Let a newcomer claim every second second."""
    now = since
    while now < until:
        now = pass_time(state, now, min(until, now + 2.0))
        assert isinstance(state.register(worker(name), now), Waiting)


def test_queue_does_not_start_over_beside_a_generation_that_is_only_silent() -> None:
    state = at_work("ab")
    wait_in_queue(state, "x", 0.0, LEASE + 2.0)
    assert state.news().evicted == ("a", "b")
    assert "s for rank 0 (host host, pid 7), rank 1" in waits(state.outcome(worker("x"), LEASE + 2.0))
    assert state.generation == 1
    assert state.heartbeat("ab", LEASE + 2.0).evicted == (), "its members were at work all the time"


def test_member_of_a_silent_generation_that_returns_takes_the_queue_along() -> None:
    state = at_work("ab")
    wait_in_queue(state, "x", 0.0, LEASE + 2.0)
    assert order(state.register(worker("b", 1), LEASE + 2.0)) == ["b", "x"]


def test_queue_starts_over_when_the_silent_generation_is_gone() -> None:
    state = at_work("ab")
    wait_in_queue(state, "x", 0.0, LEASE + 2.0)
    state.gone("ab", LEASE + 2.0)
    assert order(state.register(worker("x"), LEASE + 3.0)) == ["x"]


def test_silent_generation_is_given_up_after_a_limit() -> None:
    state = at_work("ab")
    wait_in_queue(state, "x", 0.0, LEASE + SILENT_GRACE - 1.0)
    now = pass_time(state, LEASE + SILENT_GRACE - 1.0, LEASE + SILENT_GRACE + 1.0)
    assert order(state.register(worker("x"), now)) == ["x"]


def test_dropped_member_is_needed_when_the_others_are_dead() -> None:
    """b is in a back-off, and a continues without it and dies. b still has a later state than a newcomer."""
    state = at_work("ab")
    state.register(worker("x"), 1.0)
    state.register(worker("a", 1, lost="b"), 1.0)
    state.register(worker("b", 1), 1.0)
    assert [member.id for member in state.members] == ["a", "x"]
    state.register(worker("y"), 1.1)
    state.gone("ax", 1.5)
    assert order(state.register(worker("b", 1), 1.6)) == ["b", "y"]


def test_member_that_missed_a_generation_that_is_over_gets_the_next() -> None:
    """b has not received the Assembly of generation 2 when a returns from it. Both go directly to generation 3."""
    state = at_work("ab")
    state.register(worker("b", 1), 1.0)
    assert isinstance(state.register(worker("a", 1), 1.0), Assembly)
    state.register(worker("a", 2), 2.0)
    news = state.heartbeat("a", 2.0)
    assert (news.generation, news.over) == (2, True)
    restarted = Membership.restore(state.snapshot(), 2.5)
    assert restarted.news().over, "a generation that is over stays over"
    outcome = state.register(worker("b", 1), 3.0)
    assert order(outcome) == ["a", "b"]
    assert state.generation == 3


def test_survivor_that_never_got_the_state_does_not_continue_alone() -> None:
    """x has joined a, and a freezes before x has the state. x must not begin again alone, whatever it reports."""
    state = at_work("a")
    state.register(worker("x"), 1.0)
    assert order(state.register(worker("a", 1), 1.0)) == ["a", "x"]
    lacks_state = replace(worker("x", 2, lost="a"), lacks_state=True)
    state.register(lacks_state, 1.0)
    now = 1.0
    for _ in range(3):
        now = pass_time(state, now, now + 2.0)
        assert "no other has the state" in waits(state.register(lacks_state, now))
    assert order(state.register(worker("a", 2), now)) == ["x", "a"]


def test_survivor_that_has_the_state_continues_alone() -> None:
    state = at_work("a")
    state.register(worker("x"), 1.0)
    state.register(worker("a", 1), 1.0)
    state.register(worker("x", 2, lost="a"), 2.0)
    assert order(state.register(worker("x", 2, lost="a"), pass_time(state, 2.0, 4.0))) == ["x"]


def test_two_members_that_never_reach_each_other_do_not_block_the_job() -> None:
    """Only a and b have the state, and never reach each other. After some tries a continues without b."""
    state = at_work("ab")
    state.register(worker("x"), 0.5)
    for now in (1.0, 2.0, 3.0):
        for name, lost in {"a": "b", "b": "a", "x": ""}.items():
            if name in [member.id for member in state.members]:
                claim = replace(worker(name, state.generation, lost=lost), lacks_state=True, run=state.terms.run)
                state.register(claim, now)
        if now == 1.0:
            assert [member.id for member in state.members] == ["a", "b", "x"], "they form a generation once more"
    assert [member.id for member in state.members] == ["a", "x"]


def test_silent_member_can_leave() -> None:
    state = at_work("ab")
    now = 0.0
    while now <= LEASE:
        now += 1.0
        state.heartbeat("a", now)
    assert state.news().evicted == ("b",)
    assert state.leave(worker("b").member, now)
    assert state.heartbeat("ab", now).evicted == (), "it has left, and was not evicted"
    assert order(state.register(worker("a", 1), now)) == ["a"]


def without(state: Membership, dropped: str, left: str) -> None:
    """At 1 s a generation forms without a member that others could not reach. At 3 s all other members have died."""
    for name in left:
        state.register(worker(name, 1, dropped), 1.0)
    pass_time(state, 1.0, 3.0)
    assert [member.id for member in state.members] == list(left)
    state.gone(left, 3.0)


@pytest.mark.parametrize("restarted", [False, True])
def test_queue_does_not_start_over_while_a_dropped_member_may_be_alive(restarted: bool) -> None:
    state = at_work("abc")
    without(state, "c", "ab")
    if restarted:
        state = Membership.restore(json.loads(json.dumps(state.snapshot())), 3.0)
    wait_in_queue(state, "x", 3.0, 9.0)
    assert "s for rank 2 (host host, pid 7): no other has" in waits(state.register(worker("x"), 9.0))
    state.register(worker("c", 1), 9.0)
    assert order(state.register(worker("c", 1), pass_time(state, 9.0, 10.0))) == ["c", "x"]


def test_dropped_silent_member_is_given_up_after_a_limit() -> None:
    state = at_work("abc")
    without(state, "c", "ab")
    wait_in_queue(state, "x", 3.0, LEASE + SILENT_GRACE)
    now = pass_time(state, LEASE + SILENT_GRACE, LEASE + SILENT_GRACE + 3.0)
    assert order(state.register(worker("x"), now)) == ["x"]


def test_dropped_member_that_died_is_not_waited_for() -> None:
    state = at_work("abc")
    without(state, "c", "ab")
    state.gone("c", 3.0)
    state.register(worker("x"), 3.0)
    assert order(state.register(worker("x"), pass_time(state, 3.0, 4.0))) == ["x"]


def test_dropped_member_is_not_waited_for_by_members_with_the_same_state() -> None:
    state = at_work("abcd")
    without(state, "cd", "ab")
    state.register(worker("c", 1), 3.0)
    assert order(state.register(worker("c", 1), pass_time(state, 3.0, 4.0))) == ["c"]


def test_death_of_a_dropped_member_is_in_the_journal() -> None:
    state = at_work("abc")
    for name in "ab":
        state.register(worker(name, 1, "c"), 1.0)
    pass_time(state, 1.0, 3.0)
    assert [member.id for member in state.members] == ["a", "b"]
    state.changes()
    state.gone("c", 3.0)
    assert [(change.kind, change.member, change.lasting) for change in state.changes()] == [("went", "c", True)]
    assert state.snapshot()["outside"] == []
