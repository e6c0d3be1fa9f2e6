"""Measure the cost of rounds, messages and bytes on this machine's links, for `gradwire tune`.

All-reduces are timed with algorithms that differ in rounds, messages and bytes, at sizes from 8 bytes to 4 MiB. The
result is the set of constants whose prices are nearest to the measured times. The times determine some constants badly
(with two ranks, every round has one message in each direction). Such constants stay near their defaults.
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
BLOCKS = 9  # the probes alternate, so that a slow moment affects all of them; the result is the lower quartile
BLOCK_SECONDS = 0.02
MAX_ITERATIONS = 1000
PROBES = {"direct": "oneshot", "ring": "ring", "halving": "halving", "tree": "tree"}
"""By requested algorithm: the schedule that runs when the tuning table makes rounds expensive."""
SMALL = 32 << 10  # larger messages of the tree are split into tiles that overlap, which the price does not model
CALL_SECONDS = 20e-6  # first estimate of the time of a call outside of its schedule, in Python
_DEFAULTS_WEIGHT = 0.1  # weight of a deviation from a default, relative to the same deviation from a time
_MAX_DEVIATION = np.log(1000.0)  # largest factor between a constant and its default

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timing:
    """The measured time of an all-reduce."""

    algorithm: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """The result for one kind of link."""

    kind: str
    native: bool
    timings: list[Timing]
    constants: Constants
    misfit: float  # the median factor between a time and its price

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(kind: str, ranks: int) -> Measured | None:
    """Start ranks and measure their links. Return None if they have no links of that kind."""
    with _expensive_rounds():
        answers = launch(_time_everything, ranks, (kind,))
    if answers[0] is None:
        return None
    timings = [Timing(*row) for row in answers[0]["timings"]]
    constants, misfit = fit(kind, timings, ranks)
    return Measured(kind, answers[0]["native"], timings, constants, misfit)


@contextlib.contextmanager
def _expensive_rounds() -> Iterator[None]:
    """Give the ranks a tuning table in which `direct` uses its one-shot schedule at every size.

    The two-shot schedule would add little: it resembles the ring.
    """
    before = os.environ.get(tuning_table.FILE)
    expensive = Table(*(replace(constants, round=1.0) for constants in (DEFAULTS.shm, DEFAULTS.tcp, DEFAULTS.net)))
    with TemporaryDirectory(prefix="gradwire-tune-") as folder:
        file = Path(folder, "tuning.json")
        tuning_table.store(expensive, file)
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

    # "auto" uses shared memory if it is available.
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
    _block(group, algorithm, x, 2)  # warm-up: creates the plan
    return max(2, min(MAX_ITERATIONS, int(BLOCK_SECONDS / _block(group, algorithm, x, 3))))


def _block(group: Any, algorithm: str, x: npt.NDArray[np.float32], iterations: int) -> float:
    """Return the seconds per all-reduce in a sequence. An all-reduce ends only after all ranks have called it, so the
    ranks stay synchronised."""
    group.barrier()
    begin = time.perf_counter()
    for _ in range(iterations):
        group.all_reduce(x, algorithm=algorithm)
    return (time.perf_counter() - begin) / iterations


# ── fitting the constants to the times ───────────────────────────────────────────────────────────────────────────────


def fit(kind: str, timings: Sequence[Timing], ranks: int) -> tuple[Constants, float]:
    """Return the constants that explain the times best, and the median factor between a time and its price.

    The price of an all-reduce is that of its schedule plus a fixed cost per call. The fit minimises the differences of
    the logarithms of times and prices, by Gauss-Newton steps in the logarithms of the constants, so that no constant
    becomes negative. Constants that are 0 by default, because the link does not have that cost, stay 0.
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
    """Minimise the squared misfits plus the squared distance from `first`, which has a small weight."""

    def total(logs: Vector) -> float:
        return float(np.sum(misfits(logs) ** 2) + np.sum((_DEFAULTS_WEIGHT * (logs - first)) ** 2))

    logs = first.copy()
    for _ in range(steps):
        now = misfits(logs)
        slopes = np.stack([(misfits(logs + nudge * unit) - now) / nudge for unit in np.eye(len(logs))], axis=1)
        matrix = np.vstack([slopes, _DEFAULTS_WEIGHT * np.eye(len(logs))])
        step = np.linalg.lstsq(matrix, -np.concatenate([now, _DEFAULTS_WEIGHT * (logs - first)]), rcond=None)[0]
        size = 1.0
        while size > 1e-3 and total(logs + size * step) >= total(logs):
            size /= 2
        if size <= 1e-3:
            break
        logs = np.clip(logs + size * step, first - _MAX_DEVIATION, first + _MAX_DEVIATION)
    return logs
