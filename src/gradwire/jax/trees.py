"""Trees of arrays as the wire has them: named leaves in NumPy's hands, and jax arrays again."""

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
"""Where an array begins at a multiple of this, XLA takes it as it is instead of copying it."""


def take_apart(tree: Any) -> tuple[tuple[str, ...], list[Any], Any]:
    """The names, leaves and structure of a tree; names are paths: "encoder.0.weight"."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)
    if len(set(names)) != len(names):  # {"a.b": …} beside {"a": {"b": …}}
        names = tuple(jax.tree_util.keystr(path) for path, _ in paths)
    leaves = [_leaf(name or "the array", leaf) for name, (_, leaf) in zip(names, paths, strict=True)]
    return tuple(name or "the array" for name in names), leaves, structure


def _leaf(name: str, leaf: Any) -> Any:
    """A leaf as jax has it: of 32 bits unless 64 are enabled, inside of `jit` and outside alike."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ArrayError(f"{name!r}: a random key cannot be exchanged: pass jax.random.key_data(key)")
        return leaf
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise ArrayError(f"{name!r}: {type(leaf).__name__} is no array: {error}") from error


def is_traced(leaves: Sequence[Any]) -> bool:
    """Whether a tree is of values that are not there yet: inside of `jit`, `grad` and the like."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def copied(group: Group, leaves: Sequence[Array]) -> list[Array]:
    """Writable copies side by side in fresh memory that the group exchanges best."""
    starts, end = [], 0
    for leaf in leaves:
        starts.append(end)
        end += -(-leaf.nbytes // ALIGNED) * ALIGNED
    memory = group.empty(end, "uint8")
    copies = []
    for start, leaf in zip(starts, leaves, strict=True):
        copy = memory[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
        np.copyto(copy, leaf)
        copies.append(copy)
    return copies


def as_jax(copies: Sequence[Array], likes: Sequence[Any]) -> list[Any]:
    """Jax arrays where `likes` are; of large ones on the CPU the memory is taken over, not copied."""
    return [jax.device_put(copy, like.sharding) for copy, like in zip(copies, likes, strict=True)]


def on_host(names: Sequence[str], leaves: Sequence[Any]) -> list[Array]:
    """Leaves as NumPy sees them: without a copy on the CPU, else fetched from their device."""
    seen = []
    for name, leaf in zip(names, leaves, strict=True):
        array = np.asarray(leaf)
        try:
            arrays.dtype_of(array)
        except ArrayError as error:
            raise ArrayError(f"{name!r}: {error.message}") from None
        seen.append(array)
    return seen


def check_op(names: Sequence[str], leaves: Sequence[Any], op: str) -> None:
    """Refuse what has no meaning before anything is sent or compiled."""
    for name, leaf in zip(names, leaves, strict=True):
        try:
            arrays.check_reduction(op, arrays.parse_dtype(leaf.dtype))
        except (ArrayError, UnsupportedOp) as error:
            error.args = (f"{name!r}: {error.message}", *error.args[1:])
            raise


def describe(leaf: Any) -> str:
    """A leaf as error messages show it: float32[3, 4]."""
    return f"{leaf.dtype.name}[{', '.join(map(str, leaf.shape))}]"
