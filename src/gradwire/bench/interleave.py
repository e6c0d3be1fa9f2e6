"""Measure cases with all engines in turns, block by block.

A block is a number of iterations of one case with one engine. On a shared machine absolute times can vary by a factor
of five within a minute, so only measurements that alternate can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from gradwire.bench import commands, installs
from gradwire.bench.cases import Case
from gradwire.bench.commands import Command, EngineSpec
from gradwire.bench.engine_processes import Block, EngineProcesses
from gradwire.bench.engines.base import Unsupported
from gradwire.bench.installs import Install
from gradwire.bench.rivals import RIVALS, find
from gradwire.host.machine import usable_cores

PILOT_ITERATIONS = 3  # their time determines how many iterations fit into a block
MIN_ITERATIONS, MAX_ITERATIONS = 3, 2000  # in a block whose duration is given in seconds


@dataclass(frozen=True)
class Plan:
    """The options of a measurement."""

    ranks: int
    against: tuple[str, ...] = ()  # names of rivals, and paths of interpreters with another gradwire
    transport: str | None = None
    algorithm: str = "auto"
    registered: bool = False
    mpi_threads: str = "multiple"
    blocks: int = 9
    iterations: int | None = None  # of a block; None: as many as fit into `seconds`
    seconds: float = 0.2


class MeasuredEngine(Protocol):
    """The part of `EngineProcesses` that `measure_case` uses."""

    name: str

    def block(self, case: Case, iterations: int) -> Block: ...


@dataclass
class Result:
    """All blocks of one case."""

    case: Case
    blocks: dict[str, list[Block]] = field(default_factory=dict)  # by engine; all engines have the same number
    unsupported: dict[str, str] = field(default_factory=dict)  # by engine: the reason


def turns(names: Sequence[str], number: int) -> list[str]:
    """Return the order of the engines in round `number`.

    Each engine has each position equally often, so that a drift of the machine favours none.

    >>> ["".join(turns("abc", number)) for number in range(6)]
    ['abc', 'bca', 'cab', 'cba', 'acb', 'bac']
    """
    shift = number % len(names)
    order = [*names[shift:], *names[:shift]]
    return order if number // len(names) % 2 == 0 else order[::-1]


def measure_case(engines: Sequence[MeasuredEngine], case: Case, plan: Plan) -> Result:
    """Measure one case. If `plan.iterations` is None, each engine runs as many as fit into `plan.seconds` per block."""
    result = Result(case)
    counts: dict[str, int] = {}
    by_name = {engine.name: engine for engine in engines}
    for engine in engines:
        try:
            pilot = engine.block(case, PILOT_ITERATIONS)
        except Unsupported as reason:
            result.unsupported[engine.name] = str(reason)
            continue
        fitting = max(MIN_ITERATIONS, min(MAX_ITERATIONS, int(plan.seconds / pilot.pace)))
        counts[engine.name] = plan.iterations or fitting
        result.blocks[engine.name] = []
    for number in range(plan.blocks if counts else 0):
        for name in turns(list(counts), number):
            result.blocks[name].append(by_name[name].block(case, counts[name]))
    return result


@contextmanager
def started_engines(
    plan: Plan, environ: Mapping[str, str], progress: Callable[[str], None]
) -> Iterator[list[EngineProcesses]]:
    """Start the ranks of all engines, this gradwire's first, and yield them. The ranks end with the context."""
    progress("looking for the engines")
    specs = _specs(plan, environ)  # raises before any rank is started
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gradwire-bench-")))
        engines = []
        for number, spec in enumerate(specs):
            progress(f"starting {plan.ranks} ranks of {spec.name}")
            engines.append(stack.enter_context(EngineProcesses(spec, plan.ranks, folder / str(number))))
            engines[-1].start()
        yield engines


def _specs(plan: Plan, environ: Mapping[str, str]) -> list[EngineSpec]:
    cores = int(usable_cores())
    chosen = {"transport": plan.transport, "algorithm": plan.algorithm, "registered": plan.registered}
    others = installs.find([path for path in plan.against if path not in RIVALS], environ)

    def gradwire_ranks(install: Install, socket_path: Path, options: dict[str, Any]) -> list[Command]:
        return commands.of_gradwire(install, plan.ranks, socket_path, {**options, **chosen}, environ)

    def rival_ranks(name: str, python: Path, socket_path: Path, options: dict[str, Any]) -> list[Command]:
        options = {**options, "mpi_threads": plan.mpi_threads}
        return commands.of_rival(RIVALS[name], python, plan.ranks, socket_path, options, environ, cores)

    specs = [EngineSpec(installs.THIS, partial(gradwire_ranks, installs.this_install()))]
    for name in plan.against:
        if name in RIVALS:
            ranks = partial(rival_ranks, name, find(RIVALS[name], environ))
            specs.append(EngineSpec(name, ranks, {"settings": commands.settings_of(RIVALS[name], plan.ranks, cores)}))
        else:
            other = others[name]
            advice = f"check whether that install works without this one: {other.python} -m gradwire bench --sizes 8"
            ranks = partial(gradwire_ranks, other)
            specs.append(EngineSpec(other.name, ranks, {"python": str(other.python)}, advice))
    # An interpreter that was given twice, by its own path and by its environment's, is measured once.
    return list({spec.name: spec for spec in specs}.values())
