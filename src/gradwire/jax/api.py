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
    """Reduce a tree of arrays over all ranks. All ranks must call it, with trees of the same structure.

    It works in plain Python and inside `jit`, `grad` and `vmap`. Sum and mean can be differentiated: the loss is taken
    to be the sum of all ranks' losses, so the cotangents are summed (averaged) over the ranks too, and all ranks must
    differentiate the same program.

    Args:
        group: A group, or a run of `gw.elastic`. With a run, the call uses the run's current group.
        tree: A tree of arrays and numbers.
        op: "mean", "sum", "min", "max" or "prod".
        check_finite: Raise `NotFinite` if the sum or mean has a NaN or an infinite value. By default this is checked
            for the mean, which is the usual reduction of gradients.

    Returns:
        A tree of new jax arrays, with the same bits on every rank.

    Raises:
        CollectiveMismatch: On every rank, if the trees differ. It names the leaf.
        NotFinite: On every rank. It names the rank and the leaf.
        ArrayError: A leaf is not an array, or is a random key.
        UnsupportedOp: The reduction is not defined for the dtype of a leaf, or has no gradient.

    >>> import gradwire as gw, jax, jax.numpy as jnp
    >>> with gw.init() as group:
    ...     gw.jax.all_reduce(group, {"w": jnp.ones(2), "b": 0.5})
    ...     jax.jit(lambda x: gw.jax.all_reduce(group, x, op="sum"))(jnp.arange(3))
    {'b': Array(0.5, dtype=float32), 'w': Array([1., 1.], dtype=float32)}
    Array([0, 1, 2], dtype=int32)
    """
    names, leaves, structure = trees.flatten(tree)
    trees.check_op(names, leaves, op)
    checks = op == "mean" if check_finite is None else bool(check_finite)
    results = traced.all_reduce_p.bind(*leaves, names=names, source=group, op=op, check_finite=checks, site=call_site())
    return jax.tree_util.tree_unflatten(structure, results)


def broadcast(group: Any, tree: Any, root: int = 0) -> Any:
    """Return the root's tree on every rank, for example for initial values. All ranks must call it, outside of `jit`.

    Args:
        group: A group, or a run of `gw.elastic`.
        tree: A tree of arrays and numbers. Names, shapes and dtypes must be the same on all ranks.
        root: The rank whose tree is returned.

    Returns:
        A tree of new jax arrays.

    Raises:
        ConfigError: On every rank, if names, shapes or dtypes differ. It names the rank and the leaf.
        UnsupportedOp: The call is part of a compiled program.

    >>> import gradwire as gw, jax.numpy as jnp
    >>> with gw.init() as group: gw.jax.broadcast(group, {"w": jnp.arange(2)})
    {'w': Array([0, 1], dtype=int32)}
    """
    names, leaves, structure = _flatten_values("broadcast", tree)
    group = reduction.group_of(group)
    copies = trees.copied(group, reduction.values(leaves))
    contract.broadcast_named(group, dict(zip(names, copies, strict=True)), root)
    return jax.tree_util.tree_unflatten(structure, trees.as_jax(copies, leaves))


def check_replicas(group: Any, tree: Any) -> str:
    """Check that all ranks hold the same tree, bit for bit. All ranks must call it, outside of `jit`.

    Args:
        group: A group, or a run of `gw.elastic`.
        tree: A tree of arrays and numbers.

    Returns:
        The digest of the tree, 32 hexadecimal digits.

    Raises:
        ReplicasDiverged: On every rank. It names a rank that differs and its first leaf that differs. The group stays
            usable.
        UnsupportedOp: The call is part of a compiled program.

    >>> import gradwire as gw, jax.numpy as jnp
    >>> with gw.init() as group: len(gw.jax.check_replicas(group, {"w": jnp.ones(3)}))
    32
    """
    names, leaves, _ = _flatten_values("check_replicas", tree)
    return contract.check_replicas(reduction.group_of(group), dict(zip(names, reduction.values(leaves), strict=True)))


def _flatten_values(call: str, tree: Any) -> tuple[tuple[str, ...], list[Any], Any]:
    names, leaves, structure = trees.flatten(tree)
    if trees.is_traced(leaves):
        raise UnsupportedOp(f"{call} cannot be part of a compiled program: call it outside of jit", operation=call)
    return names, leaves, structure


@overload
def jit(function: Callable[P, R], **options: Any) -> Callable[P, R]: ...
@overload
def jit(**options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def jit(function: Any = None, **options: Any) -> Any:
    """Compile a function that calls `gw.jax.all_reduce`. Use it in place of `jax.jit`, also as a decorator.

    A call of the compiled function waits for its result. Without this wait, collectives of the compiled program could
    run at the same time as collectives that Python calls next on the same group. An error of the group would also be
    raised later, as a `JaxRuntimeError`; here it is raised with its original type.

    Args:
        function: The function to compile.
        options: Options of `jax.jit`.

    Returns:
        The compiled function; without `function`, a decorator.

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
            jax.effects_barrier()  # waits for a program that returns no arrays, too
            return result

    return call
