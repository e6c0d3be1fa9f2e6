"""Tests the functions that combine phases: renamed, one after the other, and at the same time."""

from __future__ import annotations

import pytest

from gradwire.collectives import Copy, Fold, From, Recv, Send, Slice, direct, ring
from gradwire.collectives.combine import beside, finish, relabel, then
from gradwire.errors import InvalidSize


def test_relabel_renames_ranks_segments_and_buffers() -> None:
    phase = relabel(ring.fold_along_ring(2), ranks=[7, 4], bounds=[2, 5, 6], segments=8, buffers={"in": "acc"})
    assert set(phase.ranks) == {4, 7}
    assert (phase.segments, phase.rounds) == (8, 1)
    assert phase.program(7) == (
        (Send(Slice("acc", 5, 1), (4,)), Fold(Slice("acc", 2, 3), (From(4, True), Slice("acc", 2, 3)))),
    )
    assert phase.program(0) == ((),)


def test_relabel_drops_copies_of_a_slice_onto_itself() -> None:
    gather = direct.all_gather(2, 0)
    assert gather.program(0)[0][0] == Copy(Slice("out", 0), Slice("in", 0))
    renamed = relabel(gather, buffers={"in": "out"}).program(0)
    assert renamed == ((Send(Slice("out", 0), (1,)), Recv(Slice("out", 1), 1)),)
    assert relabel(ring.fold_along_ring(1), buffers={"in": "acc"}).program(0) == ((),)


def test_then_appends_rounds_which_are_empty_for_ranks_without_a_part() -> None:
    phase = then(direct.fold_own(3), finish((1,), 3, lambda _: range(3)))
    assert phase.rounds == 2
    assert [len(phase.program(rank)[1]) for rank in range(3)] == [0, 1, 0]


def test_beside_merges_rounds_up_to_the_longest_phase() -> None:
    pairs = [relabel(ring.all_gather(2, 0), ranks=ranks, bounds=range(3), segments=4) for ranks in ((0, 1), (2, 3))]
    long = relabel(ring.all_gather(3, 0), ranks=(0, 2, 3), bounds=[1, 2, 3, 4], segments=4)
    phase = beside(*pairs, long)
    assert set(phase.ranks) == {0, 1, 2, 3}
    assert phase.rounds == 2
    assert phase.program(0) == (pairs[0].program(0)[0] + long.program(0)[0], long.program(0)[1])
    assert phase.program(1) == (pairs[0].program(1)[0], ())


def test_then_over_different_segments_raises() -> None:
    with pytest.raises(InvalidSize):
        then(direct.fold_own(3), direct.fold_own(4))


def test_combined_phase_of_a_phase_with_separate_acc_has_separate_acc() -> None:
    oneshot = direct.oneshot(2, 0)
    assert oneshot.separate_acc
    assert relabel(oneshot, ranks=(1, 0)).separate_acc
    assert then(oneshot, oneshot).separate_acc
    assert not direct.fold_own(2).separate_acc
