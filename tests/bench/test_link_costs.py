"""Fitting the constants of links to measured times."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gradwire.bench.link_costs import PROBES, SIZES, Timing, fit
from gradwire.collectives import DEFAULTS, Constants, Table, build, choose
from gradwire.collectives.pricing import price
from gradwire.topology import Topology

HERE = Constants(round=40e-6, message=3e-6, staged=0.0, sent=0.2e-9, received=0.5e-9, folded=0.3e-9)


def timings(constants: Constants, ranks: int, noise: float) -> list[Timing]:
    random.seed(ranks)
    found = []
    for algorithm in PROBES.values():
        for nbytes in SIZES:
            schedule = build("all_reduce", algorithm, ranks)
            seconds = 30e-6 + price(schedule, Topology.single(ranks), nbytes, constants, constants)
            found.append(Timing(algorithm, nbytes, seconds * random.uniform(1, 1 + noise)))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_fit_of_times_by_the_model_finds_its_constants(ranks: int) -> None:
    constants, misfit = fit("tcp", timings(HERE, ranks, noise=0), ranks)
    assert misfit < 1.05
    assert constants.staged == 0.0
    per_round = constants.round + 2 * constants.message  # with two ranks, the times determine only this sum
    assert per_round == pytest.approx(HERE.round + 2 * HERE.message, rel=0.3)
    per_byte = constants.sent + constants.received
    assert per_byte == pytest.approx(HERE.sent + HERE.received, rel=0.3)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("noise", [0, 0.2])
def test_fit_of_times_leads_to_nearly_the_best_choices(ranks: int, noise: float) -> None:
    constants, _ = fit("tcp", timings(HERE, ranks, noise), ranks)
    topology = Topology.single(ranks)
    true, fitted = (replace(DEFAULTS, tcp=one) for one in (HERE, constants))
    for nbytes in (8, 1 << 10, 256 << 20):
        best, chosen = (choose("all_reduce", "auto", nbytes, topology, table) for table in (true, fitted))
        assert seconds(chosen, nbytes, topology, true) <= 1.3 * seconds(best, nbytes, topology, true)


def seconds(algorithm: str, nbytes: int, topology: Topology, table: Table) -> float:
    return price(build("all_reduce", algorithm, topology.size), topology, nbytes, table.tcp, table.net)


def test_fit_of_absurd_times_gives_bounded_constants() -> None:
    for absurd in (1e-12, 100.0):
        rows = [Timing(timing.algorithm, timing.nbytes, absurd) for timing in timings(HERE, 2, noise=0)]
        constants, _ = fit("shm", rows, 2)
        assert all(0 <= value <= 1 for value in vars(constants).values())
