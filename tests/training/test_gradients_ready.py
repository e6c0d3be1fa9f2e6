"""GradientSync during a backward pass: gradients become ready one by one, are accumulated, or are missing."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from support.gradients import LIKE, SMALL
from support.gradients import pair_fixture as pair_fixture
from support.gradients import three_fixture as three_fixture
from support.ranks import eventually, run_ranks


def test_gradient_sync_full_bucket_is_reduced_before_the_backward_ends(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        for _ in range(3):
            sync.begin()
            sync.gradients["c"][...] = group.rank
            sync.ready("c")
            assert eventually(lambda: float(sync.gradients["c"]) == 1.0 or group.rank == 1)
            for name in ("b", "a"):
                sync.gradients[name][...] = group.rank
                sync.ready(name)
            sync.finish()
            assert all((sync.gradients[name] == 1.0).all() for name in LIKE)
            assert sync.used == {"a", "b", "c"}

    run_ranks(three, body)


def test_gradient_sync_ready_does_not_wait_for_other_ranks(pair: list[gw.Group]) -> None:
    went_on = threading.Event()

    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        sync.agree()
        sync.begin()
        if group.rank == 1:
            assert went_on.wait(60)
        sync.ready("c")
        went_on.set()
        sync.finish()

    run_ranks(pair, body)


def test_gradient_sync_different_orders_of_ready_on_ranks_give_the_mean(three: list[gw.Group]) -> None:
    orders = ["abc", "bca", "cab"]

    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        for step in range(3):
            for name in orders[(group.rank + step) % 3]:
                sync.gradients[name][...] = group.rank
                sync.ready(name)
            sync.finish()
            assert all((sync.gradients[name] == 1.0).all() for name in LIKE)

    run_ranks(three, body)


@pytest.mark.parametrize("beside", [False, True])
def test_gradient_sync_missing_gradient_counts_as_zeros(three: list[gw.Group], beside: bool) -> None:
    def body(group: gw.Group) -> Any:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        sync.sync({name: np.full(one.shape, 99, np.float32) for name, one in LIKE.items()})
        if beside:
            sync.gradients["b"][...] = 3
            if group.rank == 1:
                sync.ready("b")
            sync.finish()
            result = {name: sync.gradients[name] for name in sync.used}
        else:
            result = sync.sync({"b": np.full(7, 3.0, np.float32)} if group.rank == 1 else {"a": None})
        assert not sync.gradients["a"].any()
        return {name: array.tolist() for name, array in result.items()}

    assert run_ranks(three, body) == [{"b": [1.0] * 7}] * 3


def test_gradient_sync_add_accumulates_until_the_next_sync(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> Any:
        sync = gw.GradientSync(group, LIKE)
        for _ in range(2):
            sync.add({"a": np.full((3, 4), group.rank, np.float32)})
            sync.add({"a": np.full((3, 4), group.rank, np.float32), "b": np.ones(7, np.float32)})
            result = sync.sync({"a": np.full((3, 4), group.rank, np.float32)})
            assert (result["a"] == 3.0).all()
            assert (result["b"] == 1.0).all()
            assert "c" not in result
        assert (sync.sync({"a": np.ones((3, 4))})["a"] == 1.0).all()

    run_ranks(three, body)


def test_gradient_sync_unused_ready_gradient_is_averaged_but_not_in_used(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        sync.sync({"b": np.full(7, 5.0, np.float32), "c": np.float32(7)})
        assert not sync.under_way
        if group.rank == 0:
            sync.gradients["b"] += 2
        sync.ready("b", used=group.rank == 0)
        sync.ready("c", used=False, beside=False)
        assert sync.under_way
        sync.finish()
        assert (sync.gradients["b"] == 6.0).all()
        assert sync.gradients["c"] == 7.0
        assert sync.used == {"b"}

    run_ranks(pair, body)


def test_gradient_sync_ready_after_its_bucket_started_raises_config_error(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        sync.ready("a")
        sync.ready("a")  # its bucket is not complete, so nothing is sent yet
        sync.ready("c")
        with pytest.raises(gw.ConfigError, match=r"ready\('c'\) was called again"):
            sync.ready("c")
        with pytest.raises(gw.ConfigError, match="not finished"):
            sync.begin()
        with pytest.raises(gw.ConfigError, match="no gradient 'd'"):
            sync.ready("d")
        sync.finish()
        sync.begin()

    run_ranks(pair, body)


def test_gradient_sync_begin_with_another_weight_raises_config_error(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE)
        sync.begin()
        sync.begin()  # the first backward pass has sent nothing, so it is discarded
        sync.begin(weight=1)
        with pytest.raises(gw.ConfigError, match="not finished"):
            sync.begin(weight=2)
        sync.finish()

    run_ranks(pair, body)
