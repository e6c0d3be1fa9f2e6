"""Chooses the algorithm of a collective by its predicted time, and builds its schedule.

The choice depends on the collective, the bytes, the topology and a table that the ranks have agreed on, so it is the
same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from gradwire.collectives import direct, halving, hierarchical, ring, star, tree
from gradwire.collectives.pricing import DEFAULTS, Table, price
from gradwire.collectives.schedule import COLLECTIVES, ROOTED, Builder, Schedule
from gradwire.errors import InvalidRank, InvalidSize, UnsupportedOp
from gradwire.topology import Topology

FLAT: dict[str, dict[str, Builder]] = {
    "star": star.PHASES,
    "ring": ring.PHASES,
    "tree": tree.PHASES,
    "halving": halving.PHASES,
    "direct": direct.PHASES,
    "oneshot": {"all_reduce": direct.oneshot},
}
ALGORITHMS = ("star", "ring", "tree", "halving", "direct", "hierarchical")
"""The public names. `oneshot` is not among them: `direct` uses it to all-reduce small arrays."""

CANDIDATES = {
    "all_reduce": ("oneshot", "direct", "tree", "halving", "ring", "star", "hierarchical"),
    "broadcast": ("star", "tree", "direct", "hierarchical"),
    "reduce": ("star", "tree", "direct"),
    "all_gather": ("direct", "halving", "ring"),
    "reduce_scatter": ("direct", "halving", "ring"),
}
"""The algorithms that "auto" compares; among equally fast ones it chooses the first. Collectives that are not listed
use `direct`: a gather, a scatter or an all-to-all is fastest with one hop."""
FEW_RANKS = 16
"""With more ranks "auto" avoids messages from every rank to every other. They overload switches and cores, and the
predicted time does not include this."""


@lru_cache
def algorithms(collective: str) -> tuple[str, ...]:
    """Return the names that can be requested as the algorithm of a collective."""
    if collective not in COLLECTIVES:
        raise UnsupportedOp(f"there is no collective {collective!r}; there are: {', '.join(COLLECTIVES)}")
    tables: dict[str, Collection[str]] = {**FLAT, "hierarchical": hierarchical.PHASES}
    return tuple(name for name in ALGORITHMS if collective in tables[name])


def build(collective: str, algorithm: str, size: int, *, topology: Topology | None = None, root: int = 0) -> Schedule:
    """Return the schedule of a collective, which is cached. Without a topology all ranks share a host."""
    if size < 1:
        raise InvalidSize(f"a collective needs at least 1 rank, got {size}")
    if topology is not None and topology.size != size:
        raise InvalidSize(f"the topology has {topology.size} ranks, the collective {size}")
    if not 0 <= root < size:
        raise InvalidRank(f"root {root} is not one of the ranks 0 … {size - 1}", rank=root, size=size)
    rooted = root if collective in ROOTED else None
    if algorithm == "hierarchical":
        return _build_hierarchical(collective, topology or Topology.single(size), rooted)
    return _build_flat(collective, algorithm, size, rooted)


@lru_cache(maxsize=256)
def _build_flat(collective: str, algorithm: str, size: int, root: int | None) -> Schedule:
    builder = FLAT.get(algorithm, {}).get(collective)
    if builder is None:
        raise _unsupported(collective, algorithm)
    return Schedule(collective, algorithm, size, root, builder(size, root or 0))


@lru_cache(maxsize=64)
def _build_hierarchical(collective: str, topology: Topology, root: int | None) -> Schedule:
    builder = hierarchical.PHASES.get(collective)
    if builder is None:
        raise _unsupported(collective, "hierarchical")
    return Schedule(collective, "hierarchical", topology.size, root, builder(topology, root or 0))


def choose(
    collective: str,
    requested: str,
    nbytes: int,
    topology: Topology,
    table: Table = DEFAULTS,
    transport: str = "tcp",
) -> str:
    """Return the algorithm to build: the requested one, or for "auto" the one with the smallest predicted time.

    `nbytes` is the size of the whole array: the input of a rank for a reduction, otherwise its output. `transport` is
    the transport between ranks of one host.
    """
    known = algorithms(collective)
    if requested != "auto" and requested not in known:
        raise _unsupported(collective, requested)
    candidates: tuple[str, ...] = (requested,)
    if requested == "auto":
        candidates = _candidates(collective, topology)
    elif requested == "direct" and collective == "all_reduce":
        candidates = ("oneshot", "direct")
    if len(candidates) == 1:
        return candidates[0]

    def seconds(algorithm: str) -> float:
        schedule = build(collective, algorithm, topology.size, topology=topology)
        return price(schedule, topology, nbytes, table.inside(transport), table.net)

    return min(candidates, key=seconds)


def _candidates(collective: str, topology: Topology) -> tuple[str, ...]:
    excluded: set[str] = set()
    if len(topology.hosts) in (1, topology.size):  # all links are of one kind, so a hierarchy has no advantage
        excluded.add("hierarchical")
    if topology.size > FEW_RANKS and collective not in ROOTED:
        excluded |= {"oneshot", "direct"}
    return tuple(name for name in CANDIDATES.get(collective, ()) if name not in excluded) or ("direct",)


def _unsupported(collective: str, algorithm: str) -> UnsupportedOp:
    known = ", ".join(algorithms(collective))
    return UnsupportedOp(f"{collective} has no algorithm {algorithm!r}; it has: {known}", operation=collective)
