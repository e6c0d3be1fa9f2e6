"""The resources of a job: memory does not grow, waiting takes little CPU time, and ranks may outnumber the cores."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import Array
from gradwire.host import native_core
from gradwire.topology import Topology
from support.crews import Crew, crew_of

MIB = 1 << 20
shares_memory = pytest.mark.skipif(not native_core.available(), reason="only the core reads shared memory")


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with crew_of("shm", Topology.single(3)) as crew:
        yield crew


def used_memory() -> int:
    """Return the bytes of this process and of all shared-memory arenas that it has open."""
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
    own = sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Anonymous:"))
    arenas = {}
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.islink(path) and os.readlink(path).startswith("/memfd:gradwire"):
            status = os.stat(path)
            arenas[status.st_ino] = status.st_blocks * 512
    assert arenas
    return own + sum(arenas.values())


def calls(group: gw.Group, seed: int, number: int) -> None:
    """Call collectives of random sizes, on ordinary and on registered arrays."""
    drawn = random.Random(seed)  # the same on all ranks
    for _ in range(number):
        count = drawn.randrange(1, drawn.choice((50, 5000, 50_000)))
        x = group.empty(count, "int64") if drawn.random() < 0.1 else np.empty(count, np.int64)
        x[:] = group.rank
        match drawn.randrange(4):
            case 0 | 1:
                assert group.all_reduce(x)[-1] == group.size * (group.size - 1) // 2
            case 2:
                assert group.broadcast(x, root=1)[-1] == 1
            case _:
                assert group.all_gather(x).shape == (group.size * count,)


@shares_memory
@pytest.mark.slow
def test_repeated_calls_do_not_grow_memory(crew: Crew) -> None:
    crew.run(lambda group: calls(group, 1, 2000))  # more different calls than the plan cache holds
    before = used_memory()
    crew.run(lambda group: calls(group, 2, 10_000), timeout=300)
    assert used_memory() - before < 10 * MIB


@shares_memory
def test_registered_arrays_do_not_grow_memory(crew: Crew) -> None:
    def makes_arrays(group: gw.Group, number: int) -> None:
        kept: list[Array] = []
        for turn in range(number):
            x = group.empty(1 + turn * 7919 % 100_000)
            x[:] = 1
            kept = [*kept[-5:], x]
            if turn % 10 == 0:
                group.all_reduce(group.empty(5000))

    crew.run(lambda group: makes_arrays(group, 100))
    before = used_memory()
    crew.run(lambda group: makes_arrays(group, 1000))
    assert used_memory() - before < 10 * MIB


# -- CPU time ---------------------------------------------------------------------------------------------------------


def idles(seconds: float) -> tuple[float, float]:
    """Return the share of a core that this rank uses while it sleeps, and while it waits for rank 0 in a barrier."""

    def share(wait: Callable[[], None]) -> float:
        wall, used = time.monotonic(), time.process_time()
        wait()
        return (time.process_time() - used) / (time.monotonic() - wall)

    with gw.init() as group:
        group.barrier()
        beside = share(lambda: time.sleep(seconds))
        group.barrier()
        if group.rank == 0:
            time.sleep(seconds)
        return beside, share(group.barrier)


@pytest.mark.slow
def test_waiting_ranks_use_little_cpu_time() -> None:
    shares = gw.launch(idles, 4, (3.0,))
    assert all(beside < 0.02 for beside, _ in shares), shares
    assert all(within < 0.02 for _, within in shares[1:]), shares  # rank 0 does not wait


# -- many ranks -------------------------------------------------------------------------------------------------------


def works(number: int) -> str:
    """Call random collectives and compare each result with NumPy. Every rank can compute all ranks' inputs."""
    with gw.init() as group:
        size, rank = group.size, group.rank
        drawn = random.Random(4711)
        counts = [size * drawn.randrange(1, 200) for _ in range(20)]
        for call in range(number):
            count, root = drawn.choice(counts), drawn.randrange(size)
            inputs = np.arange(count) * (np.arange(size)[:, None] + 1) + call
            x = inputs[rank].copy()
            match drawn.randrange(8):
                case 0:
                    found, expected = group.all_reduce(x), inputs.sum(axis=0)
                case 1:
                    found, expected = group.all_reduce(x, op="max"), inputs.max(axis=0)
                case 2:
                    found, expected = group.broadcast(x, root=root), inputs[root]
                case 3:
                    found, expected = group.all_gather(x), inputs.ravel()
                case 4:
                    found = group.reduce_scatter(x)
                    expected = np.split(inputs.sum(axis=0), size)[rank]
                case 5:
                    found = group.all_to_all(x)
                    expected = np.concatenate([np.split(one, size)[rank] for one in inputs])
                case 6:
                    found, expected = group.reduce(x, root=root), inputs.sum(axis=0) if rank == root else None
                case _:
                    found, expected = group.scatter(x, root=root), np.split(inputs[root], size)[rank]
            assert np.array_equal(found, expected), f"call {call} on rank {rank}"
        return group.capabilities.transport


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 16])
def test_more_ranks_than_cores_make_progress(size: int) -> None:
    transport = "shm" if native_core.available() else "tcp"
    assert gw.launch(works, size, (1000,)) == [transport] * size
