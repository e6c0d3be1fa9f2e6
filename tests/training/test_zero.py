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
from support.ranks import run_ranks

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


def test_elastic_state_that_is_a_sharded_optimizer_raises_config_error() -> None:
    with gw.init() as group:
        optimizer = ShardedOptimizer(group, {"w": np.ones(2)}, Adam)
        with pytest.raises(gw.ConfigError, match="is spread over 1 ranks, without copies"):
            gw.elastic(optimizer)


def test_elastic_state_with_a_sharded_optimizer_is_refused_if_ranks_can_be_lost() -> None:
    weights = {"w": np.ones(2)}

    def start(group: gw.Group) -> None:
        optimizer = ShardedOptimizer(group, weights, Adam)
        with pytest.raises(gw.ConfigError, match="a part of this state is spread over the ranks, without copies"):
            gw.Elastic({"weights": weights, "optimizer": optimizer}, group, 1)

    run_ranks(gw.local_group(2), start)


class SavedAdam(Adam):
    """An optimizer whose state can be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments, self.steps = state["moments"], state["steps"]


def parts_of_run(size: int, make: Any = SavedAdam) -> tuple[list[Any], list[dict[str, Array]]]:
    """Train on some ranks. Return the part of the optimizer's state of each rank, and the weights."""

    def run(group: gw.Group) -> tuple[Any, dict[str, Array]]:
        weights = weights_of(1)
        optimizer = ShardedOptimizer(group, weights, make)
        train(optimizer, weights)
        return optimizer.shard_state_dict(), weights

    results = run_ranks(gw.local_group(size), run)
    return [part for part, _ in results], [weights for _, weights in results]


@pytest.mark.parametrize(("written", "loaded"), [(3, 3), (3, 2), (2, 5), (4, 1)])
def test_sharded_optimizer_loads_the_parts_of_another_number_of_ranks(written: int, loaded: int) -> None:
    parts, weights_by_rank = parts_of_run(written)

    def resume(group: gw.Group) -> dict[str, bytes]:
        weights = {name: weight.copy() for name, weight in weights_by_rank[0].items()}
        optimizer = ShardedOptimizer(group, weights, SavedAdam)
        optimizer.load_shard_state_dicts(parts)
        assert set(optimizer.optimizer.moments) == set(optimizer.share)
        return train(optimizer, weights)

    alone = weights_of(1)
    adam = Adam(alone)
    train(adam, alone)
    assert run_ranks(gw.local_group(loaded), resume) == [train(adam, alone)] * loaded


def test_sharded_optimizer_whose_parts_cannot_be_divided_raises_config_error() -> None:
    class Numbered(SavedAdam):
        def state_dict(self) -> dict[str, Any]:
            return {"moments": list(self.moments.values()), "steps": self.steps}

    parts, _ = parts_of_run(2, Numbered)
    with gw.init() as group:
        optimizer = ShardedOptimizer(group, weights_of(1), Numbered)
        with pytest.raises(gw.ConfigError, match=r"cannot be divided .*\['moments'\] differs between ranks"):
            optimizer.load_shard_state_dicts(parts)


def test_sharded_optimizer_parts_of_other_tensors_raise_config_error() -> None:
    parts, _ = parts_of_run(2)
    with gw.init() as group:
        optimizer = ShardedOptimizer(group, {"a": np.ones(2)}, SavedAdam)
        with pytest.raises(gw.ConfigError, match="other tensors than this optimizer: 'b'"):
            optimizer.load_shard_state_dicts(parts)


def test_sharded_optimizer_without_state_dict_cannot_be_saved() -> None:
    with gw.init() as group:
        optimizer = ShardedOptimizer(group, {"a": np.ones(2)}, Adam)
        with pytest.raises(gw.ConfigError, match="Adam has no state_dict"):
            optimizer.shard_state_dict()


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
