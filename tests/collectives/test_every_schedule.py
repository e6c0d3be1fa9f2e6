"""Tests that the schedules of all algorithms and collectives are correct, for many sizes, roots and topologies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.collectives import COLLECTIVES, ROOTED, Schedule, algorithms, build, placement, verify
from gradwire.topology import Topology
from support.schedule_table import CELLS, FLAT_CELLS, schedules

TABLE = {
    "all_reduce": ("star", "ring", "tree", "halving", "direct", "hierarchical"),
    "broadcast": ("star", "tree", "direct", "hierarchical"),
    "reduce": ("star", "tree", "direct"),
    "all_gather": ("ring", "halving", "direct"),
    "reduce_scatter": ("ring", "halving", "direct"),
    "gather": ("star", "direct"),
    "scatter": ("star", "direct"),
    "all_to_all": ("star", "direct"),
}


def test_algorithms_of_each_collective_are_as_documented() -> None:
    assert {collective: algorithms(collective) for collective in COLLECTIVES} == TABLE


@pytest.mark.parametrize(("collective", "algorithm"), CELLS)
def test_schedule_of_every_cell_verifies_for_1_to_33_ranks(collective: str, algorithm: str) -> None:
    for size in range(1, 34):
        for schedule in schedules(collective, algorithm, size, roots=None if size <= 9 else 3):
            verify(schedule)


@given(st.sampled_from(FLAT_CELLS), st.integers(34, 80), st.data())
@settings(max_examples=25)
def test_schedules_verify_for_larger_sizes(cell: tuple[str, str], size: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1), label="root") if cell[0] in ROOTED else 0
    verify(build(*cell, size, root=root))


topologies = st.lists(st.integers(0, 6), min_size=1, max_size=24).map(lambda hosts: Topology.of(list(map(str, hosts))))


@given(topologies)
@settings(max_examples=80)
def test_hierarchical_all_reduce_verifies_on_any_hosts(topology: Topology) -> None:
    verify(build("all_reduce", "hierarchical", topology.size, topology=topology))


@given(topologies, st.data())
@settings(max_examples=80)
def test_hierarchical_broadcast_verifies_on_any_hosts_from_any_root(topology: Topology, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, topology.size - 1), label="root")
    verify(build("broadcast", "hierarchical", topology.size, topology=topology, root=root))


@pytest.mark.parametrize(("collective", "algorithm"), CELLS)
def test_only_the_one_shot_all_reduce_needs_a_separate_acc(collective: str, algorithm: str) -> None:
    assert build(collective, algorithm, 3).separate_acc == (algorithm == "oneshot")


def test_direct_star_and_one_shot_fold_in_rank_order() -> None:
    for algorithm in ("direct", "star", "oneshot"):
        orders = verify(build("all_reduce", algorithm, 4)).values()
        assert set(orders) == {(((0, 1), 2), 3)}


def test_ring_folds_each_segment_along_the_ring_up_to_its_owner() -> None:
    assert verify(build("reduce_scatter", "ring", 3)) == {0: ((1, 2), 0), 1: ((2, 0), 1), 2: ((0, 1), 2)}


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_placement_covers_every_segment_with_an_input_and_an_output(collective: str, size: int) -> None:
    schedule = build(collective, "direct", size, root=size - 1)
    placements = [_placement(schedule, rank) for rank in range(size)]
    all_segments = set(range(schedule.segments))
    assert set().union(*(inputs for inputs, _ in placements)) == all_segments
    assert set().union(*(outputs for _, outputs in placements)) == all_segments


def _placement(schedule: Schedule, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return placement(schedule.collective, schedule.size, schedule.segments, schedule.root, rank)


def test_placement_returns_the_segments_of_input_and_output() -> None:
    assert placement("broadcast", 3, 3, 1, 1) == ((0, 1, 2), (0, 1, 2))
    assert placement("broadcast", 3, 3, 1, 0) == ((), (0, 1, 2))
    assert placement("reduce", 3, 1, 1, 0) == ((0,), ())
    assert placement("all_gather", 3, 3, None, 2) == ((2,), (0, 1, 2))
    assert placement("reduce_scatter", 3, 3, None, 2) == ((0, 1, 2), (2,))
    assert placement("gather", 3, 3, 0, 2) == ((2,), ())
    assert placement("scatter", 3, 3, 0, 2) == ((), (2,))
    assert placement("all_to_all", 3, 9, None, 1) == ((3, 4, 5), (1, 4, 7))
