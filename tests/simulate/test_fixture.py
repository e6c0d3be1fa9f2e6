"""The gradwire_ranks pytest fixture, which injects faults into training loops of users."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import gradwire as gw
from gradwire.simulate.fixture import Ranks

STEPS = 6


def train(group: gw.Group) -> float:
    """Run a typical training loop and return its result."""
    weights = np.zeros(4)
    for step in range(STEPS):
        weights += group.all_reduce(np.full(4, float(group.rank + step)), op="mean")
    return float(weights[0])


def test_gradwire_ranks_without_faults_returns_all_results(gradwire_ranks: Ranks) -> None:
    run = gradwire_ranks(train, 3)
    assert run.results == {0: 21.0, 1: 21.0, 2: 21.0}
    assert (run.errors, run.died, run.faults) == ({}, (), ())


@pytest.mark.parametrize("call", [1, STEPS])
def test_gradwire_ranks_die_raises_peer_lost_on_the_others(gradwire_ranks: Ranks, call: int) -> None:
    run = gradwire_ranks(train, 4, faults=[gradwire_ranks.die(2, call=call)])
    assert run.died == (2,)
    assert run.results == {}
    assert run.errors.keys() == {0, 1, 3}
    for error in run.errors.values():
        assert isinstance(error, gw.PeerLost)
        assert error.culprit == 2


def test_gradwire_ranks_die_ends_a_loop_that_catches_exceptions(gradwire_ranks: Ranks) -> None:
    def stubborn(group: gw.Group) -> int:
        failed = 0
        for _ in range(STEPS):
            try:
                group.barrier()
            except Exception:
                failed += 1
        return failed

    run = gradwire_ranks(stubborn, 2, faults=[gradwire_ranks.die(0, call=3)])
    assert run.died == (0,)
    assert run.results == {1: STEPS - 2}


def test_gradwire_ranks_fail_aborts_the_others_unless_handled(gradwire_ranks: Ranks) -> None:
    run = gradwire_ranks(train, 3, faults=[gradwire_ranks.fail(1, call=2)])
    assert isinstance(run.errors[1], RuntimeError)
    assert all(isinstance(run.errors[rank], gw.Aborted) for rank in (0, 2))

    def careful(group: gw.Group) -> int:
        for attempt in range(2):
            try:
                return int(group.all_reduce(1))
            except RuntimeError:
                assert attempt == 0
        return 0

    assert gradwire_ranks(careful, 3, faults=[gradwire_ranks.fail(1, call=1)]).results == {0: 3, 1: 3, 2: 3}


def test_gradwire_ranks_slow_delays_the_run_and_keeps_results(gradwire_ranks: Ranks) -> None:
    began = time.monotonic()
    run = gradwire_ranks(train, 2, faults=[gradwire_ranks.slow(1, call=2, seconds=0.2)])
    assert run.results == {0: 18.0, 1: 18.0}
    assert time.monotonic() - began >= 0.2


def test_gradwire_ranks_counts_calls_of_streams_and_subgroups(gradwire_ranks: Ranks) -> None:
    def various(group: gw.Group) -> None:
        group.barrier()
        group.stream().all_reduce(np.ones(2)).wait()
        group.subgroup([0, 1]).barrier()
        group.barrier()

    for call in (2, 3, 4):
        assert gradwire_ranks(various, 2, faults=[gradwire_ranks.die(0, call=call)]).errors.keys() == {1}
    assert gradwire_ranks(various, 2, faults=[gradwire_ranks.die(0, call=5)]).died == ()


def test_gradwire_ranks_elastic_loop_gives_the_same_result_after_deaths(gradwire_ranks: Ranks) -> None:
    def elastic(group: gw.Group) -> tuple[float, int]:
        state = {"w": np.zeros(2)}
        run = gw.Elastic(state, group, 1)
        for step in run.steps(STEPS):
            with step:
                state["w"] += run.group.all_reduce(np.full(2, step.index + 1.0), op="mean")
        return float(state["w"][0]), run.group.size

    for call in (1, 4, 9):
        run = gradwire_ranks(elastic, 3, faults=[gradwire_ranks.die(1, call=call)])
        assert (run.died, run.results) == ((1,), {0: (21.0, 2), 2: (21.0, 2)})
    run = gradwire_ranks(elastic, 3, faults=[gradwire_ranks.fail(1, call=5)])
    assert (list(run.errors), run.results) == ([1], {0: (21.0, 2), 2: (21.0, 2)})
    faults = [gradwire_ranks.die(0, call=3), gradwire_ranks.die(1, call=12)]  # the second in another generation
    run = gradwire_ranks(elastic, 4, faults=faults)
    assert (run.died, run.results) == ((0, 1), {2: (21.0, 2), 3: (21.0, 2)})


def test_gradwire_ranks_equal_seeds_draw_equal_faults_and_every_rank_ends(gradwire_ranks: Ranks) -> None:
    for seed in range(6):
        run = gradwire_ranks(train, 3, seed=seed)
        assert run.faults == Ranks.draw(seed, 3)
        assert sorted([*run.results, *run.errors, *run.died]) == [0, 1, 2]
    assert len({Ranks.draw(seed, 4) for seed in range(50)}) > 40


def test_gradwire_ranks_timeout_shows_where_a_rank_hangs(gradwire_ranks: Ranks) -> None:
    forever = threading.Event()

    def hangs(group: gw.Group) -> None:
        if group.rank == 1:
            forever.wait()

    with pytest.raises(AssertionError, match=r"(?s)not done after 2 s.*rank 1 at.*forever\.wait") as caught:
        gradwire_ranks(hangs, 2, timeout=2.0)
    assert "rank 0 at" not in str(caught.value)
    forever.set()


@pytest.mark.parametrize(("rank", "call"), [(-1, 1), (0, 0)])
def test_gradwire_ranks_fault_with_an_invalid_rank_or_call_raises_config_error(
    gradwire_ranks: Ranks, rank: int, call: int
) -> None:
    with pytest.raises(gw.ConfigError, match="ranks count from 0, calls from 1"):
        gradwire_ranks.die(rank, call=call)
