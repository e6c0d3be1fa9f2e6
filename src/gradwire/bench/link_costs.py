"""`gradwire tune`: what rounds, messages and bytes cost on this machine's links.

All-reduces by algorithms that differ in rounds, messages and bytes are timed at sizes from one number to megabytes. The
constants are those whose prices come nearest to the times. Times say little about some of them (with two ranks each
round has one message each way): those stay near the defaults.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.collectives import DEFAULTS, Constants, Table, build, tuning_table
from gradwire.collectives.pricing import price
from gradwire.launch.function import launch
from gradwire.topology import Topology

SIZES = (8, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20)
BLOCKS = 9  # probes take turns, so that a slow moment of the machine hits them all; the lower quartile counts
BLOCK_SECONDS = 0.02
MOST_ITERATIONS = 1000
PROBES = {"direct": "oneshot", "ring": "ring", "halving": "halving", "tree": "tree"}
"""Algorithms to ask for, and what then runs by a table in which a round costs too much."""
SMALL = 32 << 10  # beyond, the tree's tiles overlap, which prices do not know
CALL_SECONDS = 20e-6  # around the schedule, in Python: a first guess
_HESITATION = 0.1  # how much less a doubling against the defaults weighs than one against the times
_FURTHEST = np.log(1000.0)  # times more or less than the defaults

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timing:
    """How long an all-reduce takes."""

    algorithm: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What one kind of link came to."""

    kind: str
    native: bool
    timings: list[Timing]
    constants: Constants
    misfit: float  # the median factor between a time and its price

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(kind: str, ranks: int) -> Measured | None:
    """Start ranks and time them; None if they have no links of that kind."""
    with _one_shot_always():
        answers = launch(_time_everything, ranks, (kind,))
    if answers[0] is None:
        return None
    timings = [Timing(*row) for row in answers[0]["timings"]]
    constants, misfit = fit(kind, timings, ranks)
    return Measured(kind, answers[0]["native"], timings, constants, misfit)


@contextlib.contextmanager
def _one_shot_always() -> Iterator[None]:
    """A table for the ranks by which `direct` takes one shot at any size; two shots are what the ring is like."""
    before = os.environ.get(tuning_table.FILE)
    dear = Table(*(replace(constants, round=1.0) for constants in (DEFAULTS.shm, DEFAULTS.tcp, DEFAULTS.net)))
    with TemporaryDirectory(prefix="gradwire-tune-") as folder:
        file = Path(folder, "tuning.json")
        tuning_table.store(dear, file)
        os.environ[tuning_table.FILE] = str(file)
        try:
            yield
        finally:
            del os.environ[tuning_table.FILE]
            if before is not None:
                os.environ[tuning_table.FILE] = before


# ── in the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _time_everything(kind: str) -> dict[str, Any] | None:
    import gradwire as gw

    # Shared memory is what "auto" finds where it can be had.
    with gw.init(transport="tcp" if kind == "tcp" else "auto") as group:
        if kind not in ("tcp", group.capabilities.transport):
            return None
        cases = [(name, nbytes) for nbytes in SIZES for name in PROBES if name != "tree" or nbytes <= SMALL]
        probes = [(name, np.zeros(nbytes // 4, np.float32)) for name, nbytes in cases]
        counts = group.broadcast_value([_iterations(group, name, x) for name, x in probes])
        times: list[list[float]] = [[] for _ in probes]
        for _ in range(BLOCKS):
            for (name, x), count, found in zip(probes, counts, times, strict=True):
                found.append(_block(group, name, x, count))
        quartiles = (float(np.quantile(found, 0.25)) for found in times)
        timings = [(PROBES[name], x.nbytes, time) for (name, x), time in zip(probes, quartiles, strict=True)]
        return {"native": group.capabilities.native, "timings": timings}


def _iterations(group: Any, algorithm: str, x: npt.NDArray[np.float32]) -> int:
    _block(group, algorithm, x, 2)  # makes the plan
    return max(2, min(MOST_ITERATIONS, int(BLOCK_SECONDS / _block(group, algorithm, x, 3))))


def _block(group: Any, algorithm: str, x: npt.NDArray[np.float32], iterations: int) -> float:
    """Seconds for one of many in a row: an all-reduce ends only when all ranks have called it, so they stay in step."""
    group.barrier()
    begin = time.perf_counter()
    for _ in range(iterations):
        group.all_reduce(x, algorithm=algorithm)
    return (time.perf_counter() - begin) / iterations


# ── constants from times ─────────────────────────────────────────────────────────────────────────────────────────────


def fit(kind: str, timings: Sequence[Timing], ranks: int) -> tuple[Constants, float]:
    """The constants whose prices, and a cost of each call besides, are nearest to the times by their logarithms.

    Found by Gauss-Newton steps in the logarithms of the constants, so that none becomes negative. Constants that are 0
    by default (what a kind of link does not do) stay 0.
    """
    defaults: Constants = getattr(DEFAULTS, kind)
    topology = Topology.single(ranks)
    schedules = {timing.algorithm: build("all_reduce", timing.algorithm, ranks) for timing in timings}
    names = [name for name, seconds in asdict(defaults).items() if seconds > 0]
    first = np.log([getattr(defaults, name) for name in names] + [CALL_SECONDS])
    times = np.log([timing.seconds for timing in timings])

    def constants_of(logs: Vector) -> Constants:
        return replace(defaults, **{name: float(np.exp(log)) for name, log in zip(names, logs[:-1], strict=True)})

    def misfits(logs: Vector) -> Vector:
        constants, call = constants_of(logs), float(np.exp(logs[-1]))
        prices = [price(schedules[t.algorithm], topology, t.nbytes, constants, constants) + call for t in timings]
        return np.asarray(np.log(prices) - times)

    logs = _nearest(misfits, first)
    return constants_of(logs), float(np.exp(np.median(np.abs(misfits(logs)))))


def _nearest(misfits: Callable[[Vector], Vector], first: Vector, steps: int = 60, nudge: float = 1e-4) -> Vector:
    """Where the squares of the misfits and, weighing little, of the distance from the beginning are least."""

    def total(logs: Vector) -> float:
        return float(np.sum(misfits(logs) ** 2) + np.sum((_HESITATION * (logs - first)) ** 2))

    logs = first.copy()
    for _ in range(steps):
        now = misfits(logs)
        slopes = np.stack([(misfits(logs + nudge * unit) - now) / nudge for unit in np.eye(len(logs))], axis=1)
        matrix = np.vstack([slopes, _HESITATION * np.eye(len(logs))])
        step = np.linalg.lstsq(matrix, -np.concatenate([now, _HESITATION * (logs - first)]), rcond=None)[0]
        size = 1.0
        while size > 1e-3 and total(logs + size * step) >= total(logs):
            size /= 2
        if size <= 1e-3:
            break
        logs = np.clip(logs + size * step, first - _FURTHEST, first + _FURTHEST)
    return logs
