"""gw.jax.all_reduce with weights, in plain Python and inside compiled programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradwire as gw
from support.engines import thread_engines
from support.ranks import run_group, run_ranks


def some(rank: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(rank)
    values = random.normal(size=(4, 3))
    return {
        "w": jnp.asarray(values.astype(np.float32)),
        "half": jnp.asarray(values[0].astype(np.float16)),
        "brain": jnp.asarray(values[1].astype(jnp.bfloat16)),
        "loss": jnp.float32(rank),
    }


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def both(group: Any, tree: Any, weight: float) -> tuple[Any, Any]:
    """Return the weighted mean from plain Python, and from a compiled program that gets the weight as an argument."""
    plain = gw.jax.all_reduce(group, tree, weight=weight)
    compiled = gw.jax.jit(lambda tree, weight: gw.jax.all_reduce(group, tree, weight=weight))(tree, weight)
    return plain, compiled


def test_jax_weighted_mean_is_that_of_gradient_sync_on_all_ranks_and_in_jit() -> None:
    weights = [1, 5, 2]

    def reduce(group: gw.Group) -> tuple[Any, Any, Any]:
        tree = some(group.rank)
        arrays = {name: np.asarray(leaf) for name, leaf in tree.items()}
        sync = gw.GradientSync(group, arrays, first_bucket_bytes=1, bucket_bytes=1)
        return *both(group, tree, weights[group.rank]), sync.sync(arrays, weight=weights[group.rank])

    results = run_group(3, reduce)
    for plain, compiled, reference in results:
        assert bits(plain) == bits(compiled) == bits(results[0][0])
        assert float(plain["loss"]) == (1 * 0 + 5 * 1 + 2 * 2) / 8
        for name, mean in reference.items():
            expected = sum(np.asarray(some(rank)[name], float) * weights[rank] for rank in range(3)) / 8
            tolerance = {"w": 1e-6, "half": 2e-3, "brain": 2e-2, "loss": 1e-6}[name]
            np.testing.assert_allclose(np.asarray(plain[name], float), expected, tolerance, tolerance)
            np.testing.assert_allclose(np.asarray(plain[name], float), np.asarray(mean, float), tolerance, tolerance)


def test_jax_weighted_mean_on_an_engine_gives_the_bits_of_a_group() -> None:
    def reduce(group: Any) -> list[bytes]:
        tree = gw.jax.broadcast(group, some(group.rank), root=1)
        gw.jax.check_replicas(group, tree)
        return bits(gw.jax.all_reduce(group, some(group.rank), weight=1 + group.rank)) + bits(tree)

    assert run_ranks(thread_engines(2), reduce) == run_group(2, reduce)


def test_jax_weighted_mean_ignores_a_rank_of_weight_0_even_with_nan() -> None:
    def reduce(group: gw.Group) -> tuple[Any, Any]:
        return both(group, jnp.full(2, jnp.nan if group.rank == 0 else float(group.rank)), float(group.rank))

    for results in run_group(3, reduce):
        assert [np.asarray(one).tolist() for one in results] == [[np.float32(5 / 3)] * 2] * 2


def test_jax_weighted_mean_not_finite_names_a_rank_that_counts() -> None:
    def reduce(group: gw.Group) -> gw.NotFinite:
        with pytest.raises(gw.NotFinite) as caught:
            gw.jax.all_reduce(group, {"w": jnp.full(2, jnp.nan)}, weight=group.rank)
        return caught.value

    assert [(error.culprit, error.tensor) for error in run_group(2, reduce)] == [(1, "w")] * 2


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, np.nan], "the weight of rank 1 is nan"),
        ([1.0, -2.0], "the weight of rank 1 is -2.0"),
        ([np.inf, 1.0], "the weight of rank 0 is inf"),
        ([0, 0], "the weights of all ranks add up to 0.0, so there is no mean"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_jax_weight_invalid_raises_config_error_on_all_ranks(weights: Any, message: str, compiled: bool) -> None:
    def reduce(group: gw.Group) -> float:
        def mean(x: jax.Array, weight: Any) -> Any:
            return gw.jax.all_reduce(group, x, weight=weight)

        call = gw.jax.jit(mean) if compiled else mean
        with pytest.raises(gw.ConfigError, match=message):
            call(jnp.ones(2), weights[group.rank])
        return float(call(jnp.ones(()), 1.0))  # the group stays usable

    assert run_group(2, reduce) == [1.0, 1.0]


@pytest.mark.parametrize("weight", ["1", True, 1j, np.ones(2), jnp.ones(1), jnp.array(True), jax.random.key(0), [1]])
def test_jax_weight_that_is_not_a_number_raises_config_error(weight: Any) -> None:
    with gw.init() as group, pytest.raises(gw.ConfigError, match="it must be a finite number, 0 or more"):
        gw.jax.all_reduce(group, jnp.ones(2), weight=weight)


@pytest.mark.parametrize("weight", [3, 2.5, np.float32(2), np.int64(4), np.array(2.0), jnp.int32(2), jnp.bfloat16(2)])
def test_jax_weight_of_each_kind_of_number_is_accepted(weight: Any) -> None:
    with gw.init() as group:
        assert gw.jax.all_reduce(group, jnp.ones(2), weight=weight).tolist() == [1, 1]


def test_jax_weight_with_another_op_raises_config_error() -> None:
    with gw.init() as group, pytest.raises(gw.ConfigError, match="a weight has no meaning for op='sum'"):
        gw.jax.all_reduce(group, jnp.ones(2), op="sum", weight=1)


def test_jax_weighted_mean_on_one_rank_only_raises_mismatch() -> None:
    def reduce(group: gw.Group) -> type[Exception]:
        with pytest.raises(gw.CollectiveMismatch) as caught:
            gw.jax.all_reduce(group, jnp.ones(2), weight=1 if group.rank else None)
        return caught.type

    assert run_group(2, reduce) == [gw.CollectiveMismatch] * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_jax_weighted_mean_gradient_is_the_share_of_the_summed_cotangents(compiled: bool) -> None:
    def differentiate(group: gw.Group) -> tuple[Any, Any]:
        def loss(x: jax.Array, weight: Any) -> jax.Array:
            mean = gw.jax.all_reduce(group, {"x": x, "y": jnp.zeros(3)}, weight=weight)
            return (group.rank + 1) * jnp.sum(mean["x"] ** 2)

        gradient = jax.grad(loss, argnums=(0, 1))
        call = gw.jax.jit(gradient) if compiled else gradient
        by_x, by_weight = call(jnp.array([1.0, 2.0]) + group.rank, 1.0 + 2 * group.rank)
        return by_x.tolist(), float(by_weight)

    mean = np.array([1.75, 2.75])  # 1/4 of rank 0 and 3/4 of rank 1
    for rank, (by_x, by_weight) in enumerate(run_group(2, differentiate)):
        assert by_x == pytest.approx((0.25, 0.75)[rank] * (1 + 2) * 2 * mean)
        assert by_weight == 0


def test_jax_weighted_mean_second_derivative_and_jvp_follow_the_weights() -> None:
    def differentiate(group: gw.Group) -> tuple[float, float]:
        def mean(x: jax.Array) -> jax.Array:
            return gw.jax.all_reduce(group, x, weight=1.0 + 2 * group.rank)

        _, tangent = jax.jvp(mean, (jnp.float32(2),), (jnp.float32(1 + group.rank),))
        second = jax.grad(jax.grad(lambda x: mean(x) ** 3))(jnp.float32(2))
        return float(tangent), float(second)

    for rank, (tangent, second) in enumerate(run_group(2, differentiate)):
        assert tangent == 0.25 * 1 + 0.75 * 2
        # The loss is the sum of the losses of both ranks, also of the first derivatives.
        share = (0.25, 0.75)
        first = sum(one * 2 * share[rank] for one in share)
        assert second == pytest.approx(6 * 2 * first)


def test_jax_weighted_mean_in_vmap_maps_arrays_but_not_weights() -> None:
    def reduce(group: gw.Group) -> Any:
        x = jnp.arange(6.0).reshape(3, 2) * (1 + group.rank)
        return jax.vmap(lambda row: gw.jax.all_reduce(group, row, weight=1 + group.rank), in_axes=1, out_axes=1)(x)

    for result in run_group(2, reduce):
        np.testing.assert_allclose(result, np.arange(6.0).reshape(3, 2) * 5 / 3, rtol=1e-6)
    with gw.init() as group, pytest.raises(gw.UnsupportedOp, match="vmap cannot map over weights"):
        jax.vmap(lambda x, n: gw.jax.all_reduce(group, x, weight=n))(jnp.ones(2), jnp.ones(2))
