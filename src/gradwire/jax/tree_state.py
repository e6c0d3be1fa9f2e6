"""`gw.jax.State`: holds trees of arrays as the state of an elastic run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from gradwire import arrays
from gradwire.errors import ArrayError
from gradwire.jax import trees


class State:
    """Holds trees of arrays by name, as the state for `gw.elastic`.

    JAX arrays are immutable, so a step assigns new trees to the attributes: `state.params = …`. A rank that joins
    receives only the leaves. It keeps its own node types (such as named tuples of optax and dataclasses of flax) and
    its own devices, so its trees must have the same structure.

    Args:
        named: The trees, as keyword arguments. Each becomes an attribute.

    Raises:
        AttributeError: A name begins with an underscore, or is that of a method.

    >>> import gradwire as gw, jax.numpy as jnp
    >>> state = gw.jax.State(params={"w": jnp.zeros(2)}, seen=0)
    >>> run = gw.elastic(state)
    >>> for step in run.steps(3):
    ...     with step:
    ...         state.params = {"w": state.params["w"] + gw.jax.all_reduce(run, jnp.ones(2))}
    ...         state.seen += 1
    >>> state.params["w"].tolist(), int(state.seen)
    ([3.0, 3.0], 3)
    >>> run.close()
    """

    if TYPE_CHECKING:  # users choose the names of the attributes

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, **named: Any) -> None:
        for name, tree in named.items():
            setattr(self, name, tree)

    def __setattr__(self, name: str, tree: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            raise AttributeError(f"a tree cannot be named {name!r}")
        super().__setattr__(name, tree)

    def __repr__(self) -> str:
        return f"gradwire.jax.State({', '.join(vars(self))})"

    def state_dict(self) -> dict[str, Any]:
        """Return all leaves by name."""
        paths, _ = jax.tree_util.tree_flatten_with_path(vars(self))
        return {jax.tree_util.keystr(path): _plain(leaf) for path, leaf in paths}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all leaves by those of `state`; raise `ArrayError` if a name, shape or dtype differs."""
        paths, structure = jax.tree_util.tree_flatten_with_path(vars(self))
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        if odd := sorted(set(names) ^ set(state)):
            side = "is missing in the received state" if odd[0] in names else "was received, but is not in this state"
            raise ArrayError(f"{odd[0]} {side}")
        leaves = [_like(name, leaf, state[name]) for name, (_, leaf) in zip(names, paths, strict=True)]
        for name, tree in jax.tree_util.tree_unflatten(structure, leaves).items():
            setattr(self, name, tree)


def _plain(leaf: Any) -> Any:
    """Return the leaf in the form that is exchanged: a random key as its bits, other leaves unchanged."""
    return jax.random.key_data(leaf) if trees.is_key(leaf) else leaf


def _like(name: str, own: Any, received: Any) -> Any:
    """Convert a received leaf to the kind and the devices of this rank's own leaf."""
    if not isinstance(own, jax.Array) or not isinstance(received, jax.Array):
        return received
    array = jnp.asarray(received)
    expected = jax.random.key_data(own) if trees.is_key(own) else own
    if (array.shape, array.dtype) != (expected.shape, expected.dtype):
        raise ArrayError(f"{name}: received {arrays.describe(array)}, expected {arrays.describe(expected)}")
    if trees.is_key(own):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(own))
    if own.weak_type and not array.ndim:  # only a Python number becomes a weakly typed array
        array = jnp.asarray(array.item())
    return jax.device_put(array, own.sharding)
