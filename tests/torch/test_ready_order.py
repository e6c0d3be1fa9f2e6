"""ReadyOrder: the order in which the first backward pass completes gradients; all ranks use the order of rank 0."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import gradwire as gw
from gradwire.torch.ready_order import ReadyOrder

LIKE = {name: np.zeros(1) for name in "abc"}


def test_ready_order_after_the_first_backward_puts_repeated_hooks_last() -> None:
    with gw.init() as group:
        sync, order = gw.GradientSync(group, LIKE, bucket_bytes=8, first_bucket_bytes=8), ReadyOrder("abc")
        order.begin()
        for index in (1, 0, 1, 2):
            order.see(index)
        assert order.end(sync)
        assert sync.layout == [["a"], ["c"], ["b"]]
        assert (order.twice, order.is_learning) == ({1}, False)
        assert not order.end(sync)


def test_ready_order_of_a_rank_without_data_is_learned_in_its_next_backward() -> None:
    with gw.init() as group:
        sync, order = gw.GradientSync(group, LIKE), ReadyOrder("abc")
        order.begin()
        assert order.end(sync)
        assert order.is_learning
        order.begin()
        order.see(0)
        assert not order.end(sync), "the ranks have already agreed on the order"
        assert not order.is_learning


def test_ready_order_in_the_next_generation_is_learned_again_and_keeps_repeats() -> None:
    with gw.init() as group:
        sync, order = gw.GradientSync(group, LIKE), ReadyOrder("abc")
        order.begin()
        for index in (0, 0):
            order.see(index)
        order.end(sync)
        order.learn_again()
        assert order.is_learning
        assert order.twice == {0}
        assert order.end(sync)
