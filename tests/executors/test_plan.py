"""Tests plans without running them: bounds, memory, and that both ends of every link list the same messages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.arrays import parse_dtype
from gradwire.collectives import REDUCING, Schedule, build
from gradwire.errors import InvalidSize
from gradwire.executors import plan
from gradwire.executors.plan import IN_FLIGHT, TILE_BYTES, Plan, even_bounds, ragged_bounds
from gradwire.liveness.call_log import CallDescription
from support.schedule_table import CELLS, schedules

SEGMENTED = ("all_gather", "gather", "reduce_scatter", "scatter", "all_to_all")  # these have counts by segment


def plans(schedule: Schedule, dtype: str, bounds: tuple[int, ...]) -> list[Plan]:
    op = "sum" if schedule.collective in REDUCING else None
    kind = parse_dtype(dtype)
    return [Plan(schedule, rank, kind, op, bounds, CallDescription("", "", 0)) for rank in range(schedule.size)]


# -- bounds ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([1, 2, 4, 8, 16]))
def test_even_bounds_cut_a_count_into_aligned_segments(count: int, segments: int, itemsize: int) -> None:
    bounds = even_bounds(count, segments, itemsize)
    assert len(bounds) == segments + 1
    assert (bounds[0], bounds[-1]) == (0, count)
    lengths = [b - a for a, b in pairwise(bounds)]
    assert all(length >= 0 for length in lengths)
    assert all(bound * itemsize % plan.ALIGNMENT == 0 for bound in bounds if bound < count)
    assert max(lengths) <= -(-count // segments) + plan.ALIGNMENT // itemsize


def test_ragged_bounds_are_the_sums_of_lengths() -> None:
    assert ragged_bounds([]) == (0,)
    assert ragged_bounds([3, 0, 2]) == (0, 3, 3, 5)


def test_plan_without_bounds_for_every_segment_raises_invalid_size() -> None:
    with pytest.raises(InvalidSize, match="2 counts for 3 segments"):
        plans(build("all_gather", "ring", 3), "float32", (0, 1, 2))


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("collective", "algorithm"), CELLS)
def test_plan_both_ends_of_a_link_list_the_same_messages(
    collective: str, algorithm: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that is sent in another order or with another length than expected is a mismatch at run time."""
    monkeypatch.setattr(plan, "TILE_BYTES", 128)
    monkeypatch.setattr(plan, "SMALLEST_TILE", 128)
    for schedule in schedules(collective, algorithm, size, roots=2):
        for dtype in ("float16", "float64"):
            for scale in (0, 1, 7, 150):
                if collective in SEGMENTED:
                    bounds = ragged_bounds([scale * (i % 3) for i in range(schedule.segments)])
                else:
                    bounds = even_bounds(scale * 10, schedule.segments, parse_dtype(dtype).itemsize)
                check_messages(plans(schedule, dtype, bounds))


def check_messages(all_plans: list[Plan]) -> None:
    sent: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    expected: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for own in all_plans:
        for wave in own.waves():
            for message in wave.sends:
                for peer in message.peers:
                    key = own.rank, peer
                    sent.setdefault(key, []).append((message.tile, message.round, message.nbytes))
            for arriving in wave.receives:
                key = arriving.peer, own.rank
                expected.setdefault(key, []).append((arriving.tile, arriving.round, arriving.nbytes))
    assert sent == expected
    assert all(nbytes > 0 for messages in sent.values() for _, _, nbytes in messages)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("collective", "algorithm"), CELLS)
def test_plan_scratch_memory_does_not_grow_with_the_count(collective: str, algorithm: str, dtype: str) -> None:
    for schedule in schedules(collective, algorithm, 5, roots=1):
        used = []
        for count in (50 << 20, 400 << 20):
            share = count // schedule.segments
            one = plans(schedule, dtype, tuple(share * i for i in range(schedule.segments + 1)))[0]
            staging = max((wave.staging for wave in first(one, 40)), default=0)
            used.append(staging + one.scratch_count * one.dtype.accumulator.itemsize)
        assert used[0] == used[1]
        assert used[0] <= 2 * IN_FLIGHT * max(TILE_BYTES, plan.SMALLEST_TILE * schedule.segments) * 5


def first(one: Plan, waves: int) -> list[plan.Wave]:
    return [wave for wave, _ in zip(one.waves(), range(waves), strict=False)]
