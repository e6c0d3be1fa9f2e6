"""Prices worked out by hand, and what must hold of every price."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from gradwire.collectives import COLLECTIVES, DEFAULTS, Constants, algorithms, build
from gradwire.collectives.pricing import bill, price
from gradwire.topology import Topology

# Powers of ten far apart: each digit of a price tells one count.
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
def test_price_matches_prices_worked_out_by_hand(
    collective: str, algorithm: str, size: int, expected: tuple[int, ...]
) -> None:
    rounds, messages, staged, sent, received, folded = expected
    seconds = rounds + messages * 1e-2 + staged * 1e-5 + sent * 1e-7 + received * 1e-9 + folded * 1e-11
    schedule = build(collective, algorithm, size)
    assert price(schedule, Topology.single(size), 4, UNITS, NOTHING) == pytest.approx(seconds, rel=1e-12)


def test_price_ranks_of_a_host_share_its_network() -> None:
    topology = Topology.of("aabb")
    wire = replace(NOTHING, sent=1.0)
    direct, layered = (build("all_reduce", name, 4, topology=topology) for name in ("direct", "hierarchical"))
    # Each of two ranks sends a quarter to each of two ranks over there, twice; layered a quarter to one, twice.
    assert price(direct, topology, 4, NOTHING, wire) == pytest.approx(2 * 4)
    assert price(layered, topology, 4, NOTHING, wire) == pytest.approx(2 * 2)


def test_price_round_costs_as_much_as_its_slowest_kind_of_link() -> None:
    topology = Topology.of("aabb")
    near, far = replace(NOTHING, round=1.0), replace(NOTHING, round=10.0)
    layered = build("all_reduce", "hierarchical", 4, topology=topology)
    assert price(layered, topology, 4, near, far) == 1 + 10 + 10 + 1
    assert price(build("all_reduce", "ring", 4), topology, 4, near, far) == 6 * 10


@pytest.mark.parametrize("topology", [Topology.single(1), Topology.single(5), Topology.of("aabbb")], ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_price_more_bytes_or_ranks_cost_no_less(collective: str, topology: Topology) -> None:
    for algorithm in algorithms(collective):
        schedule = build(collective, algorithm, topology.size, topology=topology)
        sizes = (0, 1, 1 << 10, 1 << 20, 1 << 30)
        prices = [price(schedule, topology, nbytes, DEFAULTS.shm, DEFAULTS.net) for nbytes in sizes]
        assert prices == sorted(prices)
        assert (prices[0] > 0) is (topology.size > 1)
        for field in fields(Constants):
            dearer = replace(DEFAULTS.shm, **{field.name: 1e-3})
            assert price(schedule, topology, 1 << 20, dearer, DEFAULTS.net) >= prices[3]


def test_price_equal_rounds_are_counted_together() -> None:
    assert [times for times, _ in bill(build("all_gather", "ring", 1000), Topology.single(1000))] == [999]


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "tree", "halving"])
def test_price_of_a_sampled_large_host_is_about_right(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradwire.collectives import pricing

    topology = Topology.of([str(rank // 32) for rank in range(96)])
    schedule = build("all_reduce", algorithm, 96, topology=topology)
    constants = (1 << 22, DEFAULTS.tcp, DEFAULTS.net)
    sampled = price(schedule, topology, *constants)
    monkeypatch.setattr(pricing, "bill", pricing.bill.__wrapped__)
    monkeypatch.setattr(pricing, "SAMPLE", 32)
    assert sampled == pytest.approx(price(schedule, topology, *constants), rel=0.5)
