"""All pairs of a collective and an algorithm, for tests that run over them."""

from __future__ import annotations

from collections.abc import Iterator

from gradwire.collectives import COLLECTIVES, ROOTED, Schedule, algorithms, build
from gradwire.topology import Topology

CELLS = [(collective, algorithm) for collective in COLLECTIVES for algorithm in algorithms(collective)]
CELLS.append(("all_reduce", "oneshot"))
FLAT_CELLS = [cell for cell in CELLS if cell[1] != "hierarchical"]


def uneven(size: int) -> Topology:
    """Return a topology with hosts of unequal size, whose ranks are not consecutive."""
    return Topology.of([str(rank * rank % 7 % 4) for rank in range(size)])


def schedules(collective: str, algorithm: str, size: int, roots: int | None = None) -> Iterator[Schedule]:
    """Return the schedules for all roots, or for `roots` of them with the first and the last.

    Hierarchical schedules use uneven hosts.
    """
    topology = uneven(size) if algorithm == "hierarchical" else None
    if collective not in ROOTED:
        yield build(collective, algorithm, size, topology=topology)
        return
    chosen = range(size) if roots is None else {i * (size - 1) // max(1, roots - 1) for i in range(roots)}
    for root in sorted(chosen):
        yield build(collective, algorithm, size, topology=topology, root=root)
