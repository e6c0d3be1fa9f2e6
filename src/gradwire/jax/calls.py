"""What users call: `gw.jax.all_reduce`, `gw.jax.broadcast`, `gw.jax.jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from gradwire.errors import UnsupportedOp
from gradwire.jax import failures, reduction, traced, trees

P = ParamSpec("P")
R = TypeVar("R")


def all_reduce(group: Any, tree: Any, op: str = "mean", *, check_finite: bool | None = None) -> Any:
    """Reduce a tree of arrays over all ranks, in one go; returns a tree of new jax arrays, the same bits on every rank.

    `group` is a group, or a run of `gw.elastic` (then always its present group). op is mean, sum, min, max or prod.
    Works on values and, inside of `jit`, `grad`, `vmap` …, on tracers. Of sum and mean there is a gradient: that of the
    sum over all ranks' losses, so cotangents are summed (averaged) over ranks, too; all ranks must differentiate alike.

    Trees that differ between ranks are a `CollectiveMismatch` that names the leaf. A NaN or Inf is a `NotFinite` on all
    ranks that names rank and leaf; by default this is checked for the mean, which is what gradients get.

    >>> import gradwire as gw, jax, jax.numpy as jnp
    >>> with gw.init() as group:
    ...     gw.jax.all_reduce(group, {"w": jnp.ones(2), "b": 0.5})
    ...     jax.jit(lambda x: gw.jax.all_reduce(group, x, op="sum"))(jnp.arange(3))
    {'b': Array(0.5, dtype=float32, weak_type=True), 'w': Array([1., 1.], dtype=float32)}
    Array([0, 1, 2], dtype=int32)
    """
    names, leaves, structure = trees.take_apart(tree)
    checks = op == "mean" if check_finite is None else bool(check_finite)
    trees.check_op(names, leaves, op)
    how = {"names": names, "source": group, "op": op, "check_finite": checks}
    if trees.is_traced(leaves):
        results = traced.all_reduce_p.bind(*leaves, **how)
    else:
        with failures.typed_errors():  # of a program before it, whose result comes in here
            seen = trees.on_host(names, leaves)
        results = trees.as_jax(reduction.reduced(group, names, seen, op, checks), leaves)
    return jax.tree_util.tree_unflatten(structure, results)


def broadcast(group: Any, tree: Any, root: int = 0) -> Any:
    """The root's tree on every rank, as new jax arrays: for initial values. All trees must have the same shape.

    >>> import gradwire as gw, jax.numpy as jnp
    >>> with gw.init() as group: gw.jax.broadcast(group, {"w": jnp.arange(2)})
    {'w': Array([0, 1], dtype=int32)}
    """
    names, leaves, structure = trees.take_apart(tree)
    if trees.is_traced(leaves):
        raise UnsupportedOp("broadcast is for initial values: call it outside of jit", operation="broadcast")
    with failures.typed_errors():
        seen = trees.on_host(names, leaves)
    results = trees.as_jax(reduction.spread(group, names, seen, root), leaves)
    return jax.tree_util.tree_unflatten(structure, results)


def jit(function: Callable[P, R] | None = None, **options: Any) -> Any:
    """`jax.jit`, for a function that calls `gw.jax.all_reduce`: waits for the result, and raises errors of the group.

    Without the wait, the program's calls would run beside those that Python makes on the same group next; and an error
    would come out later, as a `JaxRuntimeError`. Options are those of `jax.jit`.

    >>> import gradwire as gw, jax, jax.numpy as jnp
    >>> group = gw.init()
    >>> @gw.jax.jit
    ... def step(w, x):
    ...     gradient = jax.grad(lambda w: jnp.sum((x - w) ** 2))(w)
    ...     return w - 0.5 * gw.jax.all_reduce(group, gradient)
    >>> step(jnp.zeros(2), jnp.ones(2))
    Array([1., 1.], dtype=float32)
    >>> group.close()
    """
    if function is None:
        return functools.partial(jit, **options)
    compiled = jax.jit(function, **options)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with failures.typed_errors():
            result: R = jax.block_until_ready(compiled(*args, **kwargs))
            jax.effects_barrier()  # what returns nothing has an end, too
            return result

    return call
