"""Tests `Topology`: which ranks share a host."""

from __future__ import annotations

import pytest

from gradwire.errors import ConfigError, InvalidRank, InvalidSize
from gradwire.topology import Topology


def test_topology_of_equal_host_names_puts_ranks_on_one_host() -> None:
    topology = Topology.of(["b", "a", "b", "c", "a"])
    assert topology.hosts == ((0, 2), (1, 4), (3,))
    assert topology.size == 5
    assert [topology.host_of(rank) for rank in range(5)] == [0, 1, 0, 2, 1]


def test_topology_single_puts_all_ranks_on_one_host() -> None:
    assert Topology.single(3) == Topology.of(["x"] * 3) == Topology(((0, 1, 2),))


def test_topology_equality_and_hash_ignore_host_names() -> None:
    assert hash(Topology.of(["a", "b"])) == hash(Topology.of(["x", "y"]))
    assert Topology.of(["a", "b"]) == Topology.of(["x", "y"]) != Topology.single(2)
    assert str(Topology.of(["a", "b"])) == "Topology(hosts=((0,), (1,)))"


@pytest.mark.parametrize("hosts", [(), ((),), ((0,), ())])
def test_topology_with_an_empty_host_or_no_host_raises_invalid_size(hosts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InvalidSize):
        Topology(hosts)


@pytest.mark.parametrize("size", [0, -1])
def test_topology_single_of_a_size_below_1_raises_invalid_size(size: int) -> None:
    with pytest.raises(InvalidSize):
        Topology.single(size)


@pytest.mark.parametrize(
    "hosts", [((1,),), ((0, 0),), ((0, 1), (1,)), ((0, 2),), ((1, 0),), ((1,), (0,)), ((-1, 0),)], ids=str
)
def test_topology_with_repeated_missing_or_unordered_ranks_raises_config_error(
    hosts: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(ConfigError):
        Topology(hosts)


@pytest.mark.parametrize("rank", [-1, 2])
def test_host_of_a_rank_outside_the_topology_raises_invalid_rank(rank: int) -> None:
    with pytest.raises(InvalidRank, match=r"is not one of 0 … 1"):
        Topology.single(2).host_of(rank)
