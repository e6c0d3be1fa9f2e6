"""Tests collectives of 64 MiB between two processes: the results are right, and little extra memory is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import Array

COUNT = (64 << 20) // 4
EXTRA = 16 << 20  # bytes for tiles in flight, staging and the allocator, for any count
CALLS = [
    ("all_reduce", "auto"),
    ("all_reduce", "ring"),
    ("all_reduce", "tree"),
    ("all_reduce", "star"),
    ("all_gather", "auto"),
    ("reduce_scatter", "auto"),
    ("broadcast", "auto"),
    ("broadcast", "tree"),
    ("all_to_all", "auto"),
]
Measured = dict[tuple[str, str], list[tuple[int, bool]]]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """By call and process: by how many bytes the process grew, and whether its result was right."""
    found = gw.launch(program, 2)
    return {call: [answers[position] for answers in found] for position, call in enumerate(CALLS)}


def program() -> list[tuple[int, bool]]:
    with gw.init() as group:
        return [one_call(group, collective, algorithm) for collective, algorithm in CALLS]


def one_call(group: gw.Group, collective: str, algorithm: str) -> tuple[int, bool]:
    whole = np.arange(COUNT, dtype=np.float32) % 1000
    x = whole + group.rank
    group.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM) to the current resident size
    before = status("VmRSS")
    result = getattr(group, collective)(x, algorithm=algorithm)
    grown = status("VmHWM") - before
    if result is not x:
        grown -= result.nbytes
    return grown, is_right(collective, result, whole, group.rank, group.size)


def status(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def is_right(collective: str, result: Array, whole: Array, rank: int, size: int) -> bool:
    total: Any = size * whole + sum(range(size))
    parts = np.split(whole, size)
    expected: dict[str, Callable[[], Array]] = {
        "all_reduce": lambda: total,
        "broadcast": lambda: whole,
        "reduce_scatter": lambda: np.split(total, size)[rank],
        "all_gather": lambda: np.concatenate([whole + r for r in range(size)]),
        "all_to_all": lambda: np.concatenate([parts[rank] + r for r in range(size)]),
    }
    return np.array_equal(result, expected[collective]())


@pytest.mark.parametrize("call", CALLS, ids="-".join)
def test_collective_of_64_mib_is_right_and_uses_little_extra_memory(measured: Measured, call: tuple[str, str]) -> None:
    for rank, (grown, right) in enumerate(measured[call]):
        assert right, f"rank {rank}"
        assert grown < EXTRA, f"rank {rank} grew by {grown / 2**20:.0f} MiB"
