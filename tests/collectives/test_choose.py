"""The choice of an algorithm, and the schedules that are made of it."""

from __future__ import annotations

import pytest

from gradwire.collectives import COLLECTIVES, algorithms, build, choose
from gradwire.collectives.choose import ONESHOT_BYTES
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
def test_what_is_chosen_can_be_built(collective: str, topology: Topology) -> None:
    for nbytes in (0, 8, 1 << 12, 1 << 17, 1 << 22, 1 << 30):
        for requested in ("auto", *algorithms(collective)):
            chosen = choose(collective, requested, nbytes, topology)
            assert build(collective, chosen, topology.size, topology=topology).algorithm == chosen


@pytest.mark.parametrize(
    ("collective", "nbytes", "topology", "expected"),
    [
        ("all_reduce", 8, Topology.single(4), "oneshot"),
        ("all_reduce", 1 << 20, Topology.single(4), "direct"),
        ("all_reduce", 8, Topology.single(32), "tree"),
        ("all_reduce", 1 << 18, Topology.single(32), "halving"),
        ("all_reduce", 1 << 26, Topology.single(32), "ring"),
        ("all_reduce", 1 << 26, Topology.of(list("aabb")), "hierarchical"),
        ("all_reduce", 8, Topology.of(list("aabb")), "oneshot"),
        ("all_reduce", 1 << 26, Topology.of(list("abcd")), "direct"),
        ("broadcast", 8, Topology.single(4), "star"),
        ("broadcast", 8, Topology.single(32), "tree"),
        ("broadcast", 1 << 26, Topology.single(4), "direct"),
        ("broadcast", 1 << 26, Topology.of(list("aabb")), "hierarchical"),
        ("reduce", 1 << 26, Topology.of(list("aabb")), "direct"),
        ("all_gather", 1 << 26, Topology.single(32), "ring"),
        ("reduce_scatter", 8, Topology.single(32), "halving"),
        ("all_to_all", 8, Topology.single(32), "direct"),
    ],
)
def test_automatic_choices(collective: str, nbytes: int, topology: Topology, expected: str) -> None:
    assert choose(collective, "auto", nbytes, topology) == expected


def test_direct_all_reduces_small_arrays_in_one_shot() -> None:
    four = Topology.single(4)
    assert choose("all_reduce", "direct", ONESHOT_BYTES // 4, four) == "oneshot"
    assert choose("all_reduce", "direct", ONESHOT_BYTES // 4 + 1, four) == "direct"
    assert choose("reduce", "direct", 8, four) == "direct"


def test_schedules_are_made_once() -> None:
    assert build("all_reduce", "ring", 6) is build("all_reduce", "ring", 6, root=3)
    assert build("broadcast", "tree", 6) is not build("broadcast", "tree", 6, root=3)
    schedule = build("all_reduce", "hierarchical", 6)
    assert schedule is build("all_reduce", "hierarchical", 6, topology=Topology.single(6))
    assert schedule.program(2) is schedule.program(2)


def test_holes_in_the_table_name_what_there_is() -> None:
    with pytest.raises(UnsupportedOp, match="gather has no algorithm 'ring'; it has: star, direct"):
        build("gather", "ring", 4)
    with pytest.raises(UnsupportedOp, match="reduce has no algorithm 'hierarchical'; it has: star, tree, direct"):
        build("reduce", "hierarchical", 4)
    with pytest.raises(UnsupportedOp, match="all_reduce has no algorithm 'oneshot'"):
        choose("all_reduce", "oneshot", 8, Topology.single(2))
    with pytest.raises(UnsupportedOp, match="no collective 'all_reduse'"):
        choose("all_reduse", "auto", 8, Topology.single(2))


def test_impossible_sizes_and_roots() -> None:
    with pytest.raises(InvalidSize):
        build("all_reduce", "ring", 0)
    with pytest.raises(InvalidSize, match="the topology has 3 ranks, the collective 4"):
        build("all_reduce", "hierarchical", 4, topology=Topology.single(3))
    with pytest.raises(InvalidRank, match="root 4 is not one of the ranks 0 … 3"):
        build("broadcast", "tree", 4, root=4)
    with pytest.raises(InvalidRank):
        build("broadcast", "tree", 4).program(4)
