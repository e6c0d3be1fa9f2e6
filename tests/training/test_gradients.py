"""GradientSync: the mean over ranks, clipping, agreement on tensors, bucket order, lost ranks and compression."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import Array, parse_dtype
from gradwire.group.internals import GroupInternals
from gradwire.operations import Exchange, Operation, Position, elementwise
from support.gradients import LIKE, SMALL, bits, copied, some
from support.gradients import pair_fixture as pair_fixture
from support.gradients import three_fixture as three_fixture
from support.ranks import eventually, run_ranks

# --- the mean


def test_gradient_sync_added_gradients_are_included_after_ready_and_finish(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> dict[str, list[float]]:
        sync = gw.GradientSync(group, {name: np.zeros(2) for name in "abc"})
        sync.add({"a": np.ones(2), "b": np.ones(2)})
        sync.write("a", np.ones(2))
        sync.ready("a")
        sync.finish()
        assert sync.used == {"a", "b"}
        return {name: sync.gradients[name].tolist() for name in sync.used}

    assert run_ranks(pair, body) == [{"a": [2, 2], "b": [1, 1]}] * 2


@pytest.mark.parametrize("sizes", [SMALL, {}], ids=["many buckets", "one bucket"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_gradient_sync_mean_has_identical_bits_on_all_ranks(
    three: list[gw.Group], dtype: str, sizes: dict[str, Any]
) -> None:
    like = {name: np.zeros(one.shape, parse_dtype(dtype).storage) for name, one in LIKE.items()}

    def body(group: gw.Group) -> dict[str, Array]:
        sync = gw.GradientSync(group, like, **sizes)
        sync.sync(some(9, like))  # values of one backward pass must not appear in the next
        return copied(sync.sync(some(group.rank, like)))

    results = run_ranks(three, body)
    assert bits(results[0]) == bits(results[1]) == bits(results[2])
    for name, mean in results[0].items():
        expected = np.mean([some(rank, like)[name].astype(complex) for rank in range(3)], axis=0)
        np.testing.assert_allclose(mean.astype(complex), expected, atol=0.02 if like[name].itemsize == 2 else 1e-6)


def test_gradient_sync_mixed_dtypes_are_averaged(three: list[gw.Group]) -> None:
    like: dict[str, Array] = {"x": np.zeros(3), "y": np.zeros(3, np.float32), "z": np.zeros(2)}
    results = run_ranks(three, lambda group: copied(gw.GradientSync(group, like).sync(some(group.rank, like))))
    for name in like:
        np.testing.assert_allclose(results[2][name], np.mean([some(rank, like)[name] for rank in range(3)], axis=0))


def test_gradient_sync_without_tensors_returns_an_empty_result(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> Any:
        sync = gw.GradientSync(group, {})
        return sync.sync({}), sync.clip(1.0), sync.used

    assert run_ranks(pair, body) == [({}, 0.0, frozenset())] * 2


def test_gradient_sync_result_is_the_memory_of_its_buckets(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE)
        result = sync.sync(some(group.rank))
        assert all(result[name] is sync.gradients[name] for name in LIKE)
        again = sync.sync(result)  # the sync's own memory, so nothing is copied
        assert bits(again) == bits(result)
        assert GroupInternals(group).is_shared(result["a"]) == group.capabilities.registered

    run_ranks(three, body)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving", "direct", "star"])
def test_gradient_sync_each_algorithm_gives_identical_bits_on_all_ranks(pair: list[gw.Group], algorithm: str) -> None:
    def body(group: gw.Group) -> dict[str, bytes]:
        sync = gw.GradientSync(group, LIKE, algorithm=algorithm)
        return bits(sync.sync(some(group.rank)))

    results = run_ranks(pair, body)
    assert results[0] == results[1]
    with pytest.raises(gw.UnsupportedOp, match="no algorithm 'fast'"):
        gw.GradientSync(pair[0], LIKE, algorithm="fast")


@pytest.mark.parametrize(
    ("gradients", "reason"),
    [
        ({"d": np.zeros(2)}, "there is no gradient 'd'"),
        ({"b": np.zeros(6, np.float32)}, r"'b' is float32\[6\], not 'b': float32\[7\]"),
        ({"b": np.zeros(7, complex)}, r"'b' is complex128\[7\]"),
        ({"b": "seven"}, "expected an array"),
    ],
)
def test_gradient_sync_unknown_or_misshaped_gradient_raises_before_sending(gradients: Any, reason: str) -> None:
    with gw.init() as group:
        sync = gw.GradientSync(group, LIKE)
        with pytest.raises(gw.GradwireError, match=reason):
            sync.sync(gradients)
        assert set(sync.sync({"b": np.zeros(7)})) == {"b"}


def test_gradient_sync_call_refused_on_one_rank_can_be_repeated(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE)
        if group.rank == 1:
            with pytest.raises(gw.ArrayError, match="'b' is"):
                sync.sync({"b": np.zeros(6)}, weight=2)
        assert set(sync.sync({"b": np.zeros(7)}, weight=1)) == {"b"}

    run_ranks(pair, body)


# --- clipping


def test_gradient_sync_clip_by_global_norm_is_identical_on_all_ranks(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> tuple[float, float, dict[str, bytes]]:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        before = copied(sync.sync(some(group.rank)))
        norm = sync.clip(1e9)
        assert bits(sync.gradients) == bits(before)
        assert norm == pytest.approx(np.linalg.norm(np.concatenate([one.ravel() for one in before.values()])))
        assert sync.clip(norm / 4) == norm
        for name, one in before.items():
            np.testing.assert_allclose(sync.gradients[name], one / 4, rtol=1e-5)
        return norm, sync.clip(1e9), bits(sync.gradients)

    results = run_ranks(three, body)
    assert results[0] == results[1] == results[2]


# --- agreement and order


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            {"a": LIKE["a"], "b": np.zeros(8, np.float32)},
            r"item 3 is 'b': float32\[8\] on rank 1, but 'b': float32\[7\]",
        ),
        ({"a": LIKE["a"]}, r"item 3 is missing on rank 1, but 'b': float32\[7\] on rank 0"),
        (LIKE, r"item 4 is 'c': float32\[\] on rank 1, but missing on rank 0"),
        ({"a": LIKE["a"], "b": np.zeros(7)}, r"item 3 is 'b': float64\[7\] on rank 1"),
    ],
)
def test_gradient_sync_different_tensors_name_the_rank_and_the_group_stays_usable(
    three: list[gw.Group], other: dict[str, Array], text: str
) -> None:
    usual = {name: LIKE[name] for name in "ab"}

    def body(group: gw.Group) -> str:
        with pytest.raises(gw.ConfigError, match=text) as caught:
            gw.GradientSync(group, other if group.rank == 1 else usual).sync({})
        assert caught.value.culprit == 1
        group.barrier()
        return str(caught.value)

    assert len(set(run_ranks(three, body))) == 1


def test_gradient_sync_reorder_uses_the_order_of_rank_0(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> list[list[str]]:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        assert not sync.ordered
        before = copied(sync.sync(some(group.rank)))
        sync.reorder(["b", "a"] if group.rank == 0 else ["c", "c", "a"])
        assert sync.ordered
        assert bits(sync.gradients) == bits(before)
        assert bits(sync.sync(some(group.rank))) == bits(before)
        return sync.layout

    assert run_ranks(three, body) == [[["b"], ["a"], ["c"]]] * 3


def test_gradient_sync_reorder_unknown_name_raises_on_all_ranks(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        with pytest.raises(gw.ConfigError, match="name 'd'"):
            gw.GradientSync(group, LIKE).reorder(["d"] if group.rank == 0 else [])
        group.barrier()

    run_ranks(pair, body)


# --- lost ranks


def test_gradient_sync_rank_lost_before_finish_raises_peer_lost_and_leaves_no_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(group: gw.Group) -> int | None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        sync.sync({})
        if group.rank == 1:
            group.close()
            return None
        sync.ready("c")
        assert eventually(lambda: GroupInternals(group).is_broken)
        with pytest.raises(gw.PeerLost) as caught:
            sync.finish()
        return caught.value.culprit

    pair = list(gw.loopback_pair())
    with caplog.at_level(logging.ERROR):
        assert run_ranks(pair, body) == [1, None]
        for group in pair:
            group.close()
        gc.collect()  # errors and their frames form reference cycles
    assert not [record for record in caplog.records if "never waited" in record.message]


def test_gradient_sync_rebind_to_another_group_keeps_gradients_and_order() -> None:
    first, second = gw.local_group(2), gw.local_group(2)

    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        before = copied(sync.sync(some(group.rank)))
        sync.reorder("abc")
        sync.ready("a")  # an interrupted backward pass
        old = sync.gradients["a"]
        sync.rebind(group)
        assert sync.gradients["a"] is old
        sync.rebind(second[group.rank])
        assert not np.shares_memory(sync.gradients["a"], old)
        assert bits(sync.gradients) == bits(before)
        assert bits(sync.sync(some(group.rank))) == bits(before)
        assert sync.layout == [["a"], ["b"], ["c"]]

    run_ranks(first, body)
    for group in (*first, *second):
        group.close()


# --- compression


class Halves:
    """A simple compression to float16 that records its calls."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self.resets = 0

    def describe(self) -> str:
        return "halves"

    def operation(self, bucket: Array, scale: Callable[[], float]) -> Operation:
        half = np.empty(bucket.size, np.float16)

        def body(exchange: Exchange) -> None:
            self.shares.append(scale())
            half[:] = bucket * np.float32(scale())
            elementwise.all_reduce(Position(exchange.rank, exchange.size), half).body(exchange)
            bucket[:] = half

        return Operation("halves", body)

    def reset(self) -> None:
        self.resets += 1


@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_sync_custom_compression_exchanges_the_buckets(pair: list[gw.Group], weighted: bool) -> None:
    def body(group: gw.Group) -> dict[str, bytes]:
        compression = Halves()
        sync = gw.GradientSync(group, LIKE, compression=compression, **SMALL)
        assert compression.resets == 1
        for _ in range(2):
            sync.begin(weight=group.rank * 3 + 1 if weighted else None)
            for name, gradient in some(group.rank).items():
                sync.gradients[name][...] = gradient
                sync.ready(name)
            sync.finish()
        assert compression.shares == [(0.2, 0.8)[group.rank] if weighted else 0.5] * 6
        for name in LIKE:
            expected = some(0)[name] * compression.shares[0] + some(1)[name] * (1 - compression.shares[0])
            if group.rank == 0:
                np.testing.assert_allclose(sync.gradients[name], expected, atol=2e-3)
        return bits(sync.gradients)

    results = run_ranks(pair, body)
    assert results[0] == results[1]
