"""JAX arrays as the state of an elastic run."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradwire as gw
from gradwire.training.state import State, memory_for
from support.ranks import run_group


class Momentum(NamedTuple):
    velocity: Any
    count: jax.Array


def handed_over(giver: Any, taker: Any) -> None:
    """Transfer the state of the giver to the taker, as for a rank that joins."""
    skeleton, leaves = State(giver).take_apart()
    memory = memory_for(skeleton)
    for target, source in zip(memory, leaves, strict=True):
        np.copyto(target, source)
    State(taker).put_together(skeleton, memory)
    assert State(taker).digest() == State(giver).digest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int8"])
def test_state_dict_of_jax_arrays_is_handed_over(dtype: str) -> None:
    giver = {"params": {"w": jnp.ones(3, dtype)}, "step": 4}
    mine = jnp.zeros(3, dtype)
    taker: dict[str, Any] = {"params": {"w": mine}, "step": 0}
    handed_over(giver, taker)
    assert isinstance(taker["params"]["w"], jax.Array)
    assert (taker["params"]["w"].dtype.name, taker["params"]["w"].tolist()) == (dtype, [1, 1, 1])
    assert taker["step"] == 4
    assert mine.tolist() == [0, 0, 0]  # an existing reference to the old array still sees the old values


def test_jax_state_handed_over_keeps_node_types_and_random_keys() -> None:
    def state(value: float, seed: int) -> gw.jax.State:
        optimizer = (Momentum({"w": jnp.full(2, value)}, jnp.int32(value)), ())
        return gw.jax.State(params={"w": jnp.full(2, value)}, optimizer=optimizer, key=jax.random.key(seed), epoch=seed)

    giver, taker = state(3.0, 7), state(0.0, 1)
    handed_over(giver, taker)
    momentum = taker.optimizer[0]
    assert isinstance(momentum, Momentum)
    assert (momentum.velocity["w"].tolist(), int(momentum.count), taker.epoch) == ([3.0, 3.0], 3, 7)
    assert jax.random.normal(taker.key) == jax.random.normal(giver.key)


def test_jax_state_of_another_structure_or_shape_raises_array_error() -> None:
    mine = gw.jax.State(params={"w": jnp.zeros(2)})
    with pytest.raises(gw.ArrayError, match=r"\['params'\]\['b'\] was received, but is not in this state"):
        handed_over(gw.jax.State(params={"w": jnp.zeros(2), "b": jnp.zeros(1)}), mine)
    with pytest.raises(gw.ArrayError, match=r"\['params'\]\['w'\] is missing in the received state"):
        handed_over(gw.jax.State(params={}), mine)
    with pytest.raises(gw.ArrayError, match=r"received float32\[3\], expected float32\[2\]"):
        handed_over(gw.jax.State(params={"w": jnp.zeros(3)}), mine)


def test_jax_state_reserved_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="cannot be named 'state_dict'"):
        gw.jax.State(state_dict={})


def test_elastic_run_with_jitted_steps_ends_with_equal_states() -> None:
    def train(group: gw.Group) -> tuple[list[float], bool]:
        state = gw.jax.State(w=jnp.full(3, group.rank + 1.0))
        run = gw.Elastic(state, group, 1)
        update = gw.jax.jit(lambda w: w + gw.jax.all_reduce(run, jnp.ones_like(w), op="sum"))
        for step in run.steps(4):
            with step:
                state.w = update(state.w)
        return state.w.tolist(), run.identical

    assert run_group(3, train) == [([1.0 + 4 * 3] * 3, True)] * 3
