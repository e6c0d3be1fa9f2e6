"""gw.jax.all_reduce inside compiled programs, and its gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradwire as gw
from support.ranks import run_group


def numbers(rank: int, *shape: int) -> jax.Array:
    """Return different numbers for each rank, made by NumPy, because JAX would compile a program for each shape."""
    return jnp.asarray(np.random.default_rng(rank).normal(size=shape).astype(np.float32))


def test_jax_jit_all_reduce_gives_the_bits_of_the_plain_call() -> None:
    def both(group: gw.Group) -> tuple[Any, Any]:
        tree = {"w": numbers(group.rank, 30, 7), "big": numbers(group.rank, 300_000), "n": [jnp.int32(group.rank)]}

        def reduce(tree: Any) -> Any:
            return gw.jax.all_reduce(group, tree, op="sum")

        return reduce(tree), gw.jax.jit(reduce)(tree)

    results = run_group(3, both)
    for plain, compiled in results:
        for one, other, first in zip(*map(jax.tree.leaves, (plain, compiled, results[0][0])), strict=True):
            assert one.tobytes() == other.tobytes() == first.tobytes()


def test_jax_jit_independent_calls_run_in_program_order() -> None:
    def many(group: gw.Group) -> list[float]:
        def program(x: jax.Array) -> list[jax.Array]:  # the calls do not depend on each other
            return [gw.jax.all_reduce(group, x[: i + 1] * i, op="sum").sum() for i in range(5)]

        return [float(one) for one in gw.jax.jit(program)(jnp.ones(5))]

    assert run_group(2, many) == [[2.0 * i * (i + 1) for i in range(5)]] * 2


def test_jax_jit_call_with_an_unused_result_still_runs() -> None:
    def unused(group: gw.Group) -> float:
        @gw.jax.jit
        def program(x: jax.Array) -> jax.Array:
            gw.jax.all_reduce(group, x)
            return gw.jax.all_reduce(group, x[0], op="sum")

        return float(program(jnp.ones(3)))

    assert run_group(2, unused) == [2.0, 2.0]


def test_jax_jit_all_reduce_in_scan_cond_and_vmap_gives_the_plain_result() -> None:
    def reduce(group: gw.Group) -> list[Any]:
        def total(x: Any) -> Any:
            return gw.jax.all_reduce(group, x, op="sum")

        x = numbers(group.rank, 4, 3)
        looped = gw.jax.jit(lambda x: jax.lax.scan(lambda carry, row: (carry, total(row)), 0.0, x)[1])(x)
        chosen = gw.jax.jit(lambda x: jax.lax.cond(x.shape[0] > 3, total, lambda x: x, x))(x)
        batched = gw.jax.jit(jax.vmap(lambda row: total({"row": row, "one": jnp.float32(1)})))(x)
        assert batched["one"].tolist() == [group.size] * 4
        return [np.asarray(one) for one in (total(x), looped, chosen, batched["row"], jax.vmap(total, 1, 1)(x))]

    for first, *others in run_group(2, reduce):
        for other in others:
            np.testing.assert_array_equal(first, other)


def test_jax_plain_call_after_a_program_runs_after_its_calls() -> None:
    def mixed(group: gw.Group) -> list[float]:
        program = jax.jit(lambda x: gw.jax.all_reduce(group, x, op="sum"))
        first = program(jnp.ones(5))
        second = gw.jax.all_reduce(group, jnp.ones(2), op="sum")
        return [float(first[0]), float(second[0])]

    assert run_group(2, mixed) == [[2.0, 2.0]] * 2


def test_jax_jit_program_uses_the_current_group_of_the_run() -> None:
    class Run:
        group: gw.Group

    run = Run()
    program = gw.jax.jit(lambda x: gw.jax.all_reduce(run, x, op="sum"))
    for _ in range(2):
        with gw.init() as run.group:
            assert float(program(jnp.float32(3))) == 3.0


def test_jax_jit_keeps_options_name_and_docstring() -> None:
    with gw.init() as group:

        @gw.jax.jit(static_argnames="times")
        def repeated(x: jax.Array, times: int) -> jax.Array:
            """Documented."""
            return gw.jax.all_reduce(group, jnp.tile(x, times))

        assert repeated(jnp.ones(2), times=3).shape == (6,)
        assert (repeated.__name__, repeated.__doc__) == ("repeated", "Documented.")


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("op", "compiled"), [("sum", False), ("mean", False), ("mean", True)])
def test_jax_grad_of_all_reduce_is_that_of_the_sum_of_all_losses(op: str, compiled: bool) -> None:
    n = 3

    def loss(x: Any, y: Any, rank: int) -> Any:
        return (rank + 1) * jnp.sum(jnp.sin(y) * x)

    def differentiate(group: gw.Group) -> np.ndarray[Any, Any]:
        def mine(x: jax.Array) -> Any:
            return loss(x, gw.jax.all_reduce(group, {"x": x, "n": jnp.float32(1)}, op=op)["x"], group.rank)

        gradient = jax.grad(mine)
        return np.asarray((gw.jax.jit(gradient) if compiled else gradient)(numbers(group.rank, 5)))

    def whole(xs: jax.Array) -> Any:
        y = xs.sum(0) / (n if op == "mean" else 1)
        return sum(loss(xs[rank], y, rank) for rank in range(n))

    xs = jnp.stack([numbers(rank, 5) for rank in range(n)])
    np.testing.assert_allclose(run_group(n, differentiate), jax.grad(whole)(xs), rtol=1e-5, atol=1e-6)


def test_jax_jvp_and_second_derivative_of_all_reduce_are_correct() -> None:
    def derive(group: gw.Group) -> list[float]:
        def cubed(x: Any) -> Any:
            return gw.jax.all_reduce(group, x, op="sum") ** 3

        x = jnp.float32(1)
        tangent = jax.jvp(cubed, (x,), (x,))[1]
        second = gw.jax.jit(jax.grad(jax.grad(cubed)))(x)
        return [float(tangent), float(second)]

    # y = x0 + x1 = 2. Along (1, 1), y³ has the derivative 3y²·2 = 24. L = 2y³ has dL/dx = 6y², and 2·6y² has 24y = 48.
    assert run_group(2, derive) == [[24.0, 48.0]] * 2


def test_jax_grad_of_a_tree_with_integer_leaves_ignores_them() -> None:
    def derive(group: gw.Group) -> float:
        def loss(x: Any) -> tuple[Any, Any]:
            tree = gw.jax.all_reduce(group, {"x": x, "n": jnp.int32(2)}, op="sum")
            return tree["x"] * 3, tree["n"]

        gradient, count = gw.jax.jit(jax.grad(loss, has_aux=True))(jnp.float32(1))
        return float(gradient) + float(count)

    assert run_group(2, derive) == [6.0 + 4.0] * 2


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_jax_grad_of_max_min_or_prod_raises_unsupported_op(op: str) -> None:
    with gw.init() as group:

        def loss(x: Any) -> Any:
            return gw.jax.all_reduce(group, x, op=op) + x

        for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
            with pytest.raises(gw.UnsupportedOp, match=f"all_reduce\\(op='{op}'\\) has no gradient; only sum and mean"):
                gradient(jnp.float32(2))
        assert float(jax.jit(jax.grad(lambda x: loss(jax.lax.stop_gradient(x)) * x))(jnp.float32(2))) == 4.0


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_jax_jit_error_keeps_its_type_and_the_next_call_works() -> None:
    def attempt(group: gw.Group) -> tuple[gw.NotFinite, float]:
        mean = gw.jax.jit(lambda tree: gw.jax.all_reduce(group, tree))
        with pytest.raises(gw.NotFinite) as caught:
            mean({"w": jnp.float32(np.nan if group.rank == 1 else 1)})
        assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
        return caught.value, float(mean({"w": jnp.float32(5)})["w"])

    for error, after in run_group(2, attempt):
        assert (error.culprit, error.tensor, after) == (1, "w", 5.0)


def test_jax_jit_mismatch_names_the_leaf_and_the_calling_line() -> None:
    def attempt(group: gw.Group) -> str:
        reduce = gw.jax.jit(lambda tree: gw.jax.all_reduce(group, tree))  # this line
        with pytest.raises(gw.CollectiveMismatch) as caught:
            reduce({"w": jnp.ones(3 + group.rank)})
        return str(caught.value)

    for text in run_group(2, attempt):
        assert "'w': float32[3] is in the map of rank 0, not of rank 1" in text
        assert "at test_jit.py:" in text


def test_jax_plain_jit_lost_peer_is_named_and_typed_errors_raises_peer_lost() -> None:
    def attempt(group: gw.Group) -> list[str]:
        if group.rank == 1:
            group.close()
            return []
        reduce = jax.jit(lambda x: gw.jax.all_reduce(group, x))
        with pytest.raises(jax.errors.JaxRuntimeError) as plain:
            reduce(jnp.ones(3)).block_until_ready()
        with pytest.raises(gw.PeerLost) as typed, gw.jax.typed_errors():
            reduce(jnp.ones(3)).block_until_ready()
        assert typed.value.culprit == 1
        return [str(plain.value)]

    (text,), _ = run_group(2, attempt)
    assert "PeerLost: rank 1" in text


def test_jax_jit_foreign_error_is_unchanged() -> None:
    def fails() -> None:
        raise ValueError("not ours")

    with pytest.raises(jax.errors.JaxRuntimeError, match="not ours"):
        gw.jax.jit(lambda: jax.pure_callback(fails, jax.ShapeDtypeStruct((), "float32")))()
