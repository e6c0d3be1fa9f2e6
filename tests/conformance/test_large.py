"""64 MiB over TCP, both ways at once, with little memory beyond the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw

LARGE = 64 << 20
EXTRA = 40 << 20  # tiles in flight, staging and the allocator's own; the arrays would be a multiple
COUNT = LARGE // 4


def peak(fn: Any, *args: Any, **named: Any) -> tuple[Any, int]:
    """What fn returns, and by how many bytes this process grew while it ran, beyond the memory of the result."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
    before = _status("VmRSS")
    result = fn(*args, **named)
    return result, _status("VmHWM") - before - (result.nbytes if result is not args[0] else 0)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


def program(collective: str, algorithm: str) -> tuple[int, bool]:
    """One large collective: how much the process grew, and whether the result is right."""
    with gw.init() as group:
        rank, size = group.rank, group.size
        whole = np.arange(COUNT, dtype=np.float32) % 1000
        x = whole + rank
        group.barrier()
        result, grown = peak(getattr(group, collective), x, algorithm=algorithm)
        total = size * whole + sum(range(size))
        right = {
            "all_reduce": lambda: np.array_equal(result, total),
            "broadcast": lambda: np.array_equal(result, whole),
            "reduce_scatter": lambda: np.array_equal(result, np.split(total, size)[rank]),
            "all_gather": lambda: all(np.array_equal(part, whole + r) for r, part in enumerate(np.split(result, size))),
            "all_to_all": lambda: all(
                np.array_equal(part, np.split(whole, size)[rank] + r) for r, part in enumerate(np.split(result, size))
            ),
        }
        return grown, bool(right[collective]())


CALLS = [
    ("all_reduce", "auto"),
    ("all_reduce", "ring"),
    ("all_reduce", "tree"),
    ("all_gather", "auto"),
    ("reduce_scatter", "auto"),
    ("broadcast", "auto"),
    ("all_to_all", "auto"),
]


@pytest.mark.parametrize(("collective", "algorithm"), CALLS)
def test_64_mib(collective: str, algorithm: str) -> None:
    for grown, right in gw.launch(program, 2, (collective, algorithm)):
        assert right
        assert grown < EXTRA, f"grew by {grown / 2**20:.0f} MiB"
