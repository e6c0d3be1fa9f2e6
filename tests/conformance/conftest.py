"""Provides the groups of the conformance suite: every transport, several sizes, on one host and on several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradwire.topology import Topology
from support.crews import TRANSPORTS, Crew, crew_of

HOSTS = {1: "a", 2: "ab", 3: "aba", 5: "abbab", 8: "aabacbab"}
SIZES = (1, 2, 3, 5, 8)
# Few sizes are enough where only the links differ: the schedules are tested over other transports. gRPC has TLS with 3.
FEW_SIZES = {"tls": (3,), "grpc": (2, 3)}


def topologies() -> Iterator[tuple[str, Topology]]:
    for position, transport in enumerate(TRANSPORTS):
        for size in FEW_SIZES.get(transport, SIZES):
            # Sizes alternate between one host and several hosts, in the opposite order for the next transport.
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
