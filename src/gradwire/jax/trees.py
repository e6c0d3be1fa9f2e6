"""Converts JAX trees to the named NumPy arrays that gradwire exchanges, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import ArrayError, UnsupportedOp
from gradwire.group import Group

ALIGNED = 64
"""Bytes. XLA uses the memory of an array without a copy if its address is a multiple of this."""

BARE = "the array"
"""The name of a leaf that is the whole tree."""


def flatten(tree: Any) -> tuple[tuple[str, ...], list[Any], Any]:
    """Return the names, leaves and structure of a tree. Names are paths, such as "encoder.0.weight"."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = tuple(jax.tree_util.keystr(path, simple=True, separator=".") or BARE for path, _ in paths)
    if len(set(names)) != len(names):  # for example {"a.b": …, "a": {"b": …}}
        names = tuple(jax.tree_util.keystr(path) for path, _ in paths)
    return names, [_leaf(name, leaf) for name, (_, leaf) in zip(names, paths, strict=True)], structure


def _leaf(name: str, leaf: Any) -> Any:
    """Convert a leaf to a jax array, with 32 bits unless 64 are enabled: the same dtype as inside `jit`."""
    if not isinstance(leaf, jax.Array):
        try:
            leaf = jnp.asarray(leaf, jnp.result_type(leaf))
        except TypeError as error:
            raise ArrayError(f"{name!r}: a {type(leaf).__name__} is not an array") from error
    if is_key(leaf):
        raise ArrayError(f"{name!r}: a random key cannot be exchanged; pass its bits, jax.random.key_data(key)")
    try:
        arrays.parse_dtype(leaf.dtype)
    except ArrayError as error:
        raise ArrayError(f"{name!r}: {error.message}") from None
    return leaf


def is_key(leaf: Any) -> bool:
    """Return whether this is a JAX random key."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def is_inexact(dtype: Any) -> bool:
    """Return whether elements can be NaN. Unlike NumPy's test, this one knows bfloat16."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def is_traced(leaves: Sequence[Any]) -> bool:
    """Return whether a leaf is a tracer: inside `jit`, `grad` and so on, where there are no values yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def check_op(names: Sequence[str], leaves: Sequence[Any], op: str) -> None:
    """Raise `UnsupportedOp` if the op is not defined for a leaf's dtype, before anything is sent or compiled."""
    for name, leaf in zip(names, leaves, strict=True):
        try:
            arrays.check_reduction(op, arrays.parse_dtype(leaf.dtype), "all_reduce")
        except UnsupportedOp as error:
            error.args = (f"{name!r}: {error.message}", *error.args[1:])
            raise


def contiguous(array: Array) -> Array:
    """Return the array, or a contiguous copy. Unlike `np.ascontiguousarray`, this keeps 0-d arrays."""
    return array if array.flags.c_contiguous else array.copy(order="C")


def copied(group: Group, leaves: Sequence[Array]) -> list[Array]:
    """Return writable copies in one new block of memory, shared memory if the group has it."""
    starts, end = [], 0
    for leaf in leaves:
        starts.append(end)
        end += -(-leaf.nbytes // ALIGNED) * ALIGNED
    memory = group.empty(end + ALIGNED, "uint8")
    memory = memory[-memory.ctypes.data % ALIGNED :]
    copies = []
    for start, leaf in zip(starts, leaves, strict=True):
        copy = memory[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
        np.copyto(copy, leaf)
        copies.append(copy)
    return copies


def as_jax(copies: Sequence[Array], likes: Sequence[Any]) -> list[Any]:
    """Return jax arrays on the devices of `likes`. On the CPU they use the memory of `copies` without a copy."""
    return [jax.device_put(copy, like.sharding) for copy, like in zip(copies, likes, strict=True)]
