"""Which algorithm runs a collective, and its schedule.

The choice follows from the collective, the bytes, and the topology alone: the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from gradwire.collectives import direct, halving, hierarchical, ring, star, tree
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
"""The public names. `oneshot` is how `direct` all-reduces small arrays."""

# Starting points, from the cost of a message (tens of µs in Python over a socket) against that of a byte (~1 ns).
FEW_RANKS = 8
"""Up to here n² messages are bearable, and fewer rounds beat fewer messages."""
ONESHOT_BYTES = 64 << 10
"""All-reduce in one shot while a rank receives no more than this: n times the array."""
SMALL_BYTES = 16 << 10
"""Up to here a message costs more than its bytes: whole arrays, few rounds."""
LARGE_BYTES = 1 << 20
"""From here on a ring's many rounds are hidden by its even streams."""


@lru_cache
def algorithms(collective: str) -> tuple[str, ...]:
    """The algorithms that a collective can be asked for by name."""
    if collective not in COLLECTIVES:
        raise UnsupportedOp(f"there is no collective {collective!r}; there are: {', '.join(COLLECTIVES)}")
    tables: dict[str, Collection[str]] = {**FLAT, "hierarchical": hierarchical.PHASES}
    return tuple(name for name in ALGORITHMS if collective in tables[name])


def build(collective: str, algorithm: str, size: int, *, topology: Topology | None = None, root: int = 0) -> Schedule:
    """The schedule of a collective; made once and kept. Without a topology all ranks share a host."""
    if size < 1:
        raise InvalidSize(f"a collective of {size} ranks")
    if topology is not None and topology.size != size:
        raise InvalidSize(f"the topology has {topology.size} ranks, the collective {size}")
    if not 0 <= root < size:
        raise InvalidRank(f"root {root} is not one of the ranks 0 … {size - 1}", rank=root)
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


def choose(collective: str, requested: str, nbytes: int, topology: Topology) -> str:
    """The algorithm to build: the requested one, or for "auto" the one that should be fastest.

    nbytes is the size of the whole array: all that a rank ends with, or for a reduction all that it brings.
    """
    known = algorithms(collective)
    if requested == "auto":
        return _fastest(collective, nbytes, topology)
    if requested not in known:
        raise _unsupported(collective, requested)
    if requested == "direct" and collective == "all_reduce" and _fits_one_shot(nbytes, topology.size):
        return "oneshot"
    return requested


def _fastest(collective: str, nbytes: int, topology: Topology) -> str:
    few, small = topology.size <= FEW_RANKS, nbytes <= SMALL_BYTES
    layered = len(topology.hosts) > 1 and len(topology.hosts) < topology.size
    match collective:
        case "all_reduce":
            if few and _fits_one_shot(nbytes, topology.size):
                return "oneshot"
            if small and not few:
                return "tree"
            return "hierarchical" if layered else _evenly_spread(nbytes, few)
        case "broadcast" | "reduce":
            if small:
                return "star" if few else "tree"
            return "hierarchical" if layered and collective == "broadcast" else "direct"
        case "all_gather" | "reduce_scatter":
            return _evenly_spread(nbytes, few)
    return "direct"  # one hop is the best way to gather, to scatter and to exchange


def _evenly_spread(nbytes: int, few: bool) -> str:
    if few:
        return "direct"
    return "halving" if nbytes < LARGE_BYTES else "ring"


def _fits_one_shot(nbytes: int, size: int) -> bool:
    return nbytes * size <= ONESHOT_BYTES


def _unsupported(collective: str, algorithm: str) -> UnsupportedOp:
    known = ", ".join(algorithms(collective))
    return UnsupportedOp(f"{collective} has no algorithm {algorithm!r}; it has: {known}", operation=collective)
