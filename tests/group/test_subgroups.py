"""Subgroups: made on demand by only their members, with ranks and a call order of their own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.topology import Topology
from support.crews import TRANSPORTS, Crew, crew_of
from support.in_process import SOON
from support.ranks import closing, run_ranks


@pytest.fixture(scope="module", params=list(TRANSPORTS))
def five(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Return a crew with ranks 0 and 3 on one host, and 1, 2 and 4 on another."""
    with crew_of(request.param, Topology.of(["a", "b", "b", "a", "b"])) as crew:
        yield crew


@pytest.fixture(params=list(TRANSPORTS))
def three(request: pytest.FixtureRequest) -> Iterator[list[gw.Group]]:
    """Return three ranks that a test may break."""
    with closing(TRANSPORTS[request.param](Topology.single(3))) as groups:
        yield groups


def test_subgroup_is_made_by_its_members_alone_with_new_rank_numbers(five: Crew) -> None:
    def program(group: gw.Group) -> Any:
        if group.rank not in (1, 3, 4):
            return None
        side = group.subgroup([4, 1, 3])
        return side.rank, side.size, side.generation, side.all_gather(np.array([group.rank])).tolist()

    joined = [1, 3, 4]
    assert five.run(program) == [None, (0, 3, 1, joined), None, (1, 3, 1, joined), (2, 3, 1, joined)]


def test_subgroup_of_the_same_ranks_in_any_order_is_the_same_object(five: Crew) -> None:
    orders = list(itertools.permutations([0, 2, 3]))

    def program(group: gw.Group) -> None:
        if group.rank in (0, 2, 3):
            mine = orders[group.rank]
            side = group.subgroup(mine)
            assert all(group.subgroup(order) is side for order in orders)
            assert group.subgroup(np.array(mine)) is side
            assert group.subgroup(iter(mine)) is side
            assert side.all_reduce(1) == 3

    five.run(program)


def test_subgroup_of_all_ranks_is_separate_from_the_world(five: Crew) -> None:
    def program(group: gw.Group) -> None:
        side = group.subgroup(range(group.size))
        assert side is not group
        assert side.size == group.size
        assert side.topology == group.topology
        assert side.all_reduce(group.rank) == 10

    five.run(program)


def test_subgroup_of_one_rank_works(five: Crew) -> None:
    def program(group: gw.Group) -> None:
        alone = group.subgroup([group.rank])
        assert (alone.rank, alone.size) == (0, 1)
        assert alone.all_reduce(np.arange(3.0), "mean").tolist() == [0, 1, 2]
        assert alone.broadcast_value("x") == "x"

    five.run(program)


def test_subgroup_topology_is_that_of_its_members(five: Crew) -> None:
    def program(group: gw.Group) -> Any:
        if group.rank == 2:
            return None
        side = group.subgroup([0, 1, 3, 4])
        assert side.all_reduce(np.ones(1000), algorithm="hierarchical").sum() == 4000
        return side.topology.hosts

    assert five.run(program) == [((0, 2), (1, 3))] * 2 + [None] + [((0, 2), (1, 3))] * 2


def test_subgroup_of_a_subgroup_is_separate_from_one_of_the_world(five: Crew) -> None:
    def program(group: gw.Group) -> Any:
        if group.rank == 0:
            return None
        outer = group.subgroup([1, 2, 3, 4])
        inner = outer.subgroup([outer.rank % 2, outer.rank % 2 + 2])
        ranks = inner.all_gather_values(group.rank)
        again = group.subgroup(ranks)  # the same ranks from another parent are another group
        assert again is not inner
        assert again.all_reduce(group.rank) == inner.all_reduce(group.rank) == sum(ranks)
        return inner.rank, ranks

    assert five.run(program) == [None, (0, [1, 3]), (0, [2, 4]), (1, [1, 3]), (1, [2, 4])]


def test_subgroup_messages_use_its_ranks_and_stay_within_it(five: Crew) -> None:
    def program(group: gw.Group) -> None:
        if group.rank not in (2, 4):
            return
        side = group.subgroup([2, 4])
        if side.rank == 0:
            side.send(np.array([7]), dst=1)
            group.send(np.array([8]), dst=4)
        else:
            x = np.zeros(1, int)
            assert (group.recv(x, src=2), x[0]) == (2, 8)  # not the message of the other group
            assert (side.recv(x), x[0]) == (0, 7)

    five.run(program)


