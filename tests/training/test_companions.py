"""Companions: plain values beside the user's state are transferred, compared, saved and restored with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.training.companions import Companions, Plain
from gradwire.training.state import State, memory_for
from support.elastic_ranks import Joiner, Left
from support.ranks import run_ranks


class Counter:
    """A companion that counts the steps that have ended."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.failed = 0

    def state_dict(self) -> dict[str, Plain]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Plain]) -> None:
        self.count = int(state["count"])

    def step_ended(self) -> None:
        self.count += 1

    def step_failed(self) -> None:
        self.failed += 1


def with_counters(state: Any, *counts: int) -> State:
    found = State(state)
    for count in counts:
        found.companions.attach(Counter(count), begun=False)
    return found


def test_state_without_companions_has_the_skeleton_of_the_users_state() -> None:
    assert State({"w": np.zeros(2)}).take_apart()[0] == b'{"d":[["w",{"a":["float64",[2],"numpy"]}]]}'


def test_state_companions_do_not_change_the_names_and_digests_of_the_users_entries() -> None:
    user = {"model": {"w": np.zeros(2)}, "epoch": 3}
    alone, accompanied = State(user), with_counters(user, 7, 8)
    assert accompanied.digest() != alone.digest()
    names = accompanied.digests()
    assert set(names) - set(alone.digests()) == {"attached[0].count", "attached[1].count"}
    assert {name: names[name] for name in alone.digests()} == alone.digests()


def test_state_digest_changes_with_a_companions_value() -> None:
    assert with_counters({"n": 1}, 7).digest() != with_counters({"n": 1}, 8).digest()


def test_state_put_together_loads_the_companions_in_their_order() -> None:
    target, counters = State({"w": np.zeros(2)}), [Counter(), Counter()]
    for counter in counters:
        target.companions.attach(counter, begun=False)
    target.put_together(*with_counters({"w": np.ones(2)}, 7, 8).take_apart())
    assert [counter.count for counter in counters] == [7, 8]


def test_state_companion_attached_after_loading_gets_its_values() -> None:
    source, target = with_counters({"w": np.ones(2)}, 7, 8), State({"w": np.zeros(2)})
    target.put_together(*source.take_apart())
    for expected in (7, 8, 0):
        assert target.take_apart()[0] == source.take_apart()[0]  # values without a companion stay in the state
        late = Counter()
        target.companions.attach(late, begun=True)
        assert late.count == expected


def test_state_own_memory_is_used_if_only_a_companions_value_differs() -> None:
    mine = np.zeros(2)
    skeleton, _ = with_counters({"w": np.ones(2)}, 7).take_apart()
    own = with_counters({"w": mine}, 0).own_memory(skeleton)
    assert own is not None
    assert np.shares_memory(own[0], mine)
    assert with_counters({"w": np.zeros(3)}, 7).own_memory(skeleton) is None
    assert State({"w": mine}).own_memory(b"[" * 100_000) is None


def test_companions_attached_after_the_beginning_belong_to_the_state_from_the_end_of_the_step() -> None:
    companions = Companions()
    companions.attach(Counter(5), begun=True)
    assert companions.values() == []
    companions.step_ended()
    assert companions.values() == [{"count": 6}]


@pytest.mark.parametrize("values", [b"3", b"[3]", b'[{"a":[1]}]', b'[{"a":null}]'])
def test_memory_for_malformed_companions_raises_value_error(values: bytes) -> None:
    with pytest.raises(ValueError, match="malformed companions"):
        memory_for(b'{"s":{"d":[]},"c":' + values + b"}")


def test_memory_for_companions_below_the_top_raises_value_error() -> None:
    with pytest.raises(ValueError, match="malformed value"):
        memory_for(b'{"d":[["x",{"s":{"d":[]},"c":[]}]]}')


def test_elastic_companions_that_differ_are_named_by_the_vote() -> None:
    def train(group: gw.Group) -> str | None:
        run, counter = gw.Elastic({"w": np.zeros(1)}, group, 1), Counter()
        run.attach(counter)
        with pytest.raises(gw.ReplicasDiverged) as caught:
            for step in run.steps(3):
                with step:
                    counter.count += group.rank * step.index
        return caught.value.tensor

    assert run_ranks(gw.local_group(2), train) == ["attached[0].count"] * 2


def test_elastic_companion_attached_between_steps_is_no_change_of_the_state(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), gw.init() as group:
        run, counter = gw.Elastic({"w": np.zeros(1)}, group, 1), Counter()
        for step in run.steps(4):
            if step.index == 2:
                run.attach(counter)
            with step:
                pass
    assert counter.count == 2
    assert not caplog.records


@pytest.mark.parametrize("late", [False, True], ids=["before the first step", "in a step"])
def test_elastic_joiner_gets_the_values_of_companions(late: bool) -> None:
    def live(group: gw.Group) -> tuple[int, int]:
        run, counter = gw.Elastic({"w": np.zeros(1)}, group, 1), Counter()
        if not late:
            run.attach(counter)
        bodies = 0
        for step in run.steps(6):
            with step:
                bodies += 1
                if late and bodies == 1:
                    run.attach(counter)
                if step.index == 2 and run.group.generation == 1:
                    joiner.let_in()
        return counter.count, run.group.size

    joiner = Joiner(live)
    results, joined = joiner.run(live)
    assert [*results, joined] == [(6, 3)] * 3


def test_elastic_companion_is_told_of_a_step_that_was_cut_short() -> None:
    def live(group: gw.Group) -> tuple[int, int] | None:
        run, counter = gw.Elastic({"w": np.zeros(1)}, group, 1), Counter()
        run.attach(counter)
        try:
            for step in run.steps(5):
                with step:
                    if group.rank == 2 and step.index == 3:
                        raise Left
                    run.group.barrier()
        except Left:
            run.close()
            return None
        return counter.count, counter.failed

    assert run_ranks(gw.local_group(3), live) == [(5, 1), (5, 1), None]
