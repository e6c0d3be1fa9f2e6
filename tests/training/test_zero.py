"""ShardedOptimizer (ZeRO-1): the optimizer state is divided among ranks, all ranks hold whole weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire as gw
from gradwire.arrays import Array
from gradwire.training import zero
from gradwire.training.zero import ShardedOptimizer, assign
from support.crews import TRANSPORTS, crew_of

SHAPES = {"a": (7, 3), "b": (3,), "c": (40,), "d": (), "e": (2, 2, 2), "f": (0,)}


class Adam:
    """An optimizer like those that users write."""

    def __init__(self, weights: dict[str, Array]) -> None:
        self.weights = weights
        self.moments = {name: np.zeros((2, *weight.shape)) for name, weight in weights.items()}
        self.steps = 0

    def step(self, gradients: dict[str, Array]) -> None:
        self.steps += 1
        for name, gradient in gradients.items():
            first, second = moments = self.moments[name]
            moments[0] = 0.9 * first + 0.1 * gradient
            moments[1] = 0.99 * second + 0.01 * gradient**2
            size = np.sqrt(moments[1] / (1 - 0.99**self.steps)) + 1e-8
            self.weights[name] -= 0.1 * moments[0] / (1 - 0.9**self.steps) / size


def weights_of(seed: int, dtypes: tuple[Any, ...] = (np.float64, np.float32)) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        name: np.asarray(random.normal(size=shape)).astype(dtypes[i % len(dtypes)])
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def train(optimizer: Any, weights: dict[str, Array], steps: int = 5) -> dict[str, bytes]:
    for step in range(steps):
        gradients = {name: np.sin(weight + step) for name, weight in weights.items() if (name, step) != ("b", 2)}
        optimizer.step(gradients)
    return {name: weight.tobytes() for name, weight in weights.items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [1, 3])
def test_sharded_optimizer_gives_the_weights_of_an_unsharded_one(
    transport: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero, "ROUND_BYTES", 300)  # small, so that there are several rounds
    alone = weights_of(1)
    expected = train(Adam(alone), alone)

    def run(group: gw.Group) -> tuple[dict[str, bytes], list[str]]:
        weights = weights_of(1)
        optimizer = ShardedOptimizer(group, weights, Adam)
        assert set(optimizer.optimizer.moments) == set(optimizer.share)
        return train(optimizer, weights), list(optimizer.share)

    with crew_of(transport, gw.Topology.single(size)) as crew:
        results = crew.run(run)
    assert all(weights == expected for weights, _ in results)
    assert sorted(name for _, share in results for name in share) == sorted(SHAPES)


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=5), st.integers(0, 1000), max_size=20), st.integers(1, 9))
def test_assign_shares_are_even_and_depend_on_sizes_alone(sizes: dict[str, int], ranks: int) -> None:
    owners = assign(sizes, ranks)
    assert list(owners) == list(sizes)
    assert assign(dict(reversed(sizes.items())), ranks) == owners
    loads = [sum(sizes[name] for name, owner in owners.items() if owner == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes.values())
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_sharded_optimizer_strided_weight_and_fewer_tensors_than_ranks_works() -> None:
    def run(group: gw.Group) -> list[float]:
        wide = np.ones((3, 2))
        weights = {"w": wide[:, 0]}
        train(ShardedOptimizer(group, weights, Adam), weights, 1)
        return [*wide[:, 1].tolist(), *wide[:, 0].tolist()]

    with crew_of("local", gw.Topology.single(3)) as crew:
        results = crew.run(run)
    assert results == [results[0]] * 3
    assert results[0][:3] == [1, 1, 1]
    assert results[0][3] == pytest.approx(0.9)


def test_sharded_optimizer_different_weights_name_the_rank_on_all_ranks() -> None:
    def run(group: gw.Group) -> str:
        with pytest.raises(gw.ConfigError) as caught:
            ShardedOptimizer(group, {"w": np.ones(2 + (group.rank == 1))}, Adam)
        return str(caught.value)

    with crew_of("local", gw.Topology.single(3)) as crew:
        for text in crew.run(run):
            assert "'w': float64[3] on rank 1" in text


def test_elastic_state_with_a_sharded_optimizer_raises_config_error() -> None:
    weights = {"w": np.ones(2)}
    with gw.init() as group:
        optimizer = ShardedOptimizer(group, weights, Adam)
        for state in (optimizer, {"weights": weights, "optimizer": optimizer}):
            with pytest.raises(gw.ConfigError, match="is spread over 1 ranks, without copies"):
                gw.elastic(state)


def test_sharded_optimizer_step_after_close_notes_the_lost_state() -> None:
    with gw.init() as group:
        optimizer = ShardedOptimizer(group, {"w": np.ones(2)}, Adam)
    with pytest.raises(gw.Closed) as caught:
        optimizer.step({"w": np.ones(2)})
    assert "the part of a lost rank is gone" in caught.value.__notes__[0]


def test_sharded_optimizer_read_only_weight_or_unknown_gradient_is_refused() -> None:
    with gw.init() as group:
        with pytest.raises(gw.ArrayError, match=r"'w'.*in place"):
            ShardedOptimizer(group, {"w": np.broadcast_to(1.0, 3)}, Adam)
        with pytest.raises(gw.ConfigError, match="'v'"):
            ShardedOptimizer(group, {"w": np.ones(2)}, Adam).step({"v": np.ones(2)})


def test_sharded_optimizer_that_replaces_weights_raises_config_error() -> None:
    class Forgets:
        def __init__(self, weights: dict[str, Array]) -> None:
            self.weights = weights

        def step(self, gradients: dict[str, Array]) -> None:
            self.weights["w"] = self.weights["w"] - gradients["w"]

    with gw.init() as group:
        optimizer = ShardedOptimizer(group, {"w": np.ones(2)}, Forgets)
        with pytest.raises(gw.ConfigError, match="replaced the array 'w'"):
            optimizer.step({"w": np.ones(2)})
