"""Groups with TLS links: which executor they use, shared memory on one host, and the loss of a peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import parts_of
from gradwire.host import native_core
from gradwire.topology import Topology
from support.crews import agreed, tcp_endpoints
from support.ranks import run_ranks

needs_core = pytest.mark.skipif(not native_core.available(), reason="only the core reads shared memory")
Make = Callable[[str], list[gw.Group]]


@pytest.fixture
def ranks() -> Iterator[Make]:
    """Return ranks on these hosts, with certificates, that have agreed which of them share memory."""
    made: list[gw.Group] = []

    def make(hosts: str) -> list[gw.Group]:
        groups = agreed(tcp_endpoints(Topology.of(list(hosts)), tls=True))
        made.extend(groups)
        return groups

    yield make
    for group in made:
        group.close()


def sums(group: gw.Group) -> list[float]:
    """Return the first elements of all-reduces of several sizes and dtypes."""
    first = []
    for count, algorithm in ((1, "auto"), (1000, "ring"), (300_000, "auto"), (40_000, "hierarchical")):
        x = np.full(count, group.rank + 1, np.float32)
        group.all_reduce(x, algorithm=algorithm)
        assert (x == x[0]).all()
        first.append(float(x[0]))
    return first


@needs_core
def test_tls_group_on_one_host_uses_shared_memory(ranks: Make) -> None:
    groups = ranks("aaa")
    assert [(group.capabilities.native, group.capabilities.transport) for group in groups] == [(True, "shm")] * 3
    assert run_ranks(groups, sums) == [[6.0] * 4] * 3
    assert all(parts_of(group).runner.links.shares_memory for group in groups)


@needs_core
def test_tls_group_across_hosts_uses_python_and_its_subgroup_on_one_host_the_core(ranks: Make) -> None:
    groups = ranks("aab")
    assert [group.capabilities.native for group in groups] == [False] * 3
    assert run_ranks(groups, sums) == [[6.0] * 4] * 3
    assert not any(parts_of(group).runner.links.shares_memory for group in groups)

    def beside(group: gw.Group) -> list[float]:
        if group.rank == 2:
            return []
        neighbours = group.subgroup([0, 1])
        assert neighbours.capabilities.native
        found = sums(neighbours)
        assert parts_of(neighbours).runner.links.shares_memory
        return found

    assert run_ranks(groups, beside) == [[3.0] * 4, [3.0] * 4, []]


def test_tls_group_peer_whose_links_end_is_lost(ranks: Make) -> None:
    groups = ranks("ab")
    run_ranks(groups, lambda group: group.barrier())
    parts_of(groups[1]).generation.transport.close()
    with pytest.raises(gw.PeerLost, match="rank 1") as caught:
        groups[0].all_reduce(np.ones(50_000, np.float32))
    assert caught.value.culprit == 1
