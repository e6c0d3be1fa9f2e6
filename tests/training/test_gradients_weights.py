"""GradientSync with weights: ranks are weighted by their number of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import Array
from gradwire.training.weights import Weights
from support.gradients import LIKE, SMALL, bits, copied, some
from support.gradients import three_fixture as three_fixture
from support.ranks import run_ranks


def test_gradient_sync_weights_give_the_weighted_mean(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> dict[str, Array]:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        result = copied(sync.sync(some(group.rank), weight=1 + 2 * group.rank))
        assert sync.total_weight == 9
        sync.begin(weight=1 + 2 * group.rank)
        for name, gradient in some(group.rank).items():
            sync.gradients[name][...] = gradient
            sync.ready(name)
        sync.finish()
        assert bits(result) == bits(sync.gradients)
        return result

    results = run_ranks(three, body)
    assert bits(results[0]) == bits(results[1]) == bits(results[2])
    for name in LIKE:
        expected = sum((1 + 2 * rank) * some(rank)[name].astype(float) for rank in range(3)) / 9
        np.testing.assert_allclose(results[0][name], expected, rtol=1e-5, atol=1e-6)


def test_gradient_sync_equal_weights_give_the_bits_of_the_plain_mean(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE)
        plain = copied(sync.sync(some(group.rank)))
        assert bits(sync.sync(some(group.rank), weight=0.1)) == bits(plain)

    run_ranks(three, body)
    untouched = np.ones(3)
    untouched.flags.writeable = False
    Weights(0.1, 3).scale_input(untouched)


def test_gradient_sync_float16_weighted_mean_does_not_overflow(three: list[gw.Group]) -> None:
    like = {"w": np.zeros(4, np.float16)}

    def body(group: gw.Group) -> list[float]:
        sync = gw.GradientSync(group, like)
        gradient = np.full(4, (60000, -20000, 3)[group.rank], np.float16)
        means = [copied(sync.sync({"w": gradient}, weight=weight[group.rank])) for weight in ((7, 0, 0), (3, 1, 0))]
        assert sync.clip(1e-4) == pytest.approx(80000)
        clipped = float(np.linalg.norm(sync.gradients["w"].astype(float)))
        assert clipped == pytest.approx(1e-4, rel=1e-2)
        return [float(mean["w"][0]) for mean in means]

    assert run_ranks(three, body) == [[60000.0, 40000.0]] * 3


def test_gradient_sync_rank_with_weight_zero_is_ignored_even_with_nan(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        empty = {name: np.full(one.shape, np.nan, np.float32) for name, one in LIKE.items()}
        given = some(0) if group.rank == 0 else empty
        result = sync.sync(given, weight=5 if group.rank == 0 else 0)
        for name, gradient in some(0).items():
            np.testing.assert_allclose(result[name], gradient, rtol=1e-6)
        sync.begin(weight=0 if group.rank else 1)
        if group.rank == 0:
            sync.ready("b")
        else:
            sync.ready("c")
        sync.finish()
        assert sync.used == {"b"}
        assert sync.sync({}, weight=0) == {}
        assert sync.total_weight == 0

    run_ranks(three, body)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "many", True])
def test_gradient_sync_invalid_weight_raises_config_error(weight: Any) -> None:
    with gw.init() as group, pytest.raises(gw.ConfigError, match="the weight is"):
        gw.GradientSync(group, LIKE).sync({}, weight=weight)
