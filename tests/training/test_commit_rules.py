"""Commit rules of elastic training: which state is restored after a failure, and how votes are counted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import StateLost
from gradwire.training.commit_rules import (
    NONE,
    Settlement,
    Standing,
    Wishes,
    ballot,
    count,
    has_begun,
    is_intact,
    settle,
)


def test_settle_picks_the_highest_completed_step() -> None:
    found = settle([Standing(7, 1, 6, "a"), Standing(6, 1, 6, "b"), Standing(7, 1, 6, "a")])
    assert found == Settlement(7, 1, {1: 0})


def test_settle_new_members_pull_from_the_holders_in_turn() -> None:
    old = Standing(3, 2, 3, "a")
    found = settle([old, old, Standing(), Standing(), Standing()])
    assert found.pulls == {2: 0, 3: 1, 4: 0}
    assert found.gives(0) == (2, 4)
    assert found.gives(1) == (3,)
    assert found.gives(2) == ()


def test_settle_rank_with_a_changed_state_pulls_it_from_an_intact_rank() -> None:
    found = settle([Standing(4, 1, 4, "changed", False), Standing(4, 1, 4, "a")])
    assert found.pulls == {0: 1}


def test_settle_step_completed_by_one_rank_is_kept() -> None:
    found = settle([Standing(4, 1, 4, "x", False), Standing(5, 1, 4, "b"), Standing(4, 1, 4, "a")])
    assert (found.completed, found.pulls) == (5, {0: 1, 2: 1})


def test_settle_step_done_in_two_generations_picks_the_later_generation() -> None:
    # Rank 0 was frozen after its step 7, the other ranks repeated step 7 without it, and now it is back.
    found = settle([Standing(7, 2, 7, "new"), Standing(7, 2, 7, "new"), Standing(7, 1, 6, "old")])
    assert found == Settlement(7, 2, {2: 0})


def test_settle_without_an_intact_copy_of_a_committed_step_raises_state_lost() -> None:
    changed = Standing(4, 1, 4, "x", False)
    with pytest.raises(StateLost, match=r"step 4, which was committed"):
        settle([changed, changed, Standing()])


def test_settle_uncommitted_step_without_an_intact_copy_is_dropped() -> None:
    found = settle([Standing(5, 1, 4, "x", False), Standing(4, 1, 4, "a")])
    assert (found.completed, found.pulls) == (4, {0: 1})


def test_settle_before_the_first_step_picks_the_state_of_rank_0() -> None:
    found = settle([Standing(digest="a"), Standing(digest="b"), Standing(digest="a")])
    assert found == Settlement(NONE, 0, {1: 0})


def test_settle_with_holders_that_differ_hands_over_the_most_common_state() -> None:
    usual, other = Standing(5, 1, 5, "usual"), Standing(5, 1, 5, "other")
    found = settle([other, usual, usual, Standing(), Standing(4, 1, 4, "old")])
    assert found == Settlement(5, 1, {3: 1, 4: 2}, differing=(0,))


def test_settle_with_two_holders_that_differ_hands_over_the_state_of_the_lower_rank() -> None:
    found = settle([Standing(), Standing(5, 1, 5, "a"), Standing(5, 1, 5, "b"), Standing()])
    assert found == Settlement(5, 1, {0: 1, 3: 1}, differing=(2,))


@pytest.mark.parametrize("completed", [NONE, 0, 5])
def test_is_intact_state_changed_since_the_last_commit_is_false(completed: int) -> None:
    assert is_intact(completed, "before", "before")
    assert not is_intact(completed, "before", "changed")


def test_is_intact_before_the_run_has_begun_is_false_after_an_unfinished_transfer() -> None:
    assert not has_begun(NONE, "")
    assert is_intact(NONE, "", "anything")
    assert not is_intact(NONE, "", "anything", overwritten=True)
    assert not is_intact(NONE, "before", "before", overwritten=True)


def test_settlement_before_the_first_step_has_the_version_of_the_new_generation() -> None:
    assert Settlement(NONE, 1).version_in(4) == (NONE, 4)
    assert Settlement(3, 1).version_in(4) == (3, 1)


any_standing = st.builds(
    lambda completed, behind, generation, intact, digest: Standing(
        completed,
        generation if completed > NONE else 0,
        max(NONE, completed - behind),
        digest,
        intact or completed == NONE,
    ),
    st.integers(NONE, 9),
    st.integers(0, 1),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from("abc"),
)


@given(st.lists(any_standing, min_size=1, max_size=8))
def test_settle_any_standings_keeps_committed_steps_and_intact_copies(standings: list[Standing]) -> None:
    committed = max(one.committed for one in standings)
    try:
        found = settle(standings)
    except StateLost:
        assert not any(one.intact and one.completed >= committed for one in standings)
        return
    assert found.completed >= committed
    for rank in range(len(standings)):
        source = standings[found.pulls.get(rank, rank)]
        assert source.intact
        assert source.version == (found.completed, found.generation)


@given(st.lists(any_standing, min_size=1, max_size=8))
def test_settle_any_standings_hands_over_one_digest_and_lists_differing_ranks(standings: list[Standing]) -> None:
    try:
        found = settle(standings)
    except StateLost:
        return
    after = {
        standings[found.pulls.get(rank, rank)].digest for rank in range(len(standings)) if rank not in found.differing
    }
    assert len(after) == 1
    assert after.isdisjoint(standings[rank].digest for rank in found.differing)
    assert not set(found.differing) & set(found.pulls)


@given(any_standing)
def test_standing_wire_round_trip_is_lossless(one: Standing) -> None:
    assert Standing.from_wire(json.loads(json.dumps(one.to_wire()))) == one


@pytest.mark.parametrize(
    "nonsense", [None, [], [1, 2, 3], [0, 1, 1, "a", True], ["0", 1, 0, "a", True], [0, 1, 0, 3, 1]]
)
def test_standing_malformed_wire_value_raises_value_error(nonsense: Any) -> None:
    with pytest.raises(ValueError, match="malformed standing"):
        Standing.from_wire(nonsense)


def reduced(*ballots: Any) -> Any:
    return count(np.maximum.reduce(ballots))


def test_count_of_reduced_ballots_shows_disagreement_divergence_and_wishes() -> None:
    plain = ballot(3, "ab" * 16, Wishes())
    assert reduced(plain, plain) == count(plain)
    assert not reduced(plain, ballot(4, "ab" * 16, Wishes())).agreed
    assert not reduced(plain, ballot(3, "ac" * 16, Wishes())).identical
    wishes = reduced(plain, ballot(3, "ab" * 16, Wishes(renew=True, stop=12, failed=True, published=7))).wishes
    assert wishes == Wishes(renew=True, stop=12, failed=True, published=7)


def test_settle_after_the_run_has_begun_ignores_the_state_of_a_new_member() -> None:
    changed, fresh = Standing(NONE, 1, NONE, "x", False), Standing(NONE, 0, NONE, "fresh")
    with pytest.raises(StateLost, match="first step"):
        settle([changed, changed, fresh])
    assert settle([changed, Standing(NONE, 1, NONE, "a"), fresh]).pulls == {0: 1, 2: 1}
