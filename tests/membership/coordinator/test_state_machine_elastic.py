"""Tests of an elastic job's membership: the next generation, reasons to wait, and removed members."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gradwire.errors import InvalidSize
from gradwire.membership.coordinator.clock import LONGEST_STEP
from gradwire.membership.coordinator.roster import BACKOFF, LONGEST_BACKOFF
from gradwire.membership.coordinator.state_machine import MINORITY_GRACE, NEWCOMER_SECONDS, Membership
from gradwire.membership.types import Assembly, Cause, News, Refusal
from support.membership_claims import RUN, order, pass_time, reason, waits, worker

SETTLE = 0.1
LEASE = 10.0


def elastic(start: int = 4, minimum: int = 2, maximum: int = 8) -> Membership:
    return Membership("job", RUN, start=start, minimum=minimum, maximum=maximum, lease=LEASE, settle=SETTLE)


def at_work(names: str = "abcd", minimum: int = 2, maximum: int = 8) -> Membership:
    """Return a job whose first generation has just formed."""
    state = elastic(len(names), minimum, maximum)
    for name in names:
        state.register(worker(name), 0.0)
    assert [member.id for member in state.members] == list(names)
    assert state.generation == 1
    return state


def back(state: Membership, now: float, lost: dict[str, Sequence[str]] | str, generation: int = 1) -> None:
    """Register survivors for the next generation, with the members that each could not reach."""
    for name in lost:
        state.register(worker(name, generation, lost[name] if isinstance(lost, dict) else ()), now)


def members(state: Membership) -> str:
    return "".join(member.id for member in state.members)


def test_first_generation_forms_with_the_expected_number() -> None:
    state = elastic(3)
    assert (
        waits(state.register(worker("a"), 0.0))
        == "1 of 3 members have registered; 2 are enough if no other registers for 30 s"
    )
    state.register(worker("b"), 0.0)
    assert order(state.register(worker("c"), 0.0)) == ["a", "b", "c"]


def test_first_generation_forms_with_fewer_after_a_while() -> None:
    state = elastic(4)
    claims = [worker("late"), replace(worker("b"), member=replace(worker("b").member, rank=3)), worker("c")]
    now = 0.0
    for claim in claims:
        now = pass_time(state, now, now + 1.0)
        state.register(claim, now)
    until = now + NEWCOMER_SECONDS
    while now < until - 1.0:
        now = pass_time(state, now, now + 1.0)
        assert not isinstance(state.register(claims[0], now), Assembly)
        for claim in claims[1:]:
            state.register(claim, now)
    state.tick(until)
    assert order(state.outcome(claims[0], until)) == ["late", "c", "b"], "a member that asked for a high rank is last"
    assert isinstance(state.register(claims[1], until), Assembly), "it may ask again, although its rank moved up"


def test_next_generation_keeps_the_order_of_survivors_and_appends_newcomers() -> None:
    state = at_work("abcd")
    assert "it can join between two steps" in waits(state.register(worker("y"), 1.0))
    state.register(worker("x"), 1.0)
    assert state.heartbeat("abcd", 1.0).joiners == 2
    state.gone(["b"], 1.0)
    back(state, 1.0, "dc")
    assert "waits for rank 0 (host host, pid 7) of generation 1" in waits(state.outcome(worker("d", 1), 1.0))
    assert order(state.register(worker("a", 1), 1.0)) == ["a", "c", "d", "y", "x"]
    assert order(state.outcome(worker("y"), 1.0)) == ["a", "c", "d", "y", "x"]
    assert state.generation == 2
    assert state.members[1].address == worker("c", 1).member.address, "its current address"


@pytest.mark.parametrize("cause", ["left", "gone", "silent", "accused"])
def test_next_generation_forms_without_removed_members(cause: Cause) -> None:
    state = at_work("abc")
    now = 1.0
    if cause == "left":
        state.leave(worker("b").member, now)
    elif cause == "gone":
        state.gone("b", now)
    elif cause == "silent":
        while now < LEASE:
            now = pass_time(state, now, now + 1.0)
            assert state.generation == 1
            news = state.heartbeat("ac", now)
        assert news.evicted == ("b",)
    back(state, now, {"a": "b" if cause == "accused" else "", "c": ""})
    now = pass_time(state, now, now + SETTLE)
    assert members(state) == "ac"
    assert [change.member for change in state.changes() if change.kind == cause] == ["b"]


def test_next_generation_waits_while_a_member_may_still_return() -> None:
    state = at_work("abc")
    back(state, 0.0, "ab")
    now = 0.0
    while now < 100.0:
        now = pass_time(state, now, now + 1.0)
        back(state, now, "ab")
        assert state.heartbeat("c", now) == News(1, 0, (), None, over=True)
    assert order(state.register(worker("c", 1), now)) == ["a", "b", "c"]


def test_member_that_is_reported_lost_may_return_for_a_moment() -> None:
    state = at_work("abcd")
    back(state, 1.0, {"a": "d", "b": "", "c": ""})
    assert state.due() == pytest.approx(1.0 + SETTLE)
    state.tick(1.0 + SETTLE / 2)
    assert state.generation == 1
    state.tick(1.0 + SETTLE)
    assert members(state) == "abc"


def test_minority_waits_longer_for_members_that_it_calls_lost() -> None:
    state = at_work("abcd", minimum=1)
    back(state, 1.0, {"a": "bcd"})
    state.tick(1.0 + MINORITY_GRACE / 2)
    assert state.generation == 1
    back(state, 1.6, {"b": "a", "c": "a", "d": "a"})
    assert members(state) == "bcd", "three members report one"


def test_minority_continues_alone_if_no_lost_member_returns() -> None:
    state = at_work("abc", minimum=1)
    back(state, 1.0, {"a": "bc"})
    assert state.due() == pytest.approx(1.0 + MINORITY_GRACE)
    pass_time(state, 1.0, 1.0 + MINORITY_GRACE)
    assert members(state) == "a"


@pytest.mark.parametrize(
    ("reports", "left"),
    [
        ({"a": "d", "b": "", "c": "", "d": "a"}, "abc"),  # a tie drops the higher rank
        ({"a": "", "b": "", "c": "", "d": "a"}, "bcd"),  # one report, and none about its sender
        ({"a": "bcd", "b": "a", "c": "a", "d": "a"}, "bcd"),  # more reports
        (
            {"a": "", "b": "acd", "c": "b", "d": ""},
            "acd",
        ),  # only the first member to notice reports the others
        ({"a": "bcd", "b": "", "c": "", "d": ""}, "bcd"),  # a member that reaches no other is the one that is removed
        ({"a": "cd", "b": "cd", "c": "ab", "d": "ab"}, "ab"),  # two halves that cannot reach each other
        ({"a": "aaa", "b": "", "c": "", "d": ""}, "abcd"),  # a report about oneself does not count
        ({"a": ["d", "d", "d"], "b": "", "c": "", "d": ["b", "stranger"]}, "abc"),  # repeated reports count once
    ],
)
def test_mutual_complaints_drop_the_member_with_more_of_them(reports: dict[str, Sequence[str]], left: str) -> None:
    state = at_work("abcd")
    back(state, 1.0, reports)
    assert members(state) == left


@pytest.mark.parametrize(
    ("stateless", "reports", "left"),
    [
        ("bcd", {"a": "", "b": "a", "c": "", "d": ""}, "acd"),  # one joiner cannot reach the only member with the state
        ("bcd", {"a": "bcd", "b": "a", "c": "a", "d": "a"}, "a"),  # no joiner can
        ("cd", {"a": "bcd", "b": "a", "c": "a", "d": "a"}, "bcd"),  # another member has it too, and reaches all others
        ("cd", {"a": "bcd", "b": "acd", "c": "ab", "d": "ab"}, "a"),  # two members have it, and reach no other
    ],
)
def test_last_holder_of_the_state_stays_although_joiners_cannot_reach_it(
    stateless: str, reports: dict[str, str], left: str
) -> None:
    state = at_work("abcd", minimum=1)
    for name, lost in reports.items():
        state.register(replace(worker(name, 1, lost), lacks_state=name in stateless), 1.0)
    assert members(state) == left


def test_member_that_never_learned_of_its_admission_does_not_hold_the_state() -> None:
    state = at_work("a", minimum=1)
    for name in "bc":
        state.register(worker(name), 1.0)
    back(state, 2.0, "a")
    assert members(state) == "abc"
    state.register(worker("c"), 2.1)
    state.register(replace(worker("c", 2, "a"), lacks_state=True), 3.0)  # c cannot reach a
    state.register(worker("a", 2), 3.1)
    state.register(worker("b"), 3.2)  # asks again: it did not receive the Assembly of generation 2
    assert members(state) == "ab"


def test_member_that_was_stopped_and_returns_is_not_dropped() -> None:
    """Two of three were stopped for a moment. The third reports both, and must not be removed for that."""
    state = at_work("abc")
    back(state, 1.0, {"b": "ac"})
    for name in "ac":
        state.register(replace(worker(name, 1), stood_still=True), 1.1)
    assert members(state) == "abc"


def test_member_that_was_stopped_is_dropped_if_the_next_generation_fails() -> None:
    state = at_work("abc")
    back(state, 1.0, {"a": "c", "b": "c"})
    state.register(replace(worker("c", 1), stood_still=True), 1.1)
    assert members(state) == "abc"
    back(state, 2.0, {"a": "c", "b": "c", "c": "ab"}, generation=2)
    assert members(state) == "ab"


def test_member_that_was_cut_off_may_join_again_after_a_growing_rest() -> None:
    state = at_work("ab", minimum=1)
    now, rest = 1.0, BACKOFF
    for generation in range(1, 20, 2):
        back(state, now, {"a": "b", "b": "a"}, generation)
        assert members(state) == "a"
        claim = worker("b", generation)
        assert "other members could not reach it; it may join again in" in waits(state.outcome(claim, now))
        until = now + rest
        while now < until - 1.0:
            now = pass_time(state, now, now + 1.0)
            state.register(claim, now)
            assert state.heartbeat("a", now).joiners == 0
        now = pass_time(state, now, until)
        assert state.heartbeat("a", now).joiners == 1
        assert order(state.register(worker("a", generation + 1), now)) == ["a", "b"]
        rest = min(LONGEST_BACKOFF, 2 * rest)


def test_joiner_that_breaks_each_generation_backs_off_longer_each_time() -> None:
    """It returns only after the others have formed a generation without it, and asks again."""
    state = at_work("ab", minimum=1)
    now, last, rests = 1.0, 0, []
    for generation in (1, 3, 5):
        began = now
        while not state.heartbeat("ab", now).joiners:
            state.register(worker("x", last), now)
            now = pass_time(state, now, now + 1.0)
        rests.append(now - began)
        back(state, now, {"a": "", "b": ""}, generation)
        assert members(state) == "abx"
        last = generation + 1
        back(state, now, {"a": "x", "b": "x"}, last)
        now = pass_time(state, now, now + 1.0)
        assert members(state) == "ab"
    assert rests == [1.0, BACKOFF, 2 * BACKOFF]


def test_below_the_minimum_all_wait_with_a_reason() -> None:
    state = at_work("abc", minimum=3)
    state.gone("c", 1.0)
    state.register(worker("a", 1), 1.0)
    assert waits(state.register(worker("b", 1), 1.0)) == "2 of at least 3 members have registered"
    assert order(state.register(worker("x"), 2.0)) == ["a", "b", "x"]


def test_full_job_admits_a_newcomer_only_after_a_member_leaves() -> None:
    state = at_work("ab", maximum=2)
    assert (
        waits(state.register(worker("x"), 1.0))
        == "the job is full (2 of at most 2 members); 0 processes are before it in the queue"
    )
    assert (
        waits(state.register(worker("y"), 1.0))
        == "the job is full (2 of at most 2 members); 1 processes are before it in the queue"
    )
    assert state.heartbeat("ab", 1.0).joiners == 0
    state.leave(worker("a").member, 2.0)
    assert state.heartbeat("b", 2.0).joiners == 1
    assert order(state.register(worker("b", 1), 2.0)) == ["b", "x"]
    assert (
        waits(state.outcome(worker("y"), 2.0))
        == "the job is full (2 of at most 2 members); 0 processes are before it in the queue"
    )


def test_member_that_was_frozen_returns_as_a_newcomer() -> None:
    state = at_work("abc")
    back(state, 1.0, {"a": "b", "c": "b"})
    state.tick(1.0 + SETTLE)
    thawed = worker("b", 1, lost="ac")
    assert "it can join between two steps" in waits(state.register(thawed, 3.0))
    assert state.heartbeat("ac", 3.0) == News(2, 1, (), None)
    back(state, 3.0, "ac", generation=2)
    assert order(state.outcome(thawed, 3.0)) == ["a", "c", "b"]


def test_silent_member_returns_if_no_generation_formed_without_it() -> None:
    for comes_back in (True, False):
        state = at_work("abc")
        for now in range(1, 11):
            state.heartbeat("ac", float(now))
        assert state.news().evicted == ("b",)
        if comes_back:
            assert "waits for rank 0" in waits(state.register(worker("b", 1), 10.0))
        else:
            state.heartbeat("b", 10.0)
        assert state.news().evicted == ()
        back(state, 11.0, "abc")
        assert members(state) == "abc"


def test_silent_member_that_was_restarted_cannot_return() -> None:
    state = at_work("ab", minimum=1)
    for now in range(1, 11):
        state.heartbeat("a", float(now))
    state.register(worker("b", pid=8, session="restarted"), 10.0)
    assert state.heartbeat("ab", 10.0) == News(1, 1, ("b",), None)
    assert order(state.register(worker("a", 1), 10.0)) == ["a", "b"]


def test_queue_forms_the_next_generation_when_all_members_are_removed() -> None:
    state = at_work("ab")
    state.register(worker("x"), 1.0)
    state.gone("ab", 1.0)
    assert waits(state.outcome(worker("x"), 1.0)) == "1 of at least 2 members have registered"
    assert order(state.register(worker("y"), 2.0)) == ["x", "y"]
    assert state.generation == 2


def test_pause_of_the_coordinator_ends_no_lease() -> None:
    state = at_work("ab")
    state.heartbeat("ab", 1.0)
    state.tick(1.0 + 10 * LEASE)
    assert state.news().evicted == ()
    assert LONGEST_STEP < LEASE


def test_lost_answer_is_given_again() -> None:
    state = at_work("ab")
    claim = worker("a", 1)
    back(state, 1.0, "ab")
    assert order(state.register(claim, 2.0)) == ["a", "b"]
    assert order(state.register(claim, 2.0)) == ["a", "b"]
    assert state.generation == 2


def test_process_that_registers_with_a_new_session_gives_up_its_place() -> None:
    state = at_work("ab")
    again = worker("b", session="another try")
    assert "1 of" not in waits(state.register(again, 1.0))
    assert state.heartbeat("a", 1.0) == News(1, 1, ("b",), None)
    assert order(state.register(worker("a", 1, lost="b"), 1.0)) == ["a", "b"]
    assert order(state.outcome(again, 1.0)) == ["a", "b"]


def test_late_claim_does_not_undo_a_newer_one() -> None:
    state = at_work("ab")
    back(state, 1.0, "ab")
    assert "a later generation" in reason(state.register(worker("b", 0, session="late"), 2.0))
    assert state.news().evicted == ()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (worker("a", 1, session="x", pid=8), "the id 'a' is taken by rank 0 (host host, pid 7)"),
        (worker("a", 0, session="x", pid=8), "the id 'a' is taken by rank 0"),
        (worker("x", session="x", pid=8), "the id 'x' is taken by a worker (host host, pid 7)"),
        (worker("a", 2), "was in generation 2, and this coordinator only knows generation 1"),
        (worker("new", -1), "a generation must not be negative"),
        (worker(""), "id must not be empty"),
        (replace(worker("new"), size=5), "expects a job of 5 ranks, and this one has 2"),
        (replace(worker("new"), job="other"), "belongs to job 'other', and this is job 'job'"),
    ],
)
def test_register_that_does_not_fit_is_refused_and_changes_nothing(wrong: object, said: str) -> None:
    state = at_work("ab")
    state.register(worker("x"), 1.0)
    before = state.snapshot(), state.news()
    state.changes()
    assert said in reason(state.register(wrong, 1.0))  # type: ignore[arg-type]
    assert (state.snapshot(), state.news()) == before
    assert state.changes() == []


def test_restored_membership_continues_from_its_snapshot() -> None:
    state = at_work("abcd")
    state.gone("b", 1.0)
    state.start_checkpoint(3, "a", 1.0)
    restored = Membership.restore(json.loads(json.dumps(state.snapshot())), 1000.0)
    assert restored.snapshot() == state.snapshot()
    assert restored.heartbeat("acd", 1000.0) == state.heartbeat("acd", 1.0) == News(1, 0, ("b",), 3)
    assert order(restored.register(worker("a"), 1000.0)) == list("abcd"), "its Assembly may have been lost"
    back(restored, 1001.0, "acd")
    assert members(restored) == "acd"


def test_checkpoint_is_complete_when_all_live_members_have_reported() -> None:
    state = at_work("abc")
    status = state.start_checkpoint(5, "a", 0.0)
    assert status == state.start_checkpoint(5, "b", 0.0)
    assert (status.waiting_for, status.complete) == (("a", "b", "c"), False)  # type: ignore[union-attr]
    assert state.news().checkpoint == 5
    assert state.end_checkpoint(5, "b", 0.0).waiting_for == ("a", "c")  # type: ignore[union-attr]
    assert "epoch 5 is in progress and waits for a, c" in reason(state.start_checkpoint(6, "b", 0.0))
    assert state.end_checkpoint(5, "a", 0.0) == state.end_checkpoint(5, "a", 0.0)
    state.gone("c", 1.0)
    assert state.end_checkpoint(5, "a", 1.0).complete  # type: ignore[union-attr]
    assert state.news().checkpoint is None
    assert any("epoch 5 is complete" in change.text for change in state.changes())
    assert "'c' is not a live member" in reason(state.end_checkpoint(5, "c", 1.0))
    assert "no checkpoint of epoch 4; the last complete one is of epoch 5" in reason(
        state.start_checkpoint(4, "a", 1.0)
    )
    assert "no checkpoint of epoch -1" in reason(state.start_checkpoint(-1, "a", 1.0))


def test_checkpoint_outlives_its_generation_and_does_not_wait_for_newcomers() -> None:
    state = at_work("abc")
    state.start_checkpoint(1, "a", 0.0)
    state.end_checkpoint(1, "a", 0.0)
    state.register(worker("x"), 0.0)
    back(state, 0.0, {"a": "c", "b": "c"})
    state.tick(SETTLE)
    assert members(state) == "abx"
    assert state.end_checkpoint(1, "b", SETTLE).complete  # type: ignore[union-attr]


def test_checkpoint_without_a_writer_is_dropped() -> None:
    state = at_work("ab")
    state.start_checkpoint(1, "a", 0.0)
    state.gone("ab", 1.0)
    state.register(worker("x"), 1.0)
    state.register(worker("y"), 1.0)
    assert "no checkpoint of epoch 1" in reason(state.end_checkpoint(1, "x", 1.0))


@pytest.mark.parametrize(("start", "minimum", "maximum"), [(2, 3, 4), (5, 2, 4), (2, 0, 4)])
def test_invalid_sizes_raise(start: int, minimum: int, maximum: int) -> None:
    with pytest.raises(InvalidSize):
        elastic(start, minimum, maximum)


def test_finished_job_admits_no_newcomer_and_its_members_may_regroup() -> None:
    state = at_work("abc", minimum=1)
    state.register(worker("late"), 0.1)
    assert state.news().joiners == 1
    state.leave(worker("a").member, 0.2, finished=True)
    state = Membership.restore(json.loads(json.dumps(state.snapshot())), 0.3)
    assert state.news().joiners == 0
    for name in ("late", "later"):
        refused = state.register(worker(name), 0.3)
        assert reason(refused) == "all work of this job is done; no process can join any more"
        assert isinstance(refused, Refusal)
        assert refused.finished
    assert state.news().finished
    back(state, 0.4, {"b": ["c"]})
    pass_time(state, 0.4, 2.0)
    assert members(state) == "b"


def test_leave_before_the_end_makes_room_for_newcomers() -> None:
    state = at_work("abc")
    state.leave(worker("a").member, 0.2)
    state.register(worker("new"), 0.3)
    back(state, 0.3, "bc")
    assert members(state) == "bc" + "new"
