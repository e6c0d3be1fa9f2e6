"""Tests the choice of an algorithm, and the schedules that are built for it."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest

from gradwire.collectives import COLLECTIVES, DEFAULTS, Send, algorithms, build, choose, pricing
from gradwire.collectives.cost import cost
from gradwire.collectives.schedule import Phase, Program
from gradwire.errors import InvalidRank, InvalidSize, UnsupportedOp
from gradwire.topology import Topology

TOPOLOGIES = [
    Topology.single(1),
    Topology.single(4),
    Topology.single(32),
    Topology.of(list("aabbb")),
    Topology.of("abc"),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_choose_returns_an_algorithm_that_can_be_built(collective: str, topology: Topology) -> None:
    for nbytes in (0, 8, 1 << 12, 1 << 17, 1 << 22, 1 << 30):
        for requested in ("auto", *algorithms(collective)):
            chosen = choose(collective, requested, nbytes, topology)
            assert build(collective, chosen, topology.size, topology=topology).algorithm == chosen


HOSTS = Topology.of([str(rank // 8) for rank in range(32)])  # four hosts of eight ranks
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("topology", [*TOPOLOGIES, HOSTS], ids=str)
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"])
def test_choose_for_small_arrays_returns_an_algorithm_with_few_rounds(
    collective: str, topology: Topology, transport: str
) -> None:
    chosen = choose(collective, "auto", 8, topology, DEFAULTS, transport)
    counted = cost(build(collective, chosen, topology.size, topology=topology))
    assert counted.rounds <= 2 * math.ceil(math.log2(topology.size))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("topology", [*TOPOLOGIES, HOSTS, Topology.single(33)], ids=str)
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_choose_for_large_arrays_returns_an_algorithm_with_even_load(
    collective: str, topology: Topology, transport: str
) -> None:
    chosen = choose(collective, "auto", 64 * MIB, topology, DEFAULTS, transport)
    counted = cost(build(collective, chosen, topology.size, topology=topology))
    fair = Fraction(topology.size - 1, topology.size) * (2 if collective == "all_reduce" else 1)
    slack = Fraction(3, 2) if chosen == "hierarchical" else 1  # hosts of unequal sizes cannot share evenly
    assert max(counted.most_sent, counted.most_received) <= fair * slack


@pytest.mark.parametrize("hosts", ["aabb", "aabbb", "aaaabbbbcccc"])
def test_choose_for_hosts_with_several_ranks_returns_hierarchical(hosts: str) -> None:
    topology = Topology.of(hosts)
    assert choose("all_reduce", "auto", 64 * MIB, topology, DEFAULTS, "shm") == "hierarchical"
    # A ring in the order of the hosts also has only one link from each host to the next.
    assert choose("all_reduce", "auto", 64 * MIB, topology, DEFAULTS, "tcp") in ("hierarchical", "ring")
    for flat in (Topology.single(len(hosts)), Topology.of([str(rank) for rank in range(len(hosts))])):
        assert choose("all_reduce", "auto", 64 * MIB, flat) != "hierarchical"


@pytest.mark.parametrize("size", [17, 32, 100, 256])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_choose_for_many_ranks_returns_an_algorithm_with_few_peers(collective: str, size: int) -> None:
    topology = Topology.single(size)
    for nbytes in (8, 64 * KIB, 64 * MIB):
        schedule = build(collective, choose(collective, "auto", nbytes, topology), size)
        last = size - 1  # rank 0 may be a hub with many peers
        peers = {rank for ops in schedule.program(last) for op in ops if isinstance(op, Send) for rank in op.to}
        assert len(peers) <= 2 * math.log2(size)


def test_choose_for_shared_memory_uses_one_round_only_for_small_arrays() -> None:
    two = Topology.single(2)
    for nbytes, algorithm in ((8, "oneshot"), (64 * KIB, "oneshot"), (256 * KIB, "direct"), (MIB, "direct")):
        assert choose("all_reduce", "auto", nbytes, two, DEFAULTS, "shm") == algorithm
    assert choose("broadcast", "auto", 64 * MIB, Topology.single(4), DEFAULTS, "shm") == "star"  # copied once
    assert choose("broadcast", "auto", 64 * MIB, Topology.single(4), DEFAULTS, "tcp") == "direct"


def test_choose_follows_the_tuning_table() -> None:
    four = Topology.single(4)
    slow_rounds = replace(DEFAULTS, tcp=replace(DEFAULTS.tcp, round=1.0))
    free_rounds = replace(DEFAULTS, tcp=replace(DEFAULTS.tcp, round=0.0, message=0.0))
    for requested in ("auto", "direct"):
        assert choose("all_reduce", requested, 64 * MIB, four, slow_rounds) == "oneshot"
        assert choose("all_reduce", requested, 8, four, free_rounds) in ("direct", "halving")


def test_choose_direct_all_reduce_of_a_small_array_returns_oneshot() -> None:
    four = Topology.single(4)
    assert choose("all_reduce", "direct", 8, four) == "oneshot"
    assert choose("all_reduce", "direct", MIB, four) == "direct"
    assert choose("reduce", "direct", 8, four) == "direct"


@pytest.mark.parametrize("hosts", [1, 16, 1024])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_choose_for_many_ranks_builds_few_programs(
    collective: str, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: set[int] = set()
    make = Phase.program

    def program(self: Phase, rank: int) -> Program:
        built.add(rank)
        return make(self, rank)

    monkeypatch.setattr(Phase, "program", program)
    monkeypatch.setattr(pricing, "round_loads", pricing.round_loads.__wrapped__)
    topology = Topology.of([str(rank * hosts // 1024) for rank in range(1024)])
    choose(collective, "auto", MIB, topology)
    assert len(built) <= 4 * pricing.SAMPLE


def test_build_returns_the_same_schedule_again() -> None:
    assert build("all_reduce", "ring", 6) is build("all_reduce", "ring", 6, root=3)
    assert build("broadcast", "tree", 6) is not build("broadcast", "tree", 6, root=3)
    schedule = build("all_reduce", "hierarchical", 6)
    assert schedule is build("all_reduce", "hierarchical", 6, topology=Topology.single(6))
    assert schedule.program(2) is schedule.program(2)


def test_build_unknown_combination_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedOp, match="gather has no algorithm 'ring'; it has: star, direct"):
        build("gather", "ring", 4)
    with pytest.raises(UnsupportedOp, match="reduce has no algorithm 'hierarchical'; it has: star, tree, direct"):
        build("reduce", "hierarchical", 4)
    with pytest.raises(UnsupportedOp, match="all_reduce has no algorithm 'oneshot'"):
        choose("all_reduce", "oneshot", 8, Topology.single(2))
    with pytest.raises(UnsupportedOp, match="no collective 'all_reduse'"):
        choose("all_reduse", "auto", 8, Topology.single(2))


def test_build_impossible_size_or_root_raises() -> None:
    with pytest.raises(InvalidSize):
        build("all_reduce", "ring", 0)
    with pytest.raises(InvalidSize, match="the topology has 3 ranks, the collective 4"):
        build("all_reduce", "hierarchical", 4, topology=Topology.single(3))
    with pytest.raises(InvalidRank, match="root 4 is not one of the ranks 0 … 3"):
        build("broadcast", "tree", 4, root=4)
    with pytest.raises(InvalidRank):
        build("broadcast", "tree", 4).program(4)
