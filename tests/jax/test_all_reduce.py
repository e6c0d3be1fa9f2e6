"""gw.jax outside compiled programs: all_reduce, broadcast and check_replicas of trees of arrays."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradwire as gw
from support.ranks import run_group


def errors_of(n: int, fn: Any) -> list[gw.GradwireError]:
    """Return the error that fn(group) raises on each of n ranks."""

    def attempt(group: gw.Group) -> gw.GradwireError:
        with pytest.raises(gw.GradwireError) as caught:
            fn(group)
        return caught.value

    return run_group(n, attempt)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_jax_all_reduce_tree_keeps_its_structure(n: int) -> None:
    def reduce(group: gw.Group) -> Any:
        tree = {"layers": [{"w": jnp.full((2, 3), group.rank, "float32"), "b": None}], "scale": float(group.rank)}
        return gw.jax.all_reduce(group, tree)

    mean = (n - 1) / 2
    for tree in run_group(n, reduce):
        assert isinstance(tree["layers"][0]["w"], jax.Array)
        assert tree["layers"][0]["w"].tolist() == [[mean] * 3] * 2
        assert tree["layers"][0]["b"] is None
        assert isinstance(tree["scale"], jax.Array)
        assert (tree["scale"].shape, float(tree["scale"])) == ((), mean)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "int32", "uint32", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (700, 600)])  # the last is large, so it is sent on its own
def test_jax_all_reduce_keeps_dtype_shape_and_sharding(dtype: str, shape: tuple[int, ...]) -> None:
    def reduce(group: gw.Group) -> tuple[jax.Array, Any]:
        x = jnp.asarray(np.ones(shape, jnp.dtype(dtype)))  # made by NumPy, so that JAX compiles nothing
        return gw.jax.all_reduce(group, x, op="sum"), x.sharding

    for result, sharding in run_group(2, reduce):
        assert (result.dtype.name, result.shape, result.sharding) == (dtype, shape, sharding)
        assert (np.asarray(result) == (True if dtype == "bool" else 2)).all()


def test_jax_all_reduce_inputs_stay_unchanged_and_results_outlive_the_group() -> None:
    def reduce(group: gw.Group) -> tuple[jax.Array, jax.Array]:
        x = jnp.asarray(np.full(300_000, 1.0 + group.rank, np.float32))
        return x, gw.jax.all_reduce(group, x)

    results = run_group(2, reduce)
    gc.collect()
    assert [np.asarray(x)[7] for x, _ in results] == [1.0, 2.0]
    assert all((np.asarray(result) == 1.5).all() for _, result in results)


def test_jax_all_reduce_different_trees_raise_mismatch_naming_the_leaf() -> None:
    def reduce(group: gw.Group) -> None:
        gw.jax.all_reduce(group, {"dense": {"w": jnp.ones(3), ("bias" if group.rank else "b"): jnp.ones(1)}})

    for error in errors_of(2, reduce):
        assert isinstance(error, gw.CollectiveMismatch)
        assert "'dense.b': float32[1] is in the map of rank 0, not of rank 1" in str(error)
        assert "test_all_reduce.py" in str(error)


def test_jax_all_reduce_leaves_with_equal_path_texts_are_kept_apart() -> None:
    tree = {"a.b": jnp.zeros(1), "a": {"b": jnp.ones(1)}}
    with gw.init() as group:
        assert gw.jax.all_reduce(group, tree) == tree


@pytest.mark.parametrize(
    ("leaf", "op", "kind", "text"),
    [
        (jnp.arange(3), "mean", gw.UnsupportedOp, "'layer.w': op 'mean' has no meaning for int32"),
        (jnp.ones(3), "median", gw.UnsupportedOp, "unknown reduce op 'median'"),
        (jnp.ones(3, "float8_e4m3fn"), "sum", gw.ArrayError, "'layer.w': arrays of dtype float8_e4m3fn cannot"),
        ("weights", "sum", gw.ArrayError, "'layer.w': a str is not an array"),
        (jax.random.key(0), "sum", gw.ArrayError, r"'layer.w': a random key .* jax.random.key_data\(key\)"),
    ],
)
def test_jax_all_reduce_unsupported_leaf_or_op_raises_an_error_that_names_it(
    leaf: Any, op: str, kind: type[Exception], text: str
) -> None:
    with gw.init() as group:
        with pytest.raises(kind, match=text):
            gw.jax.all_reduce(group, {"layer": {"w": leaf}}, op=op)
        assert float(gw.jax.all_reduce(group, 2.0)) == 2.0


def test_jax_all_reduce_argument_that_is_no_group_raises_config_error() -> None:
    with pytest.raises(gw.ConfigError, match="expected a group or an elastic run, got dict"):
        gw.jax.all_reduce({"w": jnp.ones(1)}, jnp.ones(1))


# ── NaN and Inf ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_jax_all_reduce_nan_or_inf_names_rank_and_leaf_on_all_ranks(dtype: str, bad: float) -> None:
    def reduce(group: gw.Group) -> tuple[gw.NotFinite, float]:
        gradients: dict[str, Any] = {
            "a": np.ones(4, jnp.dtype(dtype)),
            "b": np.ones(4, jnp.dtype(dtype)),
            "n": np.int32(1),
        }
        if group.rank == 1:
            gradients["b"][2] = bad
        with pytest.raises(gw.NotFinite) as caught:
            gw.jax.all_reduce(group, gradients, op="sum", check_finite=True)
        return caught.value, float(gw.jax.all_reduce(group, 1.0))  # the group stays usable

    for error, mean in run_group(3, reduce):
        assert (error.culprit, error.tensor, mean) == (1, "b", 1.0)
        assert "'b' of rank 1 is not finite: 1 " in str(error)


def test_jax_all_reduce_checks_finite_by_default_for_mean_only() -> None:
    def reduce(group: gw.Group) -> list[float]:
        nan = jnp.float32(np.nan)
        with pytest.raises(gw.NotFinite):
            gw.jax.all_reduce(group, nan)
        return [
            float(gw.jax.all_reduce(group, nan, op="sum")),
            float(gw.jax.all_reduce(group, nan, check_finite=False)),
        ]

    assert np.isnan(run_group(2, reduce)).all()


def test_jax_all_reduce_overflowing_sum_raises_not_finite_without_a_culprit() -> None:
    def reduce(group: gw.Group) -> None:
        gw.jax.all_reduce(group, jnp.float32(3e38), op="sum", check_finite=True)

    for error in errors_of(2, reduce):
        assert isinstance(error, gw.NotFinite)
        assert (error.culprit, error.tensor) == (None, None)
        assert "too large" in str(error)


# ── broadcast and the contract ───────────────────────────────────────────────────────────────────────────────────────


def test_jax_broadcast_returns_the_values_of_the_root() -> None:
    def begin(group: gw.Group) -> Any:
        mine = {"w": jnp.full((300, 400), group.rank, "bfloat16"), "n": jnp.int32(group.rank)}
        return gw.jax.broadcast(group, mine, root=1), mine

    for rank, (tree, mine) in enumerate(run_group(3, begin)):
        assert (np.asarray(tree["w"]) == 1).all()
        assert (tree["w"].dtype, int(tree["n"])) == (jnp.bfloat16, 1)
        assert (np.asarray(mine["w"]) == rank).all()


def test_jax_broadcast_different_shapes_raise_an_error_that_names_the_leaf() -> None:
    for error in errors_of(2, lambda group: gw.jax.broadcast(group, {"dense": {"w": jnp.ones(3 + group.rank)}})):
        assert "'dense.w': float32[4] on rank 1" in str(error)


def test_jax_check_replicas_different_replica_names_rank_and_leaf() -> None:
    def check(group: gw.Group) -> gw.ReplicasDiverged:
        params = {"dense": {"w": jnp.ones(5), "b": jnp.zeros(2, "bfloat16")}}
        same = gw.jax.check_replicas(group, params)
        assert same == gw.jax.check_replicas(group, params)
        if group.rank == 2:
            params["dense"]["b"] = params["dense"]["b"].at[1].set(1e-3)
        with pytest.raises(gw.ReplicasDiverged) as caught:
            gw.jax.check_replicas(group, params)
        return caught.value

    for error in run_group(3, check):
        assert (error.culprit, error.tensor) == (2, "dense.b")


@pytest.mark.parametrize("call", ["broadcast", "check_replicas"])
def test_jax_broadcast_and_check_replicas_in_jit_raise_unsupported_op(call: str) -> None:
    with gw.init() as group, pytest.raises(gw.UnsupportedOp, match=f"{call} cannot be part of a compiled program"):
        jax.jit(lambda x: getattr(gw.jax, call)(group, x))(jnp.ones(2))
