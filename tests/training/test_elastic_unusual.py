"""Elastic runs of unusual programs: interrupted first steps, changes between steps, late joins and unusual states."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.training.state import State, memory_for
from support.elastic_ranks import Joiner, Left
from support.ranks import run_group, run_ranks

Meanwhile = Callable[[], None] | None


def test_elastic_first_step_interrupted_after_a_change_raises_state_lost() -> None:
    def train(group: gw.Group) -> str:
        state = {"w": np.zeros(2)}
        run = gw.Elastic(state, group, 1)
        try:
            for step in run.steps(2):
                with step:
                    state["w"] += run.group.all_reduce(np.ones(2), op="mean")
                    if group.rank == 2:
                        raise Left
                    run.group.all_reduce(1)
        except Left:
            run.close()
            return "left"
        except gw.StateLost:
            return "lost"
        return f"{state['w'][0]}"

    assert run_ranks(gw.local_group(3), train) == ["lost", "lost", "left"]


def test_elastic_first_step_interrupted_before_a_change_is_repeated() -> None:
    def train(group: gw.Group) -> float | None:
        state = {"w": np.zeros(2)}
        run = gw.Elastic(state, group, 1)
        try:
            for step in run.steps(2):
                with step:
                    if group.rank == 2:
                        raise Left
                    state["w"] += run.group.all_reduce(np.ones(2), op="mean")
        except Left:
            run.close()
            return None
        return float(state["w"][0])

    assert run_ranks(gw.local_group(3), train) == [2.0, 2.0, None]


@pytest.mark.parametrize("last", ["v", "w"])
def test_gradient_sync_ready_without_begin_follows_the_elastic_run(last: str) -> None:
    def train(group: gw.Group) -> float | None:
        state = {"v": np.zeros(2), "w": np.zeros(2)}
        run = gw.Elastic(state, group, 1)
        sync = gw.GradientSync(run, state, bucket_bytes=16, first_bucket_bytes=16)
        try:
            for step in run.steps(4):
                with step:
                    for name in ("w", "v"):
                        if group.rank == 2 and step.index == 2 and name == last:
                            raise Left
                        sync.gradients[name][:] = 1
                        sync.ready(name)
                    sync.finish()
                    for name, weight in state.items():
                        weight += sync.gradients[name]
        except Left:
            run.close()
            return None
        return float(state["w"][0])

    assert run_ranks(gw.local_group(3), train) == [4.0, 4.0, None]


def test_elastic_state_changed_between_steps_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    state: dict[str, Any] = {"w": np.zeros(2), "rate": 1.0}
    with gw.init() as group, caplog.at_level(logging.ERROR, "gradwire"):
        run = gw.Elastic(state, group, 1)
        for step in run.steps(4):
            with step:
                state["w"] += 1
            state["rate"] *= 0.5
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "between steps 0 and 1" in messages[0]


def test_elastic_joiner_during_a_later_run_of_the_program_is_refused() -> None:
    def train(group: gw.Group, meanwhile: Meanwhile = None) -> list[float] | str:
        first, second = {"w": np.zeros(1)}, {"w": np.full(1, 100.0)}
        run = gw.Elastic(first, group, 1)
        for step in run.steps(2):
            with step:
                first["w"] += run.group.all_reduce(np.ones(1), op="mean")
        run = gw.Elastic(second, run.group, 1)
        for step in run.steps(4):
            with step:
                second["w"] += run.group.all_reduce(np.full(1, 10.0), op="mean")
                if meanwhile and step.index == 1:
                    meanwhile()
        return [float(first["w"][0]), float(second["w"][0])]

    def late(group: gw.Group) -> list[float] | str:
        try:
            return train(group)
        except gw.ConfigError as error:
            return str(error)

    joiner = Joiner(late)
    old, new = joiner.run(lambda group: train(group, joiner.let_in))
    assert old == [[2.0, 140.0]] * 2
    assert "the other ranks are in their run 2" in new


# -- contents of a state -----------------------------------------------------------------------------------------------


def handed_over(giver: Any, taker: Any) -> None:
    skeleton, leaves = State(giver).take_apart()
    memory = memory_for(skeleton)
    for mine, theirs in zip(memory, leaves, strict=True):
        mine[...] = theirs.reshape(mine.shape)
    State(taker).put_together(skeleton, memory)
    assert State(taker).digest() == State(giver).digest()


@pytest.mark.parametrize("kind", [list, tuple])
def test_elastic_arrays_in_lists_and_tuples_are_written_in_place(kind: Any) -> None:
    def train(group: gw.Group) -> list[list[float]]:
        layers = [np.full(2, float(group.rank)), np.full(1, float(group.rank))]
        run = gw.Elastic({"layers": kind(layers), "more": kind([{"w": layers[0]}])}, group, 1)
        for step in run.steps(3):
            with step:
                for weight in layers:
                    weight += run.group.all_reduce(np.ones_like(weight), op="mean")
        assert run.identical
        return [weight.tolist() for weight in layers]

    assert run_group(2, train) == [[[3.0, 3.0], [3.0]]] * 2


def test_state_handed_over_keeps_the_order_of_keys() -> None:
    mine = np.zeros(2)
    taker: dict[str, Any] = {"w": mine, "best": 0.0}
    handed_over({"best": None, "w": np.ones(2), "none": None}, taker)
    assert list(taker) == ["best", "w", "none"]
    assert taker["w"] is mine
    assert mine.tolist() == [1.0, 1.0]


def test_state_handed_over_numpy_scalar_keeps_its_type() -> None:
    taker: dict[str, Any] = {"rate": 0.0}
    handed_over({"rate": np.float64(0.25)}, taker)
    assert isinstance(taker["rate"], np.float64)


@pytest.mark.parametrize("value", [b"abc", bytearray(b"abc"), memoryview(b"abc")])
def test_state_with_bytes_raises_array_error(value: Any) -> None:
    with pytest.raises(gw.ArrayError, match=r"state\['rng'\] is .*frombuffer"):
        State({"rng": value})
