"""The rendezvous as a state machine: who gets which place, who is refused and why, and when a place is free again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gradwire.errors import ConfigError, InvalidSize
from gradwire.membership.members import Assembly, Member, named
from gradwire.membership.state import LAPSE, Claim, Refusal, Rendezvous, Waiting

RUN = b"r" * 16


def rendezvous(size: int = 3) -> Rendezvous:
    return Rendezvous(size, "job", RUN)


def claim(
    rank: int | None, name: str | None = None, *, size: int = 3, job: str | None = None, session: bytes | None = None
) -> Claim:
    name = f"worker-{rank}" if name is None else name
    member = Member(name, rank, "machine", "host", 100 + (rank or 0), f"127.0.0.1:{5000 + (rank or 0)}")
    return Claim(member, size, job, name.encode() if session is None else session)


def reason(outcome: object) -> str:
    assert isinstance(outcome, Refusal)
    return outcome.reason


def test_all_who_come_are_told_the_same_members_and_their_own_rank() -> None:
    state = rendezvous()
    assert state.claim(claim(2), 0.0) == Waiting((0, 1))
    assert state.claim(claim(0), 0.1) == Waiting((1,))
    last = state.claim(claim(1), 0.2)
    assert last == Assembly("job", 1, 1, tuple(claim(r).member for r in range(3)), RUN)
    assert isinstance(last, Assembly)
    assert state.claim(claim(2), 0.3) == replace(last, rank=2)
    assert state.outcome(claim(0)) == replace(last, rank=0)


def test_workers_without_a_rank_get_the_lowest_that_nobody_named() -> None:
    state = rendezvous(4)
    assert state.claim(claim(None, "first", size=4), 0.0) == Waiting((1, 2, 3))
    assert state.claim(claim(None, "second", size=4), 0.0) == Waiting((2, 3))
    assert state.claim(claim(0, size=4), 0.0) == Waiting((3,))
    last = state.claim(claim(3, size=4), 0.0)
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
        (claim(3), "rank 3 is out of range: a job of 3 has the ranks 0 to 2"),
        (claim(-1), "rank -1 is out of range"),
        (claim(1, size=4), "rank 1 (host host, pid 101) expects a job of 4 ranks, and this one has 3"),
        (claim(1, size=0), "expects a job of 0 ranks"),
        (claim(1, job="other"), "belongs to job 'other', and this is job 'job'"),
        (claim(1, ""), "id must not be empty"),
        (claim(1, "x" * 129), "id has at most 128 characters, not 129"),
        (claim(0, "new"), "rank 0 is taken by rank 0 (host host, pid 100)"),
        (claim(2, "worker-0", session=b"other"), "the id 'worker-0' is taken by rank 0"),
        (claim(2, "worker-0"), "came back as something else"),
    ],
)
def test_whoever_does_not_belong_is_refused_and_changes_nothing(wrong: Claim, said: str) -> None:
    state = rendezvous()
    state.claim(claim(0), 0.0)
    assert said in reason(state.claim(wrong, 0.1))
    assert state.outcome(claim(0)) == Waiting((1, 2))
    state.claim(claim(1, job="job"), 0.2)
    assert isinstance(state.claim(claim(2), 0.3), Assembly)


def test_a_full_job_is_final() -> None:
    state = rendezvous(1)
    state.claim(claim(0, size=1), 0.0)
    assert reason(state.claim(claim(0, "late", size=1), 1e6)).startswith("rank 0 is taken by rank 0")
    assert reason(state.claim(claim(None, "late", size=1), 1e6)) == "all ranks of this job are taken"
    assert state.withdraw(claim(0, size=1)) is None
    assert isinstance(state.claim(claim(0, size=1), 1e6), Assembly)


def test_a_place_that_nobody_claims_any_more_is_free_after_a_while() -> None:
    state = rendezvous()
    state.claim(claim(1), 10.0)
    assert isinstance(state.claim(claim(1, "new"), 10.0 + LAPSE - 0.01), Refusal)
    state.claim(claim(1), 12.0)
    assert isinstance(state.claim(claim(1, "new"), 12.0 + LAPSE - 0.01), Refusal)
    assert state.claim(claim(1, "new"), 12.0 + LAPSE) == Waiting((0, 2))
    assert isinstance(state.claim(claim(1), 12.0 + LAPSE), Refusal)


def test_a_worker_that_is_gone_frees_its_place_at_once() -> None:
    state = rendezvous()
    state.claim(claim(1), 0.0)
    assert state.withdraw(claim(1)) == claim(1).member
    assert state.withdraw(claim(1)) is None
    assert state.claim(claim(1, "restarted"), 0.1) == Waiting((0, 2))


def test_the_end_of_an_old_call_does_not_free_what_was_claimed_again() -> None:
    state = rendezvous()
    old, new = replace(claim(1), sequence=1), replace(claim(1), sequence=2)
    state.claim(old, 0.0)
    state.claim(new, 0.1)
    assert state.withdraw(old) is None
    assert state.withdraw(new) == claim(1).member


def test_only_a_member_itself_can_unregister() -> None:
    state = rendezvous()
    state.claim(claim(1), 0.0)
    assert not state.unregister(replace(claim(1).member, pid=1))
    assert not state.unregister(claim(2).member)
    assert state.unregister(claim(1).member)
    assert not state.unregister(claim(1).member)
    assert state.claim(claim(1, "restarted"), 0.1) == Waiting((0, 2))


def test_leaving_after_the_start_keeps_the_assembly() -> None:
    state = rendezvous(1)
    state.claim(claim(0, size=1), 0.0)
    assert state.unregister(claim(0, size=1).member)
    assert state.assembled


def test_stopped_refuses_those_who_wait_and_those_who_come() -> None:
    state = rendezvous()
    state.claim(claim(1), 0.0)
    state.stop("over")
    assert state.uninformed(0.1)
    assert state.claim(claim(2), 0.1) == Refusal("over")
    assert state.outcome(claim(1)) == Refusal("over")
    assert not state.uninformed(0.1)


def test_stopped_still_tells_the_assembly_and_who_has_not_heard_it() -> None:
    state = rendezvous(2)
    state.claim(claim(0, size=2), 0.0)
    state.claim(claim(1, size=2), 0.0)
    state.stop("over")
    assert state.uninformed(0.1)
    assert not state.uninformed(LAPSE)
    assert isinstance(state.claim(claim(0, size=2), 0.1), Assembly)
    assert not state.uninformed(0.1)


@pytest.mark.parametrize("size", [0, -1, 65_537])
def test_impossible_sizes(size: int) -> None:
    with pytest.raises(InvalidSize, match="1 to 65536 ranks"):
        rendezvous(size)


def test_impossible_names() -> None:
    with pytest.raises(ConfigError, match="job's name"):
        Rendezvous(1, "", RUN)
    with pytest.raises(ConfigError, match="16 bytes"):
        Rendezvous(1, "job", b"")


@given(st.permutations(range(7)), st.sets(st.integers(0, 6)))
def test_any_order_of_arrival_seats_everybody(order: list[int], unnamed: set[int]) -> None:
    state = rendezvous(7)
    claims = {rank: claim(None if rank in unnamed else rank, f"w{rank}", size=7) for rank in order}
    for rank in order:
        state.claim(claims[rank], 0.0)
    answers = {rank: state.outcome(claims[rank]) for rank in order}
    ranks = {rank: answer.rank for rank, answer in answers.items() if isinstance(answer, Assembly)}
    assert sorted(ranks.values()) == list(range(7))
    assert all(ranks[rank] == rank for rank in order if rank not in unnamed)


class AnyHistory(RuleBasedStateMachine):
    """Workers come, ask again, vanish, restart and take leave in any order, and time goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.state = rendezvous()
        self.now = 0.0
        self.waiting: dict[str, tuple[Claim, float]] = {}
        self.final: tuple[Member, ...] | None = None

    @rule(rank=st.sampled_from([0, 1, 2, None]), name=st.sampled_from("abcd"), session=st.sampled_from([b"1", b"2"]))
    def come(self, rank: int | None, name: str, session: bytes) -> None:
        asked = claim(rank, name, session=session)
        held = self.waiting.get(name)
        outcome = self.state.claim(asked, self.now)
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
        self.state.unregister(asked.member)

    @rule(seconds=st.sampled_from([0.0, 1.0, LAPSE - 0.5, LAPSE, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

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


def test_ranks_are_named_briefly() -> None:
    assert named(range(1, 40)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 23 more"
