"""Elastic runs without recovery: normal runs, diverging states and errors; ranks are threads of this process."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.training.step_protocol import StepProtocol
from gradwire.training.step_requests import Pause, Steps
from support.ranks import run_ranks


def runs(n: int) -> list[gw.Group]:
    return gw.local_group(n)


def test_elastic_different_initial_states_all_start_from_rank_0() -> None:
    def train(group: gw.Group) -> tuple[Any, int, str, list[int]]:
        state = {"w": np.full(5, group.rank + 1.0)}
        run, seen = gw.Elastic(state, group, 1), []
        for step in run.steps(4):
            with step:
                seen.append(int(step.index))
                state["w"] += run.group.all_reduce(np.full(5, group.rank + 1.0))
            assert step.committed
        return state["w"].tolist(), run.committed, run.digest, seen

    results = run_ranks(runs(3), train)
    assert results[0][0] == [1 + 4 * 6.0] * 5
    assert results[0][1] == 3
    assert results[0][3] == [0, 1, 2, 3]
    assert results == [results[0]] * 3


def test_elastic_steps_called_again_continues_after_the_last_step() -> None:
    with gw.init() as group:
        state = {"n": np.zeros(1)}
        run = gw.Elastic(state, group, 1)
        for total in (2, 2, 0, 5):
            for step in run.steps(total):
                with step:
                    state["n"] += 1
        assert (state["n"][0], run.committed) == (5, 4)


def test_elastic_without_a_group_uses_the_open_group_of_init() -> None:
    with gw.init() as group:
        assert gw.elastic({"w": np.ones(1)}).group is group
    run = gw.elastic({"w": np.ones(1)})  # the first group is closed
    assert run.group is not group
    run.close()


def test_elastic_step_not_entered_raises_config_error() -> None:
    with gw.init() as group:
        steps = gw.Elastic({"w": np.ones(1)}, group, 1).steps(3)
        next(steps)
        with pytest.raises(gw.ConfigError, match="step 0 was not entered"):
            next(steps)


def test_elastic_step_entered_twice_raises_config_error() -> None:
    with gw.init() as group:
        for step in gw.Elastic({"w": np.ones(1)}, group, 1).steps(1):
            with step:
                pass
            with pytest.raises(gw.ConfigError, match="step 0 has ended"), step:
                pass


def diverging(group: gw.Group, wrong: int, on_divergence: Any = "raise") -> tuple[gw.Elastic, dict[str, Any]]:
    """A run in which one rank changes `model.b` in step 1 of 3, without the other ranks."""
    state: dict[str, Any] = {"w": np.zeros(2), "model": {"a": np.zeros(2), "b": np.zeros(3)}}
    run = gw.Elastic(state, group, 1, on_divergence)
    for step in run.steps(3):
        with step:
            state["w"] += run.group.all_reduce(np.ones(2))
            if step.index == 1 and group.rank == wrong:
                state["model"]["b"][2] = 1e-9
    return run, state


@pytest.mark.parametrize(("size", "wrong"), [(2, 1), (3, 0), (3, 1)])
def test_elastic_when_states_differ_raises_on_all_ranks_naming_rank_and_tensor(size: int, wrong: int) -> None:
    def train(group: gw.Group) -> tuple[Any, ...]:
        with pytest.raises(gw.ReplicasDiverged) as caught:
            diverging(group, wrong)
        group.barrier()  # the group is still usable
        error = caught.value
        return error.culprit, error.tensor, error.operation, str(error)

    found = run_ranks(runs(size), train)
    assert found == [(wrong, "model.b", "step 1", found[0][3])] * size
    against = "2 of 3 ranks" if size == 3 else "rank 0"
    assert re.match(
        rf"after step 1, rank {wrong} holds a different 'model.b' \(digest \w+\) than {against} ", found[0][3]
    )


def test_elastic_when_states_differ_does_not_commit_the_step() -> None:
    def train(group: gw.Group) -> list[int]:
        state, seen = {"w": np.zeros(2)}, []
        run = gw.Elastic(state, group, 1)
        try:
            for step in run.steps(3):
                with step:
                    state["w"][0] = group.rank * step.index
        except gw.ReplicasDiverged:
            seen += [run.committed, run.completed, int(step.committed)]
        return seen

    assert run_ranks(runs(2), train) == [[0, 1, 0]] * 2


@pytest.mark.parametrize("value", [1, 2.5, "text", None, (1, 2)], ids=str)
def test_elastic_when_plain_values_differ_names_them(value: Any) -> None:
    def train(group: gw.Group) -> str | None:
        state: dict[str, Any] = {"w": np.zeros(2), "epoch": 0}
        run = gw.Elastic(state, group, 1)
        with pytest.raises(gw.ReplicasDiverged) as caught:
            for step in run.steps(3):
                with step:
                    state["epoch"] = value if group.rank else 0
        return caught.value.tensor

    (name,) = set(run_ranks(runs(2), train))
    assert name is not None
    assert name.startswith("epoch")


def test_elastic_when_only_the_structure_differs_names_the_structure() -> None:
    def train(group: gw.Group) -> str | None:
        state: dict[str, Any] = {"sizes": [1, 2]}
        run = gw.Elastic(state, group, 1)
        with pytest.raises(gw.ReplicasDiverged) as caught:
            for step in run.steps(1):
                with step:
                    state["sizes"] = (1, 2) if group.rank else [1, 2]
        return caught.value.tensor

    assert run_ranks(runs(2), train) == ["the structure of the state"] * 2


def test_elastic_on_divergence_warn_logs_once_on_each_rank(caplog: pytest.LogCaptureFixture) -> None:
    def train(group: gw.Group) -> tuple[bool, int]:
        run, _ = diverging(group, 1, "warn")
        return run.identical, run.committed

    with caplog.at_level(logging.ERROR, "gradwire.training"):
        assert run_ranks(runs(2), train) == [(False, 2)] * 2
    texts = [record.message for record in caplog.records]
    assert len(texts) == 2
    assert all(text.startswith("after step 1, rank 1 holds a different 'model.b' ") for text in texts)


def test_elastic_unknown_on_divergence_raises_config_error() -> None:
    with gw.init() as group, pytest.raises(gw.ConfigError, match="on_divergence is 'ignore': it must be raise or warn"):
        gw.Elastic({"w": np.zeros(1)}, group, 1, "ignore")  # type: ignore[arg-type]


def test_elastic_fixed_membership_lost_rank_raises_peer_lost() -> None:
    def train(group: gw.Group) -> str:
        run = gw.Elastic({"w": np.zeros(1)}, group, 1)
        try:
            for step in run.steps(3):
                with step:
                    if group.rank == 1 and step.index == 1:
                        group.close()
                        return "left"
                    group.barrier()
        except gw.PeerLost as lost:
            where = re.search(r"during (barrier #\d+, step 1, test_elastic.py):\d+", str(lost))
            return f"lost {lost.culprit} in step {lost.step}: {where and where[1]}"
        return "done"

    pair = gw.loopback_pair()
    try:
        assert run_ranks(pair, train) == ["lost 1 in step 1: barrier #3, step 1, test_elastic.py", "left"]
    finally:
        for group in pair:
            group.close()


def test_elastic_error_raised_in_a_step_propagates() -> None:
    def train(group: gw.Group) -> None:
        for step in gw.Elastic({"w": np.zeros(1)}, group, 1).steps(3):
            with step:
                raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run_ranks(runs(2), train)


@pytest.mark.parametrize("min_size", [0, -1])
def test_elastic_min_size_below_one_raises_invalid_size(min_size: int) -> None:
    with gw.init() as group, pytest.raises(gw.InvalidSize, match="at least 1"):
        gw.Elastic({"w": np.zeros(1)}, group, min_size)


@pytest.mark.parametrize(
    ("version", "counted"),
    [((0, 1), True), ((0, 2), False), ((7, 3), False), ((-1, 1), False)],
    ids=["unchanged", "repeated by the others", "later steps committed", "lost on all ranks"],
)
def test_elastic_step_is_committed_only_if_the_protocol_ends_at_its_version(
    version: tuple[int, int], counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank was excluded at the vote and came back. The other ranks may have done any steps in the meantime."""
    run = gw.elastic({"w": np.zeros(1)})

    def end(protocol: StepProtocol, step: int) -> Steps:
        protocol.completed, protocol.completed_in = version
        protocol.committed = version[0]
        yield Pause(0.0)

    monkeypatch.setattr(StepProtocol, "end", end)
    step = next(run.steps(20))
    with step:
        pass
    run.close()
    assert step.committed is counted


def diverge_in_a_process() -> tuple[int | None, str | None, int]:
    state = {"w": np.zeros(2), "b": np.zeros(1)}
    run = gw.elastic(state)
    try:
        for step in run.steps(5):
            with step:
                state["w"] += run.group.all_reduce(np.ones(2))
                state["b"][0] = step.index == 3 and run.group.rank == 0
    except gw.ReplicasDiverged as error:
        return error.culprit, error.tensor, run.committed
    return None, None, run.committed


def test_elastic_in_processes_when_states_differ_raises_in_all_processes() -> None:
    assert gw.launch(diverge_in_a_process, 3) == [(0, "b", 2)] * 3
