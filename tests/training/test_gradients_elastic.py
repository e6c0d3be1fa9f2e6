"""GradientSync in an elastic run: it continues in the next generation after a loss and after a join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from support.elastic_ranks import Joiner, Left
from support.gradients import SMALL
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.ranks import run_ranks

STEPS = 8
LIKE = {"a": np.zeros(6), "b": np.zeros((2, 2)), "c": np.zeros(())}


def train(group: gw.Group, in_step: Callable[[gw.Elastic, gw.Step, gw.GradientSync], None]) -> dict[str, Any]:
    """Run steps whose weighted gradients do not depend on the number of ranks."""
    state = {name: one.copy() for name, one in LIKE.items()}
    run = gw.Elastic(state, group, 1)
    sync = gw.GradientSync(run, state, contract_every=2, **SMALL)
    checks = 0
    try:
        for step in run.steps(STEPS):
            with step:
                if step.index % 2:
                    sync.add({"b": np.full((2, 2), 1.0)})
                in_step(run, step, sync)
                size, rank = run.group.size, run.group.rank
                sync.begin(weight=1 + rank)
                for name in ("a", "b", "c"):
                    if name == "b" and step.index % 2:
                        sync.gradients["b"] += 1.0
                    elif name == "b":
                        sync.write("b", np.full((2, 2), 2.0))
                    else:
                        sync.gradients[name][...] = (step.index + 1) * size * (size + 1) / 2 / (1 + rank) / size
                    sync.ready(name)
                sync.finish()
                if not sync.ordered:
                    sync.reorder(["a", "b", "c"])
                mean = {name: sync.gradients[name].round(9) for name in sync.used}
                checks += sync.contract.check(state)
                for name, gradient in mean.items():
                    state[name] += gradient
    except Left:
        run.close()
        return {"left": True}
    return {
        "state": {name: one.tolist() for name, one in state.items()},
        "is": (run.group.size, run.group.generation),
        "buckets": sync.layout,
        "checks": checks,
        "digest": run.digest,
    }


TOTAL = float(sum(range(1, STEPS + 1)))
EXPECTED = {"a": [TOTAL] * 6, "b": [[2.0 * STEPS] * 2] * 2, "c": TOTAL}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("after", ["begin", "ready"])
def test_gradient_sync_after_a_lost_rank_continues_with_the_survivors(victim: int, after: str) -> None:
    def live(group: gw.Group) -> dict[str, Any]:
        me = group.rank

        def die(run: gw.Elastic, step: gw.Step, sync: gw.GradientSync) -> None:
            if me != victim or step.index != (4 if victim else 3):
                return
            if after == "ready":  # in the middle of a backward pass
                sync.begin(weight=1 + me)
                sync.ready("a")
            raise Left

        return train(group, die)

    results = run_ranks(gw.local_group(3), live)
    assert results[victim] == {"left": True}
    survivors = [result for result in results if "left" not in result]
    assert survivors[0] == survivors[1]
    assert survivors[0]["state"] == EXPECTED
    assert survivors[0]["is"] == (2, 2)
    assert survivors[0]["buckets"] == [["a"], ["b"], ["c"]]


def test_gradient_sync_joiner_adopts_the_bucket_order_and_contract_count() -> None:
    joiner = Joiner(lambda group: train(group, lambda *_: None))

    def let_in(run: gw.Elastic, step: gw.Step, sync: gw.GradientSync) -> None:
        if step.index == 2:
            joiner.let_in()

    results, joined = joiner.run(lambda group: train(group, let_in))
    assert results[0] == results[1]
    assert results[0]["state"] == joined["state"] == EXPECTED
    assert results[0]["is"] == joined["is"] == (3, 2)
    assert (
        results[0]["buckets"] == joined["buckets"] == [["a"], ["b"], ["c"]]
    )  # the joiner did not learn this order itself
    assert results[0]["digest"] == joined["digest"]
    assert (results[0]["checks"], joined["checks"]) == (3, 2)  # one check was before it joined


# --- processes


def overlaps(here: Here) -> None:
    """Two processes share memory; buckets are reduced on the progress thread, with correct results in every step."""
    like = {f"w{number}": np.zeros((100, 100), np.float32) for number in range(12)}
    with gw.init() as group:
        sync = gw.GradientSync(group, like, bucket_bytes=100_000, first_bucket_bytes=40_000)
        wrong = 0
        for step in range(30):
            for name in reversed(like):
                sync.gradients[name][...] = group.rank + step
                sync.ready(name)
            sync.finish()
            wrong += sum(not (one == step + 0.5).all() for one in sync.gradients.values())
        here.send(wrong=wrong, buckets=len(sync.layout))


def test_gradient_sync_between_processes_overlaps_with_correct_means(job: StartJob) -> None:
    with job(overlaps, 2) as ranks:
        assert [rank.receive() for rank in ranks] == [{"wrong": 0, "buckets": 7}] * 2
