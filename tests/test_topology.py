"""Which ranks share a host."""

from __future__ import annotations

import pytest

from gradwire.errors import ConfigError, InvalidRank, InvalidSize
from gradwire.topology import Topology


def test_ranks_of_equal_names_share_a_host() -> None:
    topology = Topology.of(["b", "a", "b", "c", "a"])
    assert topology.hosts == ((0, 2), (1, 4), (3,))
    assert topology.size == 5
    assert [topology.host_of(rank) for rank in range(5)] == [0, 1, 0, 2, 1]


def test_all_on_one_host() -> None:
    assert Topology.single(3) == Topology.of(["x"] * 3) == Topology(((0, 1, 2),))


def test_names_do_not_matter_so_equal_topologies_share_plans() -> None:
    assert hash(Topology.of(["a", "b"])) == hash(Topology.of(["x", "y"]))
    assert Topology.of(["a", "b"]) == Topology.of(["x", "y"]) != Topology.single(2)
    assert str(Topology.of(["a", "b"])) == "Topology(hosts=((0,), (1,)))"


@pytest.mark.parametrize("hosts", [(), ((),), ((0,), ())])
def test_nobody_is_no_topology(hosts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InvalidSize):
        Topology(hosts)


@pytest.mark.parametrize("size", [0, -1])
def test_impossible_sizes(size: int) -> None:
    with pytest.raises(InvalidSize):
        Topology.single(size)


@pytest.mark.parametrize(
    "hosts", [((1,),), ((0, 0),), ((0, 1), (1,)), ((0, 2),), ((1, 0),), ((1,), (0,)), ((-1, 0),)], ids=str
)
def test_each_rank_lives_once_and_in_order(hosts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigError):
        Topology(hosts)


@pytest.mark.parametrize("rank", [-1, 2])
def test_only_its_ranks_have_a_host(rank: int) -> None:
    with pytest.raises(InvalidRank, match=r"is not one of 0 … 1"):
        Topology.single(2).host_of(rank)
