"""Report measured blocks: times, bandwidths and ratios, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gradwire.bench.cases import Case, human
from gradwire.bench.engine_processes import Block
from gradwire.bench.installs import THIS
from gradwire.bench.interleave import Result
from gradwire.bench.rivals import RIVALS

FASTEST_MPI = "fastest MPI"
_SHARED_MEMORY_MPI = {name for name, rival in RIVALS.items() if rival.is_mpi and name != "openmpi-tcp"}


@dataclass(frozen=True)
class Ratio:
    """The time of a rival divided by gradwire's: the median over the blocks, and the range."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, rival: Sequence[Block], ours: Sequence[Block]) -> Ratio:
        ratios = [other.us / own.us for other, own in zip(rival, ours, strict=True)]
        return cls(median(ratios), min(ratios), max(ratios))


@dataclass(frozen=True)
class Figures:
    """The figures of one engine in a case, as nccl-tests prints them."""

    us: float
    longest_us: float
    algbw: float  # GB/s
    busbw: float
    wrong: int

    @classmethod
    def of(cls, case: Case, blocks: Sequence[Block]) -> Figures:
        us = median(block.us for block in blocks)
        algbw = case.nbytes / us / 1000
        longest = median(block.longest_us for block in blocks)
        return cls(us, longest, algbw, algbw * case.bus_factor, sum(block.wrong for block in blocks))


def figures(result: Result) -> dict[str, Figures]:
    """Return the figures of a case, by engine."""
    return {name: Figures.of(result.case, blocks) for name, blocks in result.blocks.items()}


def ratios(result: Result) -> dict[str, Ratio]:
    """Return the ratios of a case, by rival. With several MPIs, `FASTEST_MPI` is the smallest of their ratios."""
    ours = result.blocks.get(THIS)
    if ours is None:
        return {}
    found = {name: Ratio.of(blocks, ours) for name, blocks in result.blocks.items() if name != THIS}
    shared_memory = [ratio for name, ratio in found.items() if name in _SHARED_MEMORY_MPI]
    if len(shared_memory) > 1:
        found[FASTEST_MPI] = min(shared_memory, key=lambda ratio: ratio.median)
    return found


def wrong(results: Sequence[Result]) -> int:
    return sum(one.wrong for result in results for one in figures(result).values())


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean.

    >>> geometric_mean([2.0, 8.0])
    4.0
    """
    return math.exp(math.fsum(map(math.log, values)) / len(values))


# ── as text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def short(value: float) -> str:
    """Format a number with 0, 2 or 3 decimals, depending on its size.

    >>> short(123.4), short(12.34), short(0.01234)
    ('123', '12.34', '0.012')
    """
    return f"{value:.{0 if value >= 100 else 2 if value >= 1 else 3}f}"


def heading(engines: Sequence[str]) -> list[str]:
    """Return the two heading lines, as nccl-tests prints them. A single engine has no column for its name."""
    names = ("size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong")
    units = ("(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", "")
    name = _name_column("engine", engines)
    ratio = f"{name}rival ÷ gradwire (least … most)" if name else ""
    return [f"{_columns('#', names)}{ratio}", _columns("#", units).rstrip()]


def lines(result: Result, engines: Sequence[str]) -> Iterator[str]:
    """Yield one line per engine."""
    case, against = result.case, ratios(result)
    for name, one in figures(result).items():
        measured = (f"{one.us:.2f}", f"{one.algbw:.3f}", f"{one.busbw:.3f}", str(one.wrong))
        cells = (str(case.nbytes), str(case.count), case.dtype, case.op, *measured)
        ratio = against.get(name)
        text = f"{short(ratio.median):>8}  ({short(ratio.least)} … {short(ratio.most)})" if ratio else ""
        yield f"{_columns('', cells)}{_name_column(name, engines)}{text}".rstrip()
    for name, reason in result.unsupported.items():
        yield f"#  {name}: {reason}"


def _columns(mark: str, cells: Sequence[str]) -> str:
    widths = (12, 12, 11, 7, 12, 9, 9, 8)
    text = "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return mark + text[len(mark) :]


def _name_column(name: str, engines: Sequence[str]) -> str:
    """Return the cell of an engine's name, as wide as the longest name."""
    return "" if len(engines) == 1 else "  " + name.ljust(max(12, 1 + max(map(len, engines))))


def summary(results: Sequence[Result]) -> dict[str, dict[str, dict[int, float]]]:
    """Return the median ratios by collective, rival and bytes."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for result in results:
        for name, ratio in ratios(result).items():
            found.setdefault(result.case.collective, {}).setdefault(name, {})[result.case.nbytes] = ratio.median
    return found


def summary_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield a table of speed-ups per collective: one row per rival, one column per size, then the geometric mean."""
    for collective, rivals in summary(results).items():
        sizes = sorted({size for row in rivals.values() for size in row})
        width = max(30, 1 + max(map(len, rivals)))
        yield "#"
        columns = "".join(human(size).rjust(9) for size in sizes)
        yield f"# {(collective + ', times as fast as').ljust(width + 2)}{columns}{'geo. mean':>11}"
        for name, row in rivals.items():
            cells = "".join((short(row[size]) if size in row else "—").rjust(9) for size in sizes)
            yield f"#   {name.ljust(width)}{cells}{short(geometric_mean(list(row.values()))):>11}"


# ── as JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def as_json(results: Sequence[Result], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return all results, including each block. `about` describes the machine and the options."""
    return {**about, "results": [_as_json(result) for result in results], "summary": summary(results)}


def _as_json(result: Result) -> dict[str, Any]:
    engines = {
        name: {**asdict(one), "blocks": [asdict(block) for block in result.blocks[name]]}
        for name, one in figures(result).items()
    }
    return {
        **result.case.as_dict(),
        "bytes": result.case.nbytes,
        "engines": engines,
        "ratios": {name: asdict(ratio) for name, ratio in ratios(result).items()},
        "unsupported": result.unsupported,
    }
