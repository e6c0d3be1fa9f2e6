"""Between JAX trees and the named NumPy arrays that gradwire exchanges."""

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
"""Bytes. An array that begins at a multiple of it is taken over by XLA as it is, any other is copied."""

BARE = "the array"
"""The name of a leaf that is the whole tree."""


def take_apart(tree: Any) -> tuple[tuple[str, ...], list[Any], Any]:
    """The names, leaves and structure of a tree; names are paths: "encoder.0.weight"."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = tuple(jax.tree_util.keystr(path, simple=True, separator=".") or BARE for path, _ in paths)
    if len(set(names)) != len(names):  # {"a.b": …} beside {"a": {"b": …}}
        names = tuple(jax.tree_util.keystr(path) for path, _ in paths)
    return names, [_leaf(name, leaf) for name, (_, leaf) in zip(names, paths, strict=True)], structure


def _leaf(name: str, leaf: Any) -> Any:
    """A leaf as jax has it: of 32 bits unless 64 are enabled, outside of `jit` as inside."""
    if not isinstance(leaf, jax.Array):
        try:
            leaf = jnp.asarray(leaf, jnp.result_type(leaf))
        except TypeError as error:
            raise ArrayError(f"{name!r}: a {type(leaf).__name__} is not an array") from error
    if is_key(leaf):
        raise ArrayError(f"{name!r}: a random key cannot be exchanged; its bits can: jax.random.key_data(key)")
    try:
        arrays.parse_dtype(leaf.dtype)
    except ArrayError as error:
        raise ArrayError(f"{name!r}: {error.message}") from None
    return leaf


def is_key(leaf: Any) -> bool:
    """Whether this is a random key, whose bits JAX hides."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def is_inexact(dtype: Any) -> bool:
    """Whether elements can be NaN: bfloat16 too, of which NumPy does not know."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def is_traced(leaves: Sequence[Any]) -> bool:
    """Whether values are not there yet: inside of `jit`, `grad` and the like."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def check_op(names: Sequence[str], leaves: Sequence[Any], op: str) -> None:
    """Refuse what has no meaning before anything is sent or compiled."""
    for name, leaf in zip(names, leaves, strict=True):
        try:
            arrays.check_reduction(op, arrays.parse_dtype(leaf.dtype))
        except UnsupportedOp as error:
            error.args = (f"{name!r}: {error.message}", *error.args[1:])
            raise


def contiguous(array: Array) -> Array:
    """The array itself, or a copy in one piece; unlike NumPy's, of a lone number too."""
    return array if array.flags.c_contiguous else array.copy(order="C")


def copied(group: Group, leaves: Sequence[Array]) -> list[Array]:
    """Writable copies side by side in fresh memory that the group exchanges best."""
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
    """Jax arrays where `likes` are. On the CPU the memory is taken over, not copied: nobody else holds it."""
    return [jax.device_put(copy, like.sharding) for copy, like in zip(copies, likes, strict=True)]
