"""`gw.jax.State`: trees as the state of an elastic run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from gradwire import arrays
from gradwire.errors import ArrayError
from gradwire.jax import trees


class State:
    """Trees of arrays that replicas keep alike, by name: what `gw.elastic` takes for JAX.

    Jax arrays never change, so a step gives an attribute its new tree: `state.params = …`. A rank that joins gets the
    leaves of another, and keeps its own kinds of nodes (named tuples of optax, dataclasses of flax) and its devices.

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

    if TYPE_CHECKING:  # attributes are what the user calls them

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, **named: Any) -> None:
        for name, tree in named.items():
            setattr(self, name, tree)

    def __setattr__(self, name: str, tree: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            raise AttributeError(f"a tree cannot be called {name!r}")
        super().__setattr__(name, tree)

    def __repr__(self) -> str:
        return f"gradwire.jax.State({', '.join(vars(self))})"

    def state_dict(self) -> dict[str, Any]:
        """All leaves by their names."""
        paths, _ = jax.tree_util.tree_flatten_with_path(vars(self))
        return {jax.tree_util.keystr(path): _plain(leaf) for path, leaf in paths}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over leaves of the same names, shapes and dtypes; `ArrayError` names one that differs."""
        paths, structure = jax.tree_util.tree_flatten_with_path(vars(self))
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        if odd := sorted(set(names) ^ set(state)):
            side = "is not in the state that came" if odd[0] in names else "came, and is not in this state"
            raise ArrayError(f"{odd[0]} {side}")
        leaves = [_like(name, leaf, state[name]) for name, (_, leaf) in zip(names, paths, strict=True)]
        for name, tree in jax.tree_util.tree_unflatten(structure, leaves).items():
            setattr(self, name, tree)


def _plain(leaf: Any) -> Any:
    """A leaf as it travels: a random key by its bits, numbers as they are."""
    return jax.random.key_data(leaf) if trees.is_key(leaf) else leaf


def _like(name: str, own: Any, came: Any) -> Any:
    if not isinstance(own, jax.Array) or not isinstance(came, jax.Array):
        return came
    array = jnp.asarray(came)
    expected = jax.random.key_data(own) if trees.is_key(own) else own
    if (array.shape, array.dtype) != (expected.shape, expected.dtype):
        raise ArrayError(f"{name}: {arrays.describe(array)} came where {arrays.describe(expected)} is kept")
    if trees.is_key(own):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(own))
    if own.weak_type and not array.ndim:  # what its type is, others decide: a number becomes such an array
        array = jnp.asarray(array.item())
    return jax.device_put(array, own.sharding)
