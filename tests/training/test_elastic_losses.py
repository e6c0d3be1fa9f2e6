"""Elastic runs that lose and gain members: ranks are threads, the real coordinator state machine decides membership."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire as gw
from support.elastic_ranks import Joiner, Left
from support.ranks import run_ranks

STEPS = 6


def work(run: gw.Elastic, state: dict[str, Any], dies_at: int | None = None, dies_after: bool = False) -> int:
    """Run steps whose result does not depend on the number of ranks; return the number of bodies begun."""
    bodies = 0
    for step in run.steps(STEPS):
        with step:
            bodies += 1
            if step.index == dies_at and not dies_after:
                raise Left
            share = np.full(3, (step.index + 1) / run.group.size)
            total = run.group.all_reduce(share)
            state["w"] += total.round(9)
            if step.index == dies_at:
                raise Left
    return bodies


def train(group: gw.Group, **options: Any) -> dict[str, Any]:
    state = {"w": np.zeros(3)}
    run = gw.Elastic(state, group, 1)
    try:
        bodies = work(run, state, **options)
    except Left:
        run.close()
        return {"left": True}
    return {
        "w": state["w"].tolist(),
        "committed": run.committed,
        "size": run.group.size,
        "rank": run.group.rank,
        "generation": run.group.generation,
        "recoveries": run.recoveries,
        "digest": run.digest,
        "bodies": bodies,
    }


EXPECTED = [float(sum(range(1, STEPS + 1)))] * 3


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("step", [0, 3, STEPS - 1])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_elastic_lost_member_the_others_finish_with_the_same_result(victim: int, step: int, after: bool) -> None:
    def live(group: gw.Group) -> dict[str, Any]:
        return train(group, dies_at=step if group.rank == victim else None, dies_after=after)

    results = run_ranks(gw.local_group(3), live)
    assert results[victim] == {"left": True}
    survivors = [result for result in results if "left" not in result]
    assert [result["rank"] for result in survivors] == [0, 1]  # the survivors keep their order
    for result in survivors:
        assert result["w"] == EXPECTED
        assert (result["committed"], result["size"], result["generation"]) == (STEPS - 1, 2, 2)
    assert len({result["digest"] for result in survivors}) == 1


def test_elastic_all_but_one_lost_in_turn_the_last_rank_finishes() -> None:
    results = run_ranks(gw.local_group(4), lambda group: train(group, dies_at=group.rank or None))
    assert results[0]["w"] == EXPECTED
    assert (results[0]["size"], results[0]["committed"]) == (1, STEPS - 1)


def test_elastic_joiner_receives_the_state_at_a_vote() -> None:
    joiner = Joiner(train)

    def old(group: gw.Group) -> dict[str, Any]:
        state = {"w": np.full(3, 0.0)}
        run = gw.Elastic(state, group, 1)
        for step in run.steps(STEPS):
            with step:
                state["w"] += run.group.all_reduce(np.full(3, (step.index + 1) / run.group.size)).round(9)
                if step.index == 3:
                    joiner.let_in()
        return {"w": state["w"].tolist(), "is": (run.group.size, run.group.generation), "digest": run.digest}

    results, joined = joiner.run(old)
    assert [result["is"] for result in results] == [(3, 2), (3, 2)]
    assert joined["w"] == results[0]["w"] == EXPECTED
    assert joined["rank"] == 2
    assert joined["bodies"] == STEPS - 4  # it joined after step 3
    assert {joined["digest"]} == {result["digest"] for result in results}


def test_elastic_vote_broken_while_states_differ_raises_on_the_survivors() -> None:
    def live(group: gw.Group) -> Any:
        state = {"w": np.zeros(3), "b": np.zeros(2)}
        run = gw.Elastic(state, group, 1)
        try:
            for step in run.steps(STEPS):
                with step:
                    state["w"] += run.group.all_reduce(np.full(3, 1 / run.group.size)).round(9)
                    if step.index == 2:
                        state["b"][:] = group.rank  # a different value on every rank
                        if group.rank == 3:
                            raise Left  # before the vote could detect the difference
        except Left:
            run.close()
            return None
        except gw.ReplicasDiverged as error:
            return error.culprit, error.tensor, error.generation, str(error).partition(" holds")[0]
        return "continued"

    assert run_ranks(gw.local_group(4), live) == [(1, "b", 2, "after step 2, rank 1")] * 3 + [None]


def test_elastic_on_divergence_warn_gives_a_joiner_the_most_common_state() -> None:
    def live(group: gw.Group) -> tuple[int, list[float], bool]:
        state = {"w": np.zeros(3)}
        run = gw.Elastic(state, group, 1, "warn")
        for step in run.steps(STEPS):
            with step:
                state["w"] += run.group.all_reduce(np.full(3, 1 / run.group.size)).round()
                if run.group.generation == 1 and step.index == 3:
                    state["w"][0] += 100 * (group.rank == 0)
                    joiner.let_in()
        return run.group.size, state["w"].tolist(), run.identical

    joiner = Joiner(live, others=3)
    results, joined = joiner.run(live)
    assert joined == (4, [6.0] * 3, False)
    assert results == [(4, [106.0, 6.0, 6.0], False), joined, joined]


class Unloadable:
    """A state that can be sent, but not loaded."""

    def __init__(self) -> None:
        self.w = np.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise Left


def test_elastic_joiner_that_fails_to_load_the_state_does_not_harm_the_others() -> None:
    """The other ranks change their state only after the joiner has confirmed that it has received it."""

    def new(group: gw.Group) -> bool:
        run = gw.Elastic({"model": Unloadable()}, group, 1)
        try:
            next(run.steps(STEPS))
        except Left:
            run.close()
            return True
        return False

    joiner = Joiner(new)

    def old(group: gw.Group) -> tuple[list[float], int, int]:
        model = Unloadable()
        run = gw.Elastic({"model": model}, group, 1)
        for step in run.steps(STEPS):
            with step:
                model.w += 1
                total = run.group.all_reduce(np.full(3, (step.index + 1) / run.group.size))
                model.w += total.round(9) - 1
                if step.index == 2 and run.group.generation == 1:
                    joiner.let_in()
        return model.w.tolist(), run.committed, run.group.size

    results, failed = joiner.run(old)
    assert failed
    assert results == [(EXPECTED, STEPS - 1, 2)] * 2


def test_elastic_state_changed_in_an_interrupted_step_is_pulled_again() -> None:
    def spoil(group: gw.Group) -> Any:
        state = {"w": np.zeros(4)}
        run = gw.Elastic(state, group, 1)
        try:
            for step in run.steps(3):
                with step:
                    total = run.group.all_reduce(np.full(4, 6.0 / run.group.size))
                    fated = step.index == 1 and run.group.generation == 1
                    if fated and group.rank == 2:
                        raise Left
                    if fated and group.rank == 0:
                        state["w"] += 99  # the first half of the step; then the second collective fails
                    run.group.barrier()
                    state["w"] += total.round(9)
        except Left:
            run.close()
            return None
        return state["w"].tolist(), run.recoveries

    results = run_ranks(gw.local_group(3), spoil)
    assert results == [([18.0] * 4, 1), ([18.0] * 4, 1), None]


def test_elastic_without_an_intact_copy_raises_state_lost() -> None:
    def spoil(group: gw.Group) -> str:
        state = {"w": np.zeros(4)}
        run = gw.Elastic(state, group, 1)
        try:
            for step in run.steps(3):
                with step:
                    if step.index == 1 and group.rank == 2:
                        raise Left
                    state["w"] += 1  # before the collective, so a rank whose collective fails has a changed state
                    run.group.barrier()
        except Left:
            run.close()
            return "left"
        except gw.StateLost as error:
            return str(error)
        return "done"

    results = run_ranks(gw.local_group(3), spoil)
    assert results[2] == "left"
    for result in results[:2]:
        assert "state of step 0, which was committed" in result
        assert "Restart the job, from a checkpoint if the program has written one" in result


def test_elastic_collective_mismatch_is_raised_on_all_ranks() -> None:
    def differ(group: gw.Group) -> str:
        run = gw.Elastic({"w": np.zeros(1)}, group, 1)
        try:
            for step in run.steps(2):
                with step:
                    group.all_reduce(np.zeros(group.rank + 1))
        except gw.CollectiveMismatch:
            return "mismatch"
        return "done"

    assert run_ranks(gw.local_group(2), differ) == ["mismatch", "mismatch"]


def test_elastic_abort_is_raised_on_its_rank_and_the_others_recover() -> None:
    def give_up(group: gw.Group) -> Any:
        state = {"w": np.zeros(1)}
        run = gw.Elastic(state, group, 1)
        try:
            for step in run.steps(3):
                with step:
                    if group.rank == 1 and step.index == 1:
                        run.group.abort("the loss is not a number")
                    run.group.barrier()
                    state["w"] += 1
        except gw.Aborted as error:
            run.close()
            return str(error)
        return state["w"].tolist(), run.group.size

    results = run_ranks(gw.local_group(3), give_up)
    assert results[0] == results[2] == ([3.0], 2)
    assert "the loss is not a number" in results[1]


def test_elastic_below_min_size_waits_for_a_joiner_and_continues() -> None:
    successor = Joiner(train)

    def lose(group: gw.Group) -> Any:
        state = {"w": np.zeros(3)}
        run = gw.Elastic(state, group, 2)
        if group.rank == 1:
            for step in run.steps(2):
                with step:
                    if step.index == 1:
                        run.close()
                        break
                    state["w"] += run.group.all_reduce(np.full(3, 1 / run.group.size)).round(9)
            successor.call()
            return None
        return work(run, state) and (state["w"].tolist(), run.group.size)

    found, joined = successor.run(lose)
    assert found[0][1] == 2
    assert joined["w"] == found[0][0]
