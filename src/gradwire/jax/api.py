"""The functions of `gw.jax` that users call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax

from gradwire.errors import UnsupportedOp
from gradwire.jax import failures, reduction, traced, trees
from gradwire.liveness.call_log import call_site
from gradwire.training import contract

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
    {'b': Array(0.5, dtype=float32), 'w': Array([1., 1.], dtype=float32)}
    Array([0, 1, 2], dtype=int32)
    """
    names, leaves, structure = trees.take_apart(tree)
    trees.check_op(names, leaves, op)
    checks = op == "mean" if check_finite is None else bool(check_finite)
    results = traced.all_reduce_p.bind(*leaves, names=names, source=group, op=op, check_finite=checks, site=call_site())
    return jax.tree_util.tree_unflatten(structure, results)


def broadcast(group: Any, tree: Any, root: int = 0) -> Any:
    """The root's tree on every rank, as new jax arrays: for initial values. Outside of `jit` only.

    Trees that differ in names, shapes or dtypes are a `ConfigError` on all ranks that says where.

    >>> import gradwire as gw, jax.numpy as jnp
    >>> with gw.init() as group: gw.jax.broadcast(group, {"w": jnp.arange(2)})
    {'w': Array([0, 1], dtype=int32)}
    """
    names, leaves, structure = _apart("broadcast", tree)
    group = reduction.group_of(group)
    copies = trees.copied(group, reduction.values(leaves))
    contract.broadcast_named(group, dict(zip(names, copies, strict=True)), root)
    return jax.tree_util.tree_unflatten(structure, trees.as_jax(copies, leaves))


def check_replicas(group: Any, tree: Any) -> str:
    """Raise `ReplicasDiverged` on every rank unless all hold the same tree, bit for bit; the digest. Outside of `jit`.

    It names the rank that differs and its first leaf that does. The group goes on.

    >>> import gradwire as gw, jax.numpy as jnp
    >>> with gw.init() as group: len(gw.jax.check_replicas(group, {"w": jnp.ones(3)}))
    32
    """
    names, leaves, _ = _apart("check_replicas", tree)
    return contract.check_replicas(reduction.group_of(group), dict(zip(names, reduction.values(leaves), strict=True)))


def _apart(call: str, tree: Any) -> tuple[tuple[str, ...], list[Any], Any]:
    names, leaves, structure = trees.take_apart(tree)
    if trees.is_traced(leaves):
        raise UnsupportedOp(f"{call} cannot be part of a compiled program: call it outside of jit", operation=call)
    return names, leaves, structure


@overload
def jit(function: Callable[P, R], **options: Any) -> Callable[P, R]: ...
@overload
def jit(**options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def jit(function: Any = None, **options: Any) -> Any:
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
    def call(*args: Any, **kwargs: Any) -> Any:
        with failures.typed_errors():
            result = jax.block_until_ready(compiled(*args, **kwargs))
            jax.effects_barrier()  # a program that returns nothing has an end, too
            return result

    return call
