"""`local_rank`, `local_size` and `node_rank` follow from the hosts of the group's ranks."""

from __future__ import annotations

import gradwire as gw
from gradwire.topology import Topology
from support.crews import local_ranks
from support.ranks import closing, run_ranks


def place(group: gw.Group) -> tuple[int, int, int]:
    return group.local_rank, group.local_size, group.node_rank


def test_local_ranks_count_the_ranks_of_a_host() -> None:
    with closing(local_ranks(Topology.of(["a", "b", "b", "a", "b"]))) as groups:
        assert [place(group) for group in groups] == [(0, 2, 0), (0, 3, 1), (1, 3, 1), (1, 2, 0), (2, 3, 1)]


def test_local_ranks_of_a_subgroup_count_its_own_members_and_hosts() -> None:
    def sub(group: gw.Group) -> tuple[int, int, int] | None:
        return place(group.subgroup([1, 3, 4])) if group.rank in (1, 3, 4) else None

    with closing(local_ranks(Topology.of(["a", "b", "b", "a", "b"]))) as groups:
        assert run_ranks(groups, sub) == [None, (0, 2, 0), None, (0, 1, 1), (1, 2, 0)]


def test_local_ranks_after_a_recovery_are_those_of_the_new_generation() -> None:
    groups = gw.local_group(3)
    assert [place(group) for group in groups] == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]
    groups[0].close()
    successors = run_ranks(groups[1:], lambda group: group.recover())
    with closing(successors):
        assert sorted(place(group) for group in successors) == [(0, 2, 0), (1, 2, 0)]


def test_local_rank_of_a_single_rank_is_0() -> None:
    with gw.init(config=gw.JobConfig(rank=0, size=1)) as group:
        assert place(group) == (0, 1, 0)
