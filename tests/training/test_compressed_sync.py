"""GradientSync with compression: accuracy on digits, non-finite gradients and the lifetime of residuals."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import Array
from gradwire.training.compression import Int8, TopK
from support.crews import Crew, crew_of

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.fixture(scope="module", name="crew")
def crew_fixture() -> Iterator[Crew]:
    with crew_of("local", gw.Topology.single(2)) as crew:
        yield crew


@pytest.fixture(scope="module", name="digits")
def digits_fixture() -> Any:
    spec = importlib.util.spec_from_file_location("digits", DIGITS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Outcome(NamedTuple):
    right: float  # share of the test images classified correctly, averaged over the last epochs
    loss: float  # on all training images
    weights: list[bytes]


def train(crew: Crew, digits: Any, kind: Any, epochs: int, dtype: Any = np.float32) -> Outcome:
    """Train by gradient descent with momentum, and check that all ranks end with the same bits."""
    (images, labels), test = digits.load()

    def run(group: gw.Group) -> Outcome:
        weights: dict[str, Array] = {name: w.astype(dtype) for name, w in digits.random_weights(0).items()}
        velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}
        sync = gw.GradientSync(group, weights, compression=kind)
        sampler = gw.Sampler(len(images), rank=group.rank, size=group.size, seed=0)
        right = []
        for epoch in range(epochs):
            for mine in sampler.batches(epoch, digits.BATCH):
                sums = digits.gradient_sums(weights, (images[mine], labels[mine]))
                means = sync.sync({name: sums[name] / len(mine) for name in weights}, weight=len(mine))
                for name, weight in weights.items():
                    velocity[name] = digits.MOMENTUM * velocity[name] + means[name]
                    weight -= digits.RATE * velocity[name]
            right.append(digits.count_correct(weights, test) / len(test[1]))
        loss = digits.gradient_sums(weights, (images, labels))["loss"][0] / len(labels)
        return Outcome(float(np.mean(right[-4:])), float(loss), [weight.tobytes() for weight in weights.values()])

    first, *others = crew.run(run)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_compressed_sync_rounding_learns_within_one_point_of_uncompressed(crew: Crew, digits: Any, dtype: Any) -> None:
    """Rounding changes each step only slightly. This test runs a few epochs; the example trains to the end."""
    whole = train(crew, digits, None, 5, dtype)
    for kind in ("f16", "bf16", "int8"):
        outcome = train(crew, digits, kind, 5, dtype)
        assert outcome.right > whole.right - 0.01
        assert outcome.loss == pytest.approx(whole.loss, rel=0.05)
        assert outcome.weights != whole.weights


@pytest.mark.slow
def test_compressed_sync_topk_needs_feedback_to_match_uncompressed_accuracy(crew: Crew, digits: Any) -> None:
    whole = train(crew, digits, None, 40)
    assert train(crew, digits, "topk", 40).right > whole.right - 0.01
    assert train(crew, digits, TopK(feedback=False), 40).right < whole.right - 0.01


def test_compressed_sync_topk_without_feedback_has_a_higher_loss(crew: Crew, digits: Any) -> None:
    with_it = train(crew, digits, TopK(0.05), 12)
    without = train(crew, digits, TopK(0.05, feedback=False), 12)
    assert with_it.right > 0.95
    assert without.loss > 1.5 * with_it.loss


@pytest.mark.parametrize(
    "kind",
    ["f16", "bf16", "int8", Int8(16), TopK(0.02)],
    ids=lambda kind: kind if isinstance(kind, str) else kind.describe(),
)
def test_compressed_sync_nan_raises_not_finite_and_the_next_sync_is_finite(crew: Crew, kind: Any) -> None:
    def run(group: gw.Group) -> list[float]:
        sync = gw.GradientSync(group, {"a": np.zeros(40), "b": np.zeros(40)}, compression=kind)
        gradients = {"a": np.ones(40), "b": np.ones(40)}
        sync.sync(gradients)
        with pytest.raises(gw.NotFinite, match="'a' of rank 1"):
            sync.sync({"a": np.full(40, np.nan if group.rank else 1.0), "b": gradients["b"]})
        return [float(value) for value in sync.sync(gradients)["a"]]

    for values in crew.run(run):
        assert np.isfinite(values).all()


def test_compressed_sync_rank_with_weight_zero_is_ignored(crew: Crew) -> None:
    def run(group: gw.Group) -> list[float]:
        sync = gw.GradientSync(group, {"w": np.zeros(3, np.float32)}, compression="f16")
        gradient = np.full(3, 7.0 if group.rank else np.inf, np.float32)
        means: list[float] = sync.sync({"w": gradient}, weight=5 * group.rank)["w"].tolist()
        return means

    assert crew.run(run) == [[7, 7, 7]] * 2


def test_compressed_sync_reorder_resets_the_residuals(crew: Crew) -> None:
    def run(group: gw.Group) -> list[list[float]]:
        like = {"a": np.zeros(8), "b": np.zeros(8)}
        sync = gw.GradientSync(group, like, compression=TopK(0.25), bucket_bytes=64, first_bucket_bytes=64)

        def mean() -> list[float]:
            found: list[float] = sync.sync({name: np.arange(8.0) for name in like})["a"].tolist()
            return found

        first, second = mean(), mean()
        sync.reorder(["a", "b"])
        return [first, second, mean()]

    for first, second, reordered in crew.run(run):
        assert second != first
        assert reordered == first


def test_compressed_sync_rebind_to_another_group_resets_the_residuals(crew: Crew) -> None:
    following = gw.local_group(2)

    def run(group: gw.Group) -> list[bytes]:
        sync = gw.GradientSync(group, {"a": np.zeros(4)}, compression=TopK(0.25))
        gradients = {"a": np.arange(1.0, 5.0)}
        sent = [sync.sync(gradients)["a"].tobytes() for _ in range(2)]
        sync.rebind(following[group.rank])
        return [*sent, sync.sync(gradients)["a"].tobytes()]

    for first, second, anew in crew.run(run):
        assert second != first
        assert anew == first
    for group in following:
        group.close()


def test_compressed_sync_copies_the_given_compression_object(crew: Crew) -> None:
    def run(group: gw.Group) -> bool:
        mine = TopK(0.25)
        sync = gw.GradientSync(group, {"a": np.zeros(8)}, compression=mine)  # 8 elements fill a bucket exactly
        sync.sync({"a": np.arange(8.0)})
        return mine.residual(sync.gradients["a"]) is not None

    assert crew.run(run) == [False, False]


def test_compressed_sync_different_compression_raises_config_error_on_all_ranks(crew: Crew) -> None:
    def run(group: gw.Group) -> str:
        sync = gw.GradientSync(group, {"a": np.zeros(4)}, compression=Int8(16 + group.rank))
        with pytest.raises(gw.ConfigError) as caught:
            sync.sync({"a": np.ones(4)})
        return str(caught.value)

    for text in crew.run(run):
        assert "int8 by 17" in text
        assert "rank 1" in text
