"""Tests of a static job's membership: ranks, refusals, and when a place is freed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gradwire.errors import ConfigError, InvalidSize
from gradwire.membership.coordinator.roster import LAPSE
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.types import Assembly, Claim, Member, Refusal, format_ranks
from support.membership_claims import RUN, missing, pass_time, reason


def static(size: int = 3) -> Membership:
    return Membership("job", RUN, start=size)


def claim(
    rank: int | None, name: str | None = None, *, size: int = 3, job: str | None = None, session: bytes | None = None
) -> Claim:
    name = f"worker-{rank}" if name is None else name
    member = Member(name, rank, "machine", "host", 100 + (rank or 0), f"127.0.0.1:{5000 + (rank or 0)}")
    return Claim(member, size, job, name.encode() if session is None else session)


def test_register_gives_all_members_the_same_list_and_their_own_rank() -> None:
    state = static()
    assert missing(state.register(claim(2), 0.0)) == (0, 1)
    assert missing(state.register(claim(0), 0.1)) == (1,)
    last = state.register(claim(1), 0.2)
    assert last == Assembly("job", 1, 1, tuple(claim(r).member for r in range(3)), RUN, lease=10.0)
    assert isinstance(last, Assembly)
    assert state.register(claim(2), 0.3) == replace(last, rank=2)
    assert state.outcome(claim(0), 0.3) == replace(last, rank=0)


def test_register_without_a_rank_gets_the_lowest_free_rank() -> None:
    state = static(4)
    assert missing(state.register(claim(None, "first", size=4), 0.0)) == (1, 2, 3)
    assert missing(state.register(claim(None, "second", size=4), 0.0)) == (2, 3)
    assert missing(state.register(claim(0, size=4), 0.0)) == (3,)
    last = state.register(claim(3, size=4), 0.0)
    assert isinstance(last, Assembly)
    assert [(member.id, member.rank) for member in last.members] == [
        ("worker-0", 0),
        ("first", 1),
        ("second", 2),
        ("worker-3", 3),
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (claim(3), "rank 3 is out of range: a job of size 3 has ranks 0 to 2"),
        (claim(-1), "rank -1 is out of range"),
        (claim(1, size=4), "rank 1 (host host, pid 101) expects a job of 4 ranks, and this one has 3"),
        (claim(1, size=0), "expects a job of 0 ranks"),
        (claim(1, job="other"), "belongs to job 'other', and this is job 'job'"),
        (claim(1, ""), "id must not be empty"),
        (claim(1, "x" * 129), "id has at most 128 characters, not 129"),
        (claim(0, "new"), "rank 0 is taken by rank 0 (host host, pid 100)"),
        (claim(2, "worker-0", session=b"other"), "the id 'worker-0' is taken by rank 0"),
        (claim(2, "worker-0"), "now describes itself as"),
    ],
)
def test_register_that_does_not_fit_is_refused_and_changes_nothing(wrong: Claim, said: str) -> None:
    state = static()
    state.register(claim(0), 0.0)
    assert said in reason(state.register(wrong, 0.1))
    assert missing(state.outcome(claim(0), 0.1)) == (1, 2)
    state.register(claim(1, job="job"), 0.2)
    assert isinstance(state.register(claim(2), 0.3), Assembly)


def test_register_at_a_full_job_is_refused() -> None:
    state = static(1)
    state.register(claim(0, size=1), 0.0)
    assert reason(state.register(claim(0, "late", size=1), 1e6)).startswith("rank 0 is taken by rank 0")
    assert reason(state.register(claim(None, "late", size=1), 1e6)) == "all ranks of this job are taken"
    assert state.withdraw(claim(0, size=1)) is None
    assert isinstance(state.register(claim(0, size=1), 1e6), Assembly)


def test_unclaimed_place_is_free_after_a_while() -> None:
    state = static()
    state.register(claim(1), 10.0)
    now = pass_time(state, 10.0, 10.0 + LAPSE - 0.01)
    assert isinstance(state.register(claim(1, "new"), now), Refusal)
    state.register(claim(1), now)
    now = pass_time(state, now, now + LAPSE - 0.01)
    assert isinstance(state.register(claim(1, "new"), now), Refusal)
    now += 0.01
    assert missing(state.register(claim(1, "new"), now)) == (0, 2)
    assert isinstance(state.register(claim(1), now), Refusal)


def test_withdraw_frees_the_place_at_once() -> None:
    state = static()
    state.register(claim(1), 0.0)
    assert state.withdraw(claim(1)) == claim(1).member
    assert state.withdraw(claim(1)) is None
    assert missing(state.register(claim(1, "restarted"), 0.1)) == (0, 2)


def test_withdraw_of_an_old_call_does_not_free_a_renewed_claim() -> None:
    state = static()
    old, new = replace(claim(1), sequence=1), replace(claim(1), sequence=2)
    state.register(old, 0.0)
    state.register(new, 0.1)
    assert state.withdraw(old) is None
    assert state.withdraw(new) == claim(1).member


def test_leave_counts_only_from_the_member_itself() -> None:
    state = static()
    state.register(claim(1), 0.0)
    assert not state.leave(replace(claim(1).member, pid=1), 0.0)
    assert not state.leave(claim(2).member, 0.0)
    assert state.leave(claim(1).member, 0.0)
    assert not state.leave(claim(1).member, 0.0)
    assert missing(state.register(claim(1, "restarted"), 0.1)) == (0, 2)


def test_leave_after_the_start_keeps_the_assembly() -> None:
    state = static(1)
    state.register(claim(0, size=1), 0.0)
    assert state.leave(claim(0, size=1).member, 0.0)
    assert isinstance(state.register(claim(0, size=1), 0.1), Assembly)
    assert "all its members have left or were lost" in reason(state.register(claim(None, "late", size=1), 0.1))


def test_gone_before_the_start_frees_the_place_and_later_keeps_the_assembly() -> None:
    state = static(2)
    state.register(claim(1, size=2), 0.0)
    state.gone(["worker-1", "nobody"], 0.0)
    assert missing(state.register(claim(1, "restarted", size=2), 0.1)) == (0,)
    state.register(claim(0, size=2), 0.2)
    state.gone(["restarted"], 0.3)
    assert isinstance(state.register(claim(0, size=2), 1e6), Assembly)
    assert (state.generation, len(state.members)) == (1, 2)


@pytest.mark.parametrize(("transport", "lasting"), [("", False), ("auto", True)])
def test_static_job_silent_member_is_removed_and_returns_with_a_heartbeat(transport: str, lasting: bool) -> None:
    state = Membership("job", RUN, start=2, lease=5.0, lasting=lasting)
    for rank in range(2):
        found = state.register(replace(claim(rank, size=2), transport=transport), 0.0)
    assert isinstance(found, Assembly)
    assert found.lease == 5.0
    for now in range(1, 5):
        assert state.heartbeat(["worker-0"], float(now)).evicted == ()
    assert state.due() is not None
    assert state.heartbeat(["worker-0"], 5.0).evicted == ("worker-1",)
    assert (state.news().size, state.ended) == (1, False)
    assert state.heartbeat(["worker-1"], 6.0).evicted == ()
    assert state.leave(found.members[0], 6.0)
    pass_time(state, 6.0, 12.0)
    assert state.ended


def test_static_job_has_one_generation_and_no_leases_of_ranks_with_a_data_plane() -> None:
    state = static(1)
    found = state.register(replace(claim(0, size=1), transport="auto"), 0.0)
    assert isinstance(found, Assembly)
    assert found.lease == 0.0
    assert state.due() is None
    pass_time(state, 0.0, 100.0)
    assert state.heartbeat(["worker-0"], 100.0).evicted == ()
    again = replace(claim(0, size=1), generation=1, session=b"again", run=RUN)
    assert "start it with a minimum size" in reason(state.register(again, 100.0))


def test_stop_refuses_waiting_and_new_members() -> None:
    state = static()
    state.register(claim(1), 0.0)
    state.stop("over")
    assert state.uninformed(0.1)
    assert state.register(claim(2), 0.1) == Refusal("over")
    assert state.outcome(claim(1), 0.1) == Refusal("over")
    assert not state.uninformed(0.1)


def test_stop_still_answers_members_of_the_assembly() -> None:
    state = static(2)
    state.register(claim(0, size=2), 0.0)
    state.register(claim(1, size=2), 0.0)
    state.stop("over")
    assert state.uninformed(0.1)
    assert isinstance(state.register(claim(0, size=2), 0.1), Assembly)
    assert not state.uninformed(0.1)


def test_uninformed_ignores_members_that_no_longer_ask() -> None:
    state = static(2)
    state.register(claim(0, size=2), 0.0)
    state.register(claim(1, size=2), 0.0)
    assert state.uninformed(pass_time(state, 0.0, LAPSE - 0.1))
    assert not state.uninformed(LAPSE)


@pytest.mark.parametrize("size", [0, -1, 65_537])
def test_invalid_sizes_raise(size: int) -> None:
    with pytest.raises(InvalidSize, match="1 to 65536 ranks"):
        static(size)


def test_invalid_names_raise() -> None:
    with pytest.raises(ConfigError, match="job's name"):
        Membership("", RUN, start=1)
    with pytest.raises(ConfigError, match="16 bytes"):
        Membership("job", b"", start=1)


@given(st.permutations(range(7)), st.sets(st.integers(0, 6)))
def test_any_order_of_arrival_gives_every_member_a_rank(order: list[int], unnamed: set[int]) -> None:
    state = static(7)
    claims = {rank: claim(None if rank in unnamed else rank, f"w{rank}", size=7) for rank in order}
    for rank in order:
        state.register(claims[rank], 0.0)
    answers = {rank: state.outcome(claims[rank], 0.0) for rank in order}
    ranks = {rank: answer.rank for rank, answer in answers.items() if isinstance(answer, Assembly)}
    assert sorted(ranks.values()) == list(range(7))
    assert all(ranks[rank] == rank for rank in order if rank not in unnamed)


class AnyHistory(RuleBasedStateMachine):
    """Workers register, ask again, vanish, restart and leave in any order, and time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.state = static()
        self.now = 0.0
        self.waiting: dict[str, tuple[Claim, float]] = {}
        self.final: tuple[Member, ...] | None = None

    @rule(rank=st.sampled_from([0, 1, 2, None]), name=st.sampled_from("abcd"), session=st.sampled_from([b"1", b"2"]))
    def come(self, rank: int | None, name: str, session: bytes) -> None:
        asked = claim(rank, name, session=session)
        held = self.waiting.get(name)
        outcome = self.state.register(asked, self.now)
        if held is not None and self.now - held[1] < LAPSE and held[0] != asked:
            assert isinstance(outcome, Refusal), "a live place was overwritten"
        if not isinstance(outcome, Refusal):
            self.waiting[name] = (asked, self.now)
        if isinstance(outcome, Assembly):
            assert self.final in (None, outcome.members)
            self.final = outcome.members

    @precondition(lambda self: self.waiting and self.final is None)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        asked, _ = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        self.state.withdraw(asked)

    @precondition(lambda self: self.waiting and self.final is None)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        asked, _ = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        self.state.leave(asked.member, self.now)

    @rule(seconds=st.sampled_from([0.0, 1.0, LAPSE - 0.5, LAPSE, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.now = pass_time(self.state, self.now, self.now + seconds)

    @invariant()
    def no_rank_has_two_holders(self) -> None:
        live = [asked.member.rank for asked, at in self.waiting.values() if self.now - at < LAPSE]
        ranks = [rank for rank in live if rank is not None]
        assert len(ranks) == len(set(ranks))

    @invariant()
    def an_assembly_is_complete(self) -> None:
        if self.final is not None:
            assert [member.rank for member in self.final] == [0, 1, 2]
            assert len({member.id for member in self.final}) == 3


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_format_ranks_abbreviates_long_lists() -> None:
    assert format_ranks(range(1, 40)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 23 more"
