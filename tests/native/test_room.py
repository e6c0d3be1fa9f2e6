"""Tests that lanes and staging have room for every wave of every plan. Without it, ranks would deadlock."""

from __future__ import annotations

from collections import Counter

import ml_dtypes
import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import parse_dtype
from gradwire.collectives import COLLECTIVES, REDUCING, algorithms, build
from gradwire.executors.plan import TILE_BYTES, Plan, Wave, even_bounds
from gradwire.host import native_core
from gradwire.liveness.call_log import CallDescription
from gradwire.topology import Topology
from support.crews import crew_of

native = pytest.importorskip("gradwire._native", reason="the native core is not built")
from gradwire.executors.native import SHARED_TILE_BYTES, staging_bytes  # noqa: E402

DTYPE = parse_dtype("bfloat16")  # its partial results take twice the bytes of its elements
COUNT = 10 << 20  # more tiles than are in flight
HOSTS = ("aa", "aaa", "aaaaa", "aaaaaaaa", "a" * 16, "aab", "aabb", "abaa", "aaabc", "aaaaaaab", "aaaabbbbccccccca")


def needed(wave: Wave, neighbours: set[int], held: bool) -> tuple[int, int]:
    """Return the bytes of staging and the entries of a lane that must be free for a wave.

    `held` means that terms are folded when all of them have arrived, so all must fit at the same time. Other messages
    are read as they arrive.
    """
    sends = [send for send in wave.sends if neighbours.intersection(send.peers)]
    sizes = [-(-send.nbytes // 64) * 64 for send in sends]
    entries = Counter(peer for send in sends for peer in send.peers)
    if not held:
        return max(sizes, default=0), 1
    # A message is not split at the end of the ring buffer: the bytes there stay unused if it does not fit.
    return sum(sizes) + max(sizes, default=0), max(entries.values(), default=0)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_wave_of_every_plan_fits_into_staging_and_lanes(hosts: str, collective: str) -> None:
    entries = native.LANE_ENTRIES
    topology, size = Topology.of(list(hosts)), len(hosts)
    tile = SHARED_TILE_BYTES if len(set(hosts)) == 1 else TILE_BYTES
    for algorithm in algorithms(collective):
        try:
            schedule = build(collective, algorithm, size, topology=topology, root=0)
        except gw.GradwireError:
            continue  # this topology does not support the algorithm
        op = "sum" if collective in REDUCING else None
        bounds = even_bounds(COUNT, schedule.segments, DTYPE.itemsize)
        for rank in range(size):
            neighbours = {peer for peer, host in enumerate(hosts) if host == hosts[rank] and peer != rank}
            plan = Plan(schedule, rank, DTYPE, op, bounds, CallDescription("", "", 0), tile)
            for wave in plan.waves():
                nbytes, used = needed(wave, neighbours, held=op is not None)
                assert nbytes <= staging_bytes(size, tile), (algorithm, rank)
                assert used <= entries, (algorithm, rank)


@pytest.mark.skipif(not native_core.available(), reason="shared memory needs the native core")
@pytest.mark.parametrize("algorithm", ["tree", "ring", "star"])
def test_all_reduce_across_hosts_passes_large_tiles_through_shared_memory(algorithm: str) -> None:
    """A group on several hosts has larger tiles, and its ranks on one host exchange them through shared memory."""

    def reduce(group: gw.Group) -> float:
        return float(group.all_reduce(np.ones(COUNT // 2, ml_dtypes.bfloat16), algorithm=algorithm)[-1])

    with crew_of("shm", Topology.of(list("aab"))) as crew:
        assert crew.run(reduce) == [3.0] * 3
