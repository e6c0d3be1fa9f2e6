"""Lanes and staging have room for every wave of every plan; waiting for room within a wave would deadlock."""

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

DTYPE = parse_dtype("bfloat16")  # its partial results take twice its bytes
COUNT = 10 << 20  # more tiles than are in flight
HOSTS = ("aa", "aaa", "aaaaa", "aaaaaaaa", "a" * 16, "aab", "aabb", "abaa", "aaabc", "aaaaaaab", "aaaabbbbccccccca")


def needed(wave: Wave, neighbours: set[int], held: bool) -> tuple[int, int]:
    """Bytes of staging that have to be free for a wave, and entries of a lane. `held`: its terms are read when all of
    them are there, so all must fit at once; what is only received is read as it comes."""
    sends = [send for send in wave.sends if neighbours.intersection(send.peers)]
    sizes = [-(-send.nbytes // 64) * 64 for send in sends]
    entries = Counter(peer for send in sends for peer in send.peers)
    if not held:
        return max(sizes, default=0), 1
    # The circle's end cuts nothing: what does not fit there leaves it empty.
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
            continue  # not for this topology
        op = "sum" if collective in REDUCING else None
        bounds = even_bounds(COUNT, schedule.segments, DTYPE.itemsize)
        for rank in range(size):
            neighbours = {peer for peer, host in enumerate(hosts) if host == hosts[rank] and peer != rank}
            plan = Plan(schedule, rank, DTYPE, op, bounds, CallDescription("", "", 0), tile)
            for wave in plan.waves():
                nbytes, most = needed(wave, neighbours, held=op is not None)
                assert nbytes <= staging_bytes(size, tile), (algorithm, rank)
                assert most <= entries, (algorithm, rank)


@pytest.mark.skipif(not native_core.available(), reason="only the core reads shared memory")
@pytest.mark.parametrize("algorithm", ["tree", "ring", "star"])
def test_all_reduce_across_hosts_passes_large_tiles_through_shared_memory(algorithm: str) -> None:
    """Between hosts tiles are larger; ranks that share one pass them on through memory."""

    def reduce(group: gw.Group) -> float:
        return float(group.all_reduce(np.ones(COUNT // 2, ml_dtypes.bfloat16), algorithm=algorithm)[-1])

    with crew_of("shm", Topology.of(list("aab"))) as crew:
        assert crew.run(reduce) == [3.0] * 3