@pytest.mark.parametrize(
    ("ranks", "kind", "words"),
    [
        ([], gw.InvalidSize, "at least one rank"),
        ([0, 1, 1], gw.InvalidRank, "contain rank 1 twice"),
        ([0, 5], gw.InvalidRank, "rank 5 is not one of the ranks 0 … 4"),
        ([0, -1], gw.InvalidRank, "rank -1"),
        ([0, 1.5], gw.InvalidRank, "rank 1.5"),
        ([0, True], gw.InvalidRank, "rank True"),
        ("01", gw.InvalidRank, "rank '0'"),
        (1, gw.InvalidRank, "not a sequence of ranks"),
        (None, gw.InvalidRank, "not a sequence of ranks"),
    ],
)
def test_subgroup_of_invalid_ranks_raises(five: Crew, ranks: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        five.groups[0].subgroup(ranks)


def test_subgroup_without_the_calling_rank_raises_invalid_rank(five: Crew) -> None:
    with pytest.raises(gw.InvalidRank, match=r"rank 0 is not a member of the subgroup \[1, 2\]") as caught:
        five.groups[0].subgroup([2, 1])
    assert caught.value.rank == 0


def test_subgroup_after_close_can_be_made_again(five: Crew) -> None:
    def program(group: gw.Group) -> None:
        if group.rank not in (1, 2):
            return
        for turn in range(3):
            side = group.subgroup([1, 2])
            assert side.all_reduce(turn) == 2 * turn
            assert "open" in repr(side)
            side.close()
            side.close()
            assert "closed" in repr(side)
            with pytest.raises(gw.Closed, match="closed"):
                side.barrier()
        assert group.subgroup([1, 2]) is not side

    five.run(program)
    assert five.run(lambda group: group.all_reduce(1)) == [5] * 5  # the world still works


def test_subgroup_members_may_join_at_different_times(three: list[gw.Group]) -> None:
    """The first member waits in its first call, not in `subgroup`."""
    made = threading.Event()

    def program(group: gw.Group) -> int:
        if group.rank == 0:
            side = group.subgroup([0, 1, 2])
            made.set()
        else:
            made.wait(SOON)
            side = group.subgroup([0, 1, 2])
        return int(side.all_reduce(1))

    assert run_ranks(three, program) == [3, 3, 3]


# -- ends and breaks ---------------------------------------------------------------------------------------------------


def test_close_of_the_world_closes_its_subgroups(three: list[gw.Group]) -> None:
    sides = run_ranks(three, lambda group: group.subgroup([0, 1, 2]).subgroup([group.rank]))
    three[0].close()
    with pytest.raises(gw.Closed):
        sides[0].all_reduce(1)
    assert "closed" in repr(sides[0])
    with pytest.raises(gw.Closed):
        three[0].subgroup([0, 1])


def test_subgroup_abort_names_the_culprit_by_its_world_rank(three: list[gw.Group]) -> None:
    """World rank 2, which is rank 1 in the subgroup, aborts. All ranks of the world raise the error."""

    def program(group: gw.Group) -> Any:
        if group.rank == 2:
            group.subgroup([1, 2]).abort("had enough")
            return 2
        with pytest.raises(gw.Aborted) as caught:
            (group.subgroup([1, 2]) if group.rank == 1 else group).barrier()
        return caught.value.culprit

    assert run_ranks(three, program) == [2, 2, 2]


def test_subgroup_mismatch_names_its_members_by_world_rank(three: list[gw.Group]) -> None:
    def program(group: gw.Group) -> str:
        side = group.subgroup([0, 2]) if group.rank != 1 else group
        with pytest.raises(gw.CollectiveMismatch) as caught:
            side.all_reduce(np.zeros(group.rank + 1))
        return str(caught.value)

    text, _, same = run_ranks(three, program)
    assert text == same
    assert "rank 0: all_reduce(float64[1]" in text
    assert "rank 2: all_reduce(float64[3]" in text
    assert "rank 1" not in text


@pytest.mark.parametrize("other_came", [True, False])
def test_subgroup_close_ends_its_own_pending_calls_with_closed(three: list[gw.Group], other_came: bool) -> None:
    """The error names no other rank. The world still works for ranks that do not wait for the one that closed."""
    side = three[0].subgroup([0, 1])
    if other_came:
        three[1].subgroup([0, 1])
    work = side.stream().all_reduce(np.ones(3))
    assert not work.done
    side.close()
    with pytest.raises(gw.Closed):
        work.wait(SOON)
    assert run_ranks(three, lambda group: group.all_reduce(1)) == [3, 3, 3]


def test_subgroup_close_while_others_wait_in_it_raises_peer_lost_there(three: list[gw.Group]) -> None:
    sides = run_ranks(three[:2], lambda group: group.subgroup([0, 1]))
    work = sides[1].stream().all_reduce(np.ones(3))
    sides[0].close()
    with pytest.raises(gw.PeerLost) as caught:
        work.wait(SOON)
    assert caught.value.culprit == 0


def test_subgroup_call_after_another_member_closed_it_raises_peer_lost(three: list[gw.Group]) -> None:
    three[0].subgroup([0, 1]).close()
    with pytest.raises(gw.PeerLost) as caught:
        three[1].subgroup([0, 1]).all_reduce(1, timeout=SOON)
    assert caught.value.culprit == 0
