"""copy on streams: a copy runs in the order of its rank's other calls, and matches copies of the group too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire as gw
from support.in_process import every_pair_fixture as every_pair_fixture
from support.ranks import closing, run_ranks

LONG = 100_000  # elements: too many to be sent before the receiver calls copy


@pytest.mark.parametrize("count", [3, LONG])
def test_stream_copy_runs_between_the_other_calls_of_both_ranks(pair: list[gw.Group], count: int) -> None:
    def play(group: gw.Group) -> None:
        stream = group.stream()
        x = np.full(count, group.rank + 1.0)
        works = [stream.all_reduce(x)]  # x is 3 on both ranks
        if group.rank == 0:
            works.append(stream.copy(x, None, src=0, dst=1))
        else:
            y = np.zeros((count, 2))
            works.append(stream.copy(None, y[:, 1], src=0, dst=1))
        works.append(stream.all_reduce(x))  # x is 6
        stream.synchronize()
        assert x[0] == 6
        assert works[1].wait() is None
        assert works[1].operation == "copy"
        if group.rank == 1:
            assert (y[:, 1] == 3).all()
            assert not y[:, 0].any()

    run_ranks(pair, play)


@pytest.mark.parametrize("count", [3, LONG])
def test_copies_on_streams_and_on_the_group_match_in_program_order(pair: list[gw.Group], count: int) -> None:
    def play(group: gw.Group) -> list[float]:
        streams: list[Any] = [group.stream(), group.stream(), group]
        order = [0, 1, 2, 0, 2, 1, 0, 2, 2] if group.rank == 0 else [2, 2, 0, 1, 0, 0, 1, 2, 2]
        arrays = [np.full(count, 0.0 if group.rank else float(number)) for number in range(9)]
        works: list[Any] = []
        for array, on in zip(arrays, order, strict=True):
            x, y = (array, None) if group.rank == 0 else (None, array)
            works.append(streams[on].copy(x, y, src=0, dst=1))
        for work in works:
            if work is not None:
                work.wait()
        return [float(array[-1]) for array in arrays]

    assert run_ranks(pair, play)[1] == list(range(9))


def test_stream_copy_on_other_ranks_and_on_one_rank_works() -> None:
    def play(group: gw.Group) -> list[float]:
        x, y = np.full(4, group.rank + 1.0), np.zeros(4)
        stream = group.stream()
        stream.copy(x, y, src=2, dst=0)  # does nothing on rank 1
        stream.copy(x, y, src=1, dst=1)
        stream.synchronize()
        return y.tolist()

    with closing(gw.local_group(3)) as groups:
        assert run_ranks(groups, play) == [[3.0] * 4, [2.0] * 4, [0.0] * 4]


def test_stream_copy_with_invalid_arguments_raises_at_once(pair: list[gw.Group]) -> None:
    stream, fixed = pair[0].stream(), np.zeros(2)
    fixed.flags.writeable = False
    with pytest.raises(gw.ArrayError, match="expected an array"):
        stream.copy(None, None, src=0, dst=1)
    with pytest.raises(gw.ArrayError, match="read-only"):
        stream.copy(None, fixed, src=1, dst=0)
    with pytest.raises(gw.ArrayError, match="does not fit"):
        stream.copy(np.zeros(2), np.zeros(3), src=0, dst=0)
    with pytest.raises(gw.InvalidRank, match="dst 2"):
        stream.copy(np.zeros(2), None, src=0, dst=2)
    stream.synchronize()  # nothing was queued


def test_stream_copy_that_fails_leaves_the_group_usable(pair: list[gw.Group]) -> None:
    """A mismatch and a timeout fail the work only. The copy that was sent stays for the next call."""
    sent = pair[0].stream().copy(np.arange(LONG), None, src=0, dst=1)
    stream = pair[1].stream()
    with pytest.raises(gw.ArrayError, match="rank 0 copies int64, but y is float64"):
        stream.copy(None, np.zeros(LONG), src=0, dst=1).wait()
    with pytest.raises(gw.SizeMismatch, match="the message is kept"):
        stream.copy(None, np.zeros(3, np.int64), src=0, dst=1).wait()
    y = np.zeros(LONG, np.int64)
    stream.copy(None, y, src=0, dst=1).wait()
    assert y[-1] == LONG - 1
    sent.wait()
    with pytest.raises(gw.Timeout):
        stream.copy(None, y, src=0, dst=1, timeout=0.02).wait()
    with pytest.raises(gw.Timeout):
        pair[0].stream().copy(np.zeros(LONG), None, src=0, dst=1, timeout=0.02).wait()
    run_ranks(pair, lambda group: group.barrier())


def test_stream_copy_of_a_closed_group_fails_with_closed(pair: list[gw.Group]) -> None:
    stream = pair[1].stream()
    work = stream.copy(None, np.zeros(3), src=0, dst=1)
    pair[1].close()
    with pytest.raises(gw.Closed):
        work.wait()
    with pytest.raises(gw.Closed):
        stream.copy(None, np.zeros(3), src=0, dst=1)


def test_copy_after_a_queued_copy_that_does_not_end_times_out(pair: list[gw.Group]) -> None:
    queued = pair[1].stream().copy(None, np.zeros(3), src=0, dst=1)
    y = np.zeros(3)
    with pytest.raises(gw.Timeout, match=r"waited 0\.02 s for an earlier copy on a stream"):
        pair[1].copy(None, y, src=0, dst=1, timeout=0.02)
    for number in (1.0, 2.0):
        pair[0].copy(np.full(3, number), None, src=0, dst=1)
    queued.wait()
    pair[1].copy(None, y, src=0, dst=1)
    assert y.tolist() == [2.0] * 3
