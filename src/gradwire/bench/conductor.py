"""Whose turn it is, and how often.

A block is some iterations of one case with one engine. Blocks of the engines take turns, because on a shared machine
absolute times wander by a factor of five within a minute: only what was measured side by side can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from gradwire.bench import commands
from gradwire.bench.cases import Case
from gradwire.bench.crew import Block, Crew, Maker, Unsupported
from gradwire.bench.rivals import RIVALS, find
from gradwire.host.machine import usable_cores
from gradwire.launch import rendezvous

OURSELVES = "gradwire"
PILOT = 3  # iterations that tell how many fit into a block
LEAST, MOST = 3, 2000  # iterations in a block whose length is given in seconds


@dataclass(frozen=True)
class Plan:
    """How to measure."""

    ranks: int
    against: tuple[str, ...] = ()
    transport: str | None = None
    algorithm: str = "auto"
    registered: bool = False
    mpi_threads: str = "multiple"
    blocks: int = 9
    iterations: int | None = None  # in a block; or as many as fit into
    seconds: float = 0.2


class Measured(Protocol):
    """What the conductor needs of a crew."""

    name: str

    def block(self, case: Case, iterations: int) -> Block: ...


@dataclass
class Result:
    """What came of one case."""

    case: Case
    blocks: dict[str, list[Block]] = field(default_factory=dict)  # by engine; equally many, taken in turns
    unsupported: dict[str, str] = field(default_factory=dict)  # by engine, why


def turns(names: Sequence[str], number: int) -> list[str]:
    """Who goes when in round `number`: everybody is in each place equally often, and a drift favours nobody.

    >>> ["".join(turns("abc", number)) for number in range(6)]
    ['abc', 'bca', 'cab', 'cba', 'acb', 'bac']
    """
    shift = number % len(names)
    order = [*names[shift:], *names[:shift]]
    return order if number // len(names) % 2 == 0 else order[::-1]


def conduct(crews: Sequence[Measured], case: Case, plan: Plan) -> Result:
    """Measure one case. Without a number of iterations each engine does what it can in the seconds of a block."""
    result = Result(case)
    counts: dict[str, int] = {}
    by_name = {crew.name: crew for crew in crews}
    for crew in crews:
        try:
            pilot = crew.block(case, PILOT)
        except Unsupported as reason:
            result.unsupported[crew.name] = str(reason)
            continue
        counts[crew.name] = plan.iterations or max(LEAST, min(MOST, int(plan.seconds / pilot.pace)))
        result.blocks[crew.name] = []
    for number in range(plan.blocks if counts else 0):
        for name in turns(list(counts), number):
            result.blocks[name].append(by_name[name].block(case, counts[name]))
    return result


@contextmanager
def assembled(plan: Plan, environ: Mapping[str, str], tell: Callable[[str], None]) -> Iterator[list[Crew]]:
    """The ranks of all engines, ready and asleep; gradwire's first. They have ended when this ends."""
    pythons = {name: find(RIVALS[name], environ) for name in plan.against}  # complains before anything is started
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gradwire-bench-")))
        meeting = rendezvous.on_this_machine(plan.ranks)
        meeting.coordinator.start()
        stack.callback(meeting.coordinator.stop)
        for_rivals = {"mpi_threads": plan.mpi_threads}
        chosen = {"transport": plan.transport, "algorithm": plan.algorithm, "registered": plan.registered}

        def ourselves(place: Path, options: dict[str, Any]) -> list[commands.Command]:
            return commands.of_gradwire(plan.ranks, place, {**options, **chosen}, environ, meeting)

        def rival(name: str, place: Path, options: dict[str, Any]) -> list[commands.Command]:
            cores = int(usable_cores())
            return commands.of_rival(
                RIVALS[name], pythons[name], plan.ranks, place, {**options, **for_rivals}, environ, cores
            )

        makers: dict[str, Maker] = {OURSELVES: ourselves, **{name: partial(rival, name) for name in plan.against}}
        crews = []
        for name, maker in makers.items():
            tell(f"starting {plan.ranks} ranks of {name}")
            crews.append(stack.enter_context(Crew(name, plan.ranks, folder, maker)))
            crews[-1].start()
        yield crews
