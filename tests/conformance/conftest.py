"""Crews for the conformance suite: every transport, sizes that are powers of two and others, one host and more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradwire.topology import Topology
from support.crews import TRANSPORTS, Crew, crew_of

HOSTS = {1: "a", 2: "ab", 3: "aba", 5: "abbab", 8: "aabacbab"}
SIZES = (1, 2, 3, 5, 8)
TLS_SIZES = (3,)  # the schedules are the same over every transport; what TLS changes are the links


def topologies() -> Iterator[tuple[str, Topology]]:
    for position, transport in enumerate(TRANSPORTS):
        for size in TLS_SIZES if transport == "tls" else SIZES:
            # Each transport has some sizes on one host and some on unequal ones, and the next one has it the other way.
            several = (SIZES.index(size) + position) % 2
            yield transport, Topology.of(list(HOSTS[size])) if several else Topology.single(size)


def name(parameter: tuple[str, Topology]) -> str:
    transport, topology = parameter
    return f"{transport}-{'+'.join(str(len(ranks)) for ranks in topology.hosts)}"


@pytest.fixture(scope="module", params=list(topologies()), ids=name)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    transport, topology = request.param
    with crew_of(transport, topology) as crew:
        yield crew
