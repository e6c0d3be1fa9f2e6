"""Tests predicted times: values calculated by hand, and properties of all predictions."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from gradwire.collectives import COLLECTIVES, DEFAULTS, Constants, algorithms, build
from gradwire.collectives.pricing import price, round_loads
from gradwire.topology import Topology

# Powers of ten that are far apart, so that the digits of a price show each count.
UNITS = Constants(round=1.0, message=1e-2, staged=1e-5, sent=1e-7, received=1e-9, folded=1e-11)
NOTHING = Constants(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("collective", "algorithm", "size", "expected"),
    [
        # rounds, messages of the busiest rank in each, bytes of 4 staged, sent, received, folded
        ("all_reduce", "oneshot", 2, (1, 2, 4, 4, 4, 4)),
        ("all_reduce", "oneshot", 4, (1, 6, 4, 12, 12, 12)),
        ("all_reduce", "direct", 4, (2, 12, 3 + 1, 3 + 3, 3 + 3, 3)),
        ("all_reduce", "ring", 4, (6, 12, 6, 6, 6, 3)),
        ("all_gather", "halving", 4, (2, 4, 3, 3, 3, 0)),
        ("broadcast", "star", 4, (1, 3, 4, 12, 0, 0)),
        ("broadcast", "tree", 4, (2, 2, 8, 8, 0, 0)),
    ],
)
def test_price_matches_a_calculation_by_hand(
    collective: str, algorithm: str, size: int, expected: tuple[int, ...]
) -> None:
    rounds, messages, staged, sent, received, folded = expected
    seconds = rounds + messages * 1e-2 + staged * 1e-5 + sent * 1e-7 + received * 1e-9 + folded * 1e-11
    schedule = build(collective, algorithm, size)
    assert price(schedule, Topology.single(size), 4, UNITS, NOTHING) == pytest.approx(seconds, rel=1e-12)


def test_price_of_ranks_of_a_host_includes_their_shared_network() -> None:
    topology = Topology.of("aabb")
    network = replace(NOTHING, sent=1.0)
    direct, hierarchical = (build("all_reduce", name, 4, topology=topology) for name in ("direct", "hierarchical"))
    # direct: each of two ranks sends a quarter to each of two ranks of the other host, twice.
    # hierarchical: each of two ranks sends a quarter to one rank of the other host, twice.
    assert price(direct, topology, 4, NOTHING, network) == pytest.approx(2 * 4)
    assert price(hierarchical, topology, 4, NOTHING, network) == pytest.approx(2 * 2)


def test_price_of_a_round_includes_its_slowest_kind_of_link() -> None:
    topology = Topology.of("aabb")
    near, far = replace(NOTHING, round=1.0), replace(NOTHING, round=10.0)
    hierarchical = build("all_reduce", "hierarchical", 4, topology=topology)
    assert price(hierarchical, topology, 4, near, far) == 1 + 10 + 10 + 1
    assert price(build("all_reduce", "ring", 4), topology, 4, near, far) == 6 * 10


@pytest.mark.parametrize("topology", [Topology.single(1), Topology.single(5), Topology.of("aabbb")], ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_price_for_more_bytes_or_higher_costs_is_not_less(collective: str, topology: Topology) -> None:
    for algorithm in algorithms(collective):
        schedule = build(collective, algorithm, topology.size, topology=topology)
        sizes = (0, 1, 1 << 10, 1 << 20, 1 << 30)
        prices = [price(schedule, topology, nbytes, DEFAULTS.shm, DEFAULTS.net) for nbytes in sizes]
        assert prices == sorted(prices)
        assert (prices[0] > 0) is (topology.size > 1)
        for field in fields(Constants):
            slower = replace(DEFAULTS.shm, **{field.name: 1e-3})
            assert price(schedule, topology, 1 << 20, slower, DEFAULTS.net) >= prices[3]


def test_round_loads_of_equal_rounds_are_counted_together() -> None:
    assert [times for times, _ in round_loads(build("all_gather", "ring", 1000), Topology.single(1000))] == [999]


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "tree", "halving"])
def test_price_of_a_sampled_large_host_is_near_the_full_count(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradwire.collectives import pricing

    topology = Topology.of([str(rank // 32) for rank in range(96)])
    schedule = build("all_reduce", algorithm, 96, topology=topology)
    constants = (1 << 22, DEFAULTS.tcp, DEFAULTS.net)
    sampled = price(schedule, topology, *constants)
    monkeypatch.setattr(pricing, "round_loads", pricing.round_loads.__wrapped__)
    monkeypatch.setattr(pricing, "SAMPLE", 32)
    assert sampled == pytest.approx(price(schedule, topology, *constants), rel=0.5)
