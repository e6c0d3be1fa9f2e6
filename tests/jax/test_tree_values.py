"""gw.jax.broadcast and gw.jax.check_replicas of trees with leaves that are not arrays, as modules of equinox have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradwire as gw
from support.ranks import run_group


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A layer in the style of equinox: all fields are leaves, whatever they hold."""

    weight: Any
    dropout: float
    inference: bool
    width: int
    activation: Callable[[Any], Any] = jax.nn.relu
    name: str = "float32"  # also the name of a dtype, which is not an array
    dtype: Any = np.float32
    bias: Any = None
    shape: Any = dataclasses.field(default_factory=object)


def module(rank: int) -> Module:
    return Module(jnp.full((2, 3), rank, "bfloat16"), rank + 0.1, rank == 1, 2**40 + rank, name=f"layer of {rank}")


def test_jax_broadcast_sends_arrays_and_numbers_and_leaves_the_rest_unchanged() -> None:
    def begin(group: gw.Group) -> tuple[Module, Module]:
        mine = module(group.rank)
        return mine, gw.jax.broadcast(group, mine, root=1)

    for rank, (mine, received) in enumerate(run_group(3, begin)):
        assert isinstance(received.weight, jax.Array)
        assert (np.asarray(received.weight) == 1).all()
        assert (received.dropout, received.inference, received.width) == (1.1, True, 2**40 + 1)
        assert [type(one) for one in (received.dropout, received.inference, received.width)] == [float, bool, int]
        assert (received.name, received.bias) == (f"layer of {rank}", None)
        assert all(
            getattr(received, field) is getattr(mine, field) for field in ("activation", "name", "dtype", "shape")
        )


def test_jax_check_replicas_compares_arrays_and_numbers_only() -> None:
    def check(group: gw.Group) -> gw.ReplicasDiverged:
        mine = dataclasses.replace(module(0), name=f"layer of {group.rank}", activation=lambda x: x)
        gw.jax.check_replicas(group, [mine])
        mine.dropout += group.rank == 1
        with pytest.raises(gw.ReplicasDiverged) as caught:
            gw.jax.check_replicas(group, [mine])
        return caught.value

    for error in run_group(2, check):
        assert (error.culprit, error.tensor) == (1, "0.dropout")


def test_jax_check_replicas_an_array_on_one_rank_only_names_rank_and_leaf() -> None:
    def check(group: gw.Group) -> gw.ReplicasDiverged:
        with pytest.raises(gw.ReplicasDiverged) as caught:
            gw.jax.check_replicas(group, {"w": jnp.ones(2), "scale": jnp.ones(1) if group.rank else "none"})
        return caught.value

    assert [(error.culprit, error.tensor) for error in run_group(2, check)] == [(1, "scale")] * 2


@pytest.mark.parametrize("tree", [{"f": print}, {"f": "float32"}, {"f": jnp.float32}, {"f": object()}])
def test_jax_all_reduce_leaf_that_is_not_an_array_raises_array_error(tree: Any) -> None:
    with gw.init() as group, pytest.raises(gw.ArrayError, match=r"'f': a \w+ is not an array\. Remove such leaves"):
        gw.jax.all_reduce(group, tree)


@pytest.mark.parametrize("call", [gw.jax.broadcast, gw.jax.check_replicas])
@pytest.mark.parametrize("leaf", [jax.random.key(0), np.array(["text"]), 2**70])
def test_jax_tree_value_that_cannot_be_sent_raises_array_error_naming_the_leaf(call: Any, leaf: Any) -> None:
    with gw.init() as group, pytest.raises(gw.ArrayError, match="'odd': "):
        call(group, {"w": jnp.ones(1), "odd": leaf})


def test_jax_broadcast_and_check_replicas_accept_trees_without_values() -> None:
    def both(group: gw.Group) -> Any:
        tree = {"f": len, "none": None}
        gw.jax.check_replicas(group, tree)
        return gw.jax.broadcast(group, tree)

    assert run_group(2, both) == [{"f": len, "none": None}] * 2
