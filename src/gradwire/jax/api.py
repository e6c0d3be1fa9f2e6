"""The functions of `gw.jax` that users call."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from gradwire.errors import ConfigError, UnsupportedOp
from gradwire.jax import failures, reduction, traced, trees
from gradwire.liveness.call_log import call_site
from gradwire.training import contract
from gradwire.training.engine_group import group_for

P = ParamSpec("P")
R = TypeVar("R")


def all_reduce(group: Any, tree: Any, op: str = "mean", *, weight: Any = None, check_finite: bool | None = None) -> Any:
    """Reduce a tree of arrays over all ranks. All ranks must call it, with trees of the same structure.

    It works in plain Python and inside `jit`, `grad` and `vmap`. Sum and mean can be differentiated: the loss is taken
    to be the sum of all ranks' losses, so the cotangents are summed (averaged) over the ranks too, and all ranks must
    differentiate the same program.

    Args:
        group: A group, another `gw.Communicator`, or a run of `gw.elastic`. With a run, the call uses the run's
            current group.
        tree: A tree of arrays and numbers.
        op: "mean", "sum", "min", "max" or "prod".
        weight: The weight of this rank in the mean, for example its number of samples: a number, or inside of `jit` a
            scalar array. Either all ranks pass a weight or none does. A rank with weight 0 is ignored, even if its
            values are NaN. The weight itself has no gradient.
        check_finite: Raise `NotFinite` if the sum or mean has a NaN or an infinite value. By default this is checked
            for the mean, which is the usual reduction of gradients.

    Returns:
        A tree of new jax arrays, with the same bits on every rank.

    Raises:
        ConfigError: On every rank, if a weight is NaN, infinite or negative (it names the rank), or if all weights are
            0. Also if the weight is not a number, or the op is not "mean".
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
    how = reduction.How(op, checks, call_site(), None if weight is None else "input")
    weights = [] if weight is None else [_weight(weight, op)]
    results = traced.all_reduce_p.bind(*weights, *leaves, names=names, source=group, how=how)
    return jax.tree_util.tree_unflatten(structure, results)


def _weight(weight: Any, op: str) -> Any:
    """Return the weight as a scalar jax array. Its value is checked when the call runs, on all ranks together."""
    if op != "mean":
        raise ConfigError(f"a weight has no meaning for op={op!r}: pass op='mean'")
    if isinstance(weight, numbers.Real) and not isinstance(weight, bool):
        return jnp.asarray(float(weight), jnp.result_type(float))
    if isinstance(weight, (jax.Array, np.ndarray)) and not weight.shape and _is_real(weight.dtype):
        return jax.lax.stop_gradient(jnp.asarray(weight))
    raise ConfigError(f"the weight is {weight!r}: it must be a finite number, 0 or more")


def _is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer))


def broadcast(group: Any, tree: Any, root: int = 0) -> Any:
    """Return the root's tree on every rank, for example for initial values. All ranks must call it, outside of `jit`.

    Args:
        group: A group, another `gw.Communicator`, or a run of `gw.elastic`.
        tree: A tree of arrays and numbers. Names, shapes and dtypes must be the same on all ranks. Other leaves, such
            as the functions and strings in a module of equinox, are not sent.
        root: The rank whose tree is returned.

    Returns:
        A tree with the root's values: new jax arrays for arrays, and Python numbers for Python numbers. The other
        leaves are those of this rank.

    Raises:
        ConfigError: On every rank, if names, shapes or dtypes differ. It names the rank and the leaf.
        UnsupportedOp: The call is part of a compiled program.

    >>> import gradwire as gw, jax.numpy as jnp
    >>> with gw.init() as group: gw.jax.broadcast(group, {"w": jnp.arange(2)})
    {'w': Array([0, 1], dtype=int32)}
    """
    values = _values("broadcast", tree)
    calls = group_for(group)
    copies = trees.copied(calls, reduction.values(values.leaves))
    contract.broadcast_named(calls, dict(zip(values.names, copies, strict=True)), root)
    return values.rebuilt(copies)


def check_replicas(group: Any, tree: Any) -> str:
    """Check that all ranks hold the same tree, bit for bit. All ranks must call it, outside of `jit`.

    Args:
        group: A group, another `gw.Communicator`, or a run of `gw.elastic`.
        tree: A tree of arrays and numbers. Other leaves, such as functions and strings, are not compared.

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
    values = _values("check_replicas", tree)
    arrays = dict(zip(values.names, reduction.values(values.leaves), strict=True))
    return contract.check_replicas(group_for(group), arrays)


def _values(call: str, tree: Any) -> trees.TreeValues:
    values = trees.TreeValues(tree)
    if trees.is_traced(values.leaves):
        raise UnsupportedOp(f"{call} cannot be part of a compiled program: call it outside of jit", operation=call)
    return values


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
