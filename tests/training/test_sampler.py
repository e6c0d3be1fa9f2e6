"""Sampler: shares of an epoch, global batches, the fixed order and invalid arguments."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import ConfigError, InvalidRank, InvalidSize
from gradwire.training import Sampler


@st.composite
def shared(draw: st.DrawFn) -> tuple[int, int, int, bool]:
    """Draw a number of samples, a number of ranks, a seed, and whether to shuffle."""
    length = draw(st.integers(1, 300))
    size = draw(st.integers(1, min(length, 40)))
    return length, size, draw(st.integers(0, 2**64 - 1)), draw(st.booleans())


def samplers(length: int, size: int, seed: int, shuffle: bool) -> list[Sampler]:
    return [Sampler(length, rank=rank, size=size, seed=seed, shuffle=shuffle) for rank in range(size)]


@given(shared(), st.integers(0, 2**64 - 1))
def test_sampler_epoch_is_split_completely_once_and_evenly(job: tuple[int, int, int, bool], epoch: int) -> None:
    ranks = samplers(*job)
    shares = [rank.epoch(epoch) for rank in ranks]
    assert sorted(np.concatenate(shares).tolist()) == list(range(job[0]))
    assert [len(share) for share in shares] == [len(rank) for rank in ranks]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(share.dtype == np.int64 for share in shares)


@given(shared(), st.integers(0, 9), st.data())
def test_sampler_global_batches_do_not_depend_on_the_number_of_ranks(
    job: tuple[int, int, int, bool], epoch: int, data: st.DataObject
) -> None:
    length, size, seed, shuffle = job
    batch = data.draw(st.integers(size, length + 9))
    alone = Sampler(length, rank=0, size=1, seed=seed, shuffle=shuffle)
    ranks = samplers(*job)
    parts = [list(rank.batches(epoch, batch)) for rank in ranks]
    whole = list(alone.batches(epoch, batch))
    assert len(whole) == alone.steps(batch)
    for k, expected in enumerate(whole):
        shares = [part[k] for part in parts]
        assert sorted(np.concatenate(shares)) == sorted(expected)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for rank, part in zip(ranks, parts, strict=True):
        assert np.array_equal(np.concatenate(part), rank.epoch(epoch))


@given(shared(), st.data())
def test_sampler_batch_depends_on_the_step_alone(job: tuple[int, int, int, bool], data: st.DataObject) -> None:
    length, size, seed, shuffle = job
    batch = data.draw(st.integers(size, length + 9))
    rank = data.draw(st.integers(0, size - 1))
    walking = Sampler(length, rank=rank, size=size, seed=seed, shuffle=shuffle)
    walked = [part for epoch in range(3) for part in walking.batches(epoch, batch)]
    steps = list(enumerate(walked))
    for step, expected in data.draw(st.permutations(steps)):
        jumping = Sampler(length, rank=rank, size=size, seed=seed, shuffle=shuffle)
        assert np.array_equal(jumping.batch(step, batch), expected)
        assert np.array_equal(walking.batch(step, batch), expected)


def test_sampler_order_is_fixed_across_versions() -> None:
    """These numbers must never change: ranks with different versions would train on overlapping shares."""
    assert Sampler(8, rank=0, size=1).epoch(0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert Sampler(8, rank=0, size=1, seed=2**64 - 1).epoch(3).tolist() == [3, 2, 0, 1, 6, 5, 4, 7]


def philox(counter: int, seed: int, epoch: int) -> list[int]:
    """Return words of Philox4x64-10 as published (Salmon et al. 2011), to check the order without NumPy's generator."""
    low = 2**64 - 1
    c, k = [counter >> 64 * i & low for i in range(4)], [seed, epoch]
    for _ in range(10):
        a, b = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [b >> 64 ^ c[1] ^ k[0], b & low, a >> 64 ^ c[3] ^ k[1], a & low]
        k = [k[0] + 0x9E3779B97F4A7C15 & low, k[1] + 0xBB67AE8584CAA73B & low]
    return c


def test_sampler_order_matches_philox_as_published() -> None:
    words = [word for counter in range(1, 26) for word in philox(counter, 12, 34)]
    expected = sorted(range(100), key=words.__getitem__)
    assert Sampler(100, rank=0, size=1, seed=12).epoch(34).tolist() == expected


def test_sampler_order_differs_by_seed_and_epoch_unless_shuffle_is_off() -> None:
    orders = {tuple(Sampler(64, rank=0, size=1, seed=s).epoch(e)) for s in range(10) for e in range(10)}
    assert len(orders) == 100
    assert Sampler(5, rank=1, size=2, shuffle=False).epoch(9).tolist() == [1, 3]


def test_sampler_shuffle_is_uniform_over_positions() -> None:
    counts = np.zeros((8, 8))
    for epoch in range(4000):
        counts[np.arange(8), Sampler(8, rank=0, size=1).epoch(epoch)] += 1
    statistic = ((counts - 500) ** 2 / 500).sum()  # chi-squared with 49 degrees of freedom: above 100 once in 50,000
    assert statistic < 100


def test_sampler_returned_arrays_can_be_changed_by_the_caller() -> None:
    mine = Sampler(6, rank=0, size=2, shuffle=False)
    mine.epoch(0)[:] = -1
    mine.batch(0, 4)[:] = -1
    next(mine.batches(0, 4))[:] = -1
    assert mine.epoch(0).tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"length": 3, "rank": 0, "size": 4}, InvalidSize, "3 samples are too few for 4 ranks"),
        ({"length": 0, "rank": 0, "size": 1}, InvalidSize, "0 samples"),
        ({"length": 3, "rank": 0, "size": 0}, InvalidSize, "size is 0"),
        ({"length": 3, "rank": 2, "size": 2}, InvalidRank, "rank 2 is not one of the 2 ranks"),
        ({"length": 3, "rank": -1, "size": 2}, InvalidRank, "rank -1"),
        ({"length": 3, "rank": 0, "size": 2, "seed": -1}, ConfigError, "seed is -1"),
        ({"length": 3, "rank": 0, "size": 2, "seed": 2**64}, ConfigError, "seed is 18446744073709551616"),
        ({"length": 3.5, "rank": 0, "size": 2}, ConfigError, "length is 3.5"),
    ],
)
def test_sampler_invalid_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Sampler(arguments.pop("length"), **arguments)


def test_sampler_invalid_batch_step_or_epoch_is_refused() -> None:
    mine = Sampler(9, rank=0, size=3)
    with pytest.raises(InvalidSize, match="global batch of 2 is too small for 3 ranks"):
        mine.batch(0, 2)
    with pytest.raises(InvalidSize, match="global batch of 0"):
        mine.batches(0, 0)  # raised by the call, not by the first item
    with pytest.raises(ConfigError, match="step is -1"):
        mine.batch(-1, 3)
    with pytest.raises(ConfigError, match="epoch is -1"):
        mine.epoch(-1)


def test_sampler_import_does_not_load_grpc() -> None:
    """A data loader in its own process can compute indices without loading the control plane."""
    script = "import sys, gradwire.training.sampler; print('grpc' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )
