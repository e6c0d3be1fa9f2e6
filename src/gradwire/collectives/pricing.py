"""Predicts the seconds that a schedule takes, from the cost of a round, a message and a byte on the links that it uses.

The model is simple on purpose: it has to order algorithms by speed, not to predict exact times. Rounds do not overlap.
A round takes as long as its busiest rank or network link, and the ranks of a host share one link to other hosts. A
round that uses two kinds of links waits for the slower one. The model ignores that there may be more ranks than cores,
and that the tiles of a call overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gradwire.collectives.schedule import Fold, From, Recv, Round, Schedule, Send
from gradwire.topology import Topology

SAMPLE = 8
"""The number of ranks of a host whose programs are counted. The other ranks do the same as their neighbours."""


@dataclass(frozen=True)
class Constants:
    """The costs of one kind of link, in seconds."""

    round: float
    """The latency of a message of any size."""
    message: float
    """For each message that a rank sends or receives."""
    staged: float
    """For each byte that a rank sends, counted once for any number of receivers."""
    sent: float
    """For each byte that a rank sends, counted for each receiver."""
    received: float
    """For each byte that a rank receives."""
    folded: float
    """For each received byte that is folded, in addition to `received`."""


@dataclass(frozen=True)
class Table:
    """Costs by kind of link: shared memory inside a host, sockets inside a host, sockets between hosts."""

    shm: Constants
    tcp: Constants
    net: Constants

    def inside(self, transport: str) -> Constants:
        """Return the costs of links inside a host, for this transport."""
        return self.shm if transport == "shm" else self.tcp


DEFAULTS = Table(
    shm=Constants(round=0.3e-6, message=0.1e-6, staged=0.08e-9, sent=0.0, received=0.1e-9, folded=0.01e-9),
    tcp=Constants(round=12e-6, message=1e-6, staged=0.0, sent=0.35e-9, received=0.3e-9, folded=0.1e-9),
    net=Constants(round=25e-6, message=1e-6, staged=0.0, sent=0.8e-9, received=0.3e-9, folded=0.1e-9),
)
"""Costs of the native core with ranks that spin while they wait; `net` is a network of 10 Gbit/s."""


class Load(NamedTuple):
    """The messages and bytes of one rank in one round on one kind of link. Bytes are in units of the whole array."""

    messages: float = 0
    staged: float = 0
    sent: float = 0
    received: float = 0
    folded: float = 0

    def seconds(self, nbytes: int, constants: Constants) -> float:
        per_byte = (
            self.staged * constants.staged
            + self.sent * constants.sent
            + self.received * constants.received
            + self.folded * constants.folded
        )
        return self.messages * constants.message + nbytes * per_byte


class Loads(NamedTuple):
    """The loads of one rank in one round: on the links inside its host, and on the links to other hosts."""

    inside: Load
    between: Load


RoundLoads = tuple[tuple[int, tuple[Loads, ...]], ...]
"""The distinct rounds of a schedule: how often each occurs, and the loads of the counted ranks in it."""


def price(schedule: Schedule, topology: Topology, nbytes: int, inside: Constants, between: Constants) -> float:
    """Return the predicted seconds of a schedule for an array of `nbytes`.

    >>> from gradwire.collectives import build
    >>> oneshot = build("all_reduce", "oneshot", 2)
    >>> seconds = price(oneshot, Topology.single(2), 1000, DEFAULTS.shm, DEFAULTS.net)
    >>> round(seconds * 1e9)  # 300 for the round, 200 for a message each way, 190 for the bytes
    690
    """
    rounds = round_loads(schedule, topology)
    return sum(times * _round_price(loads, nbytes, inside, between) for times, loads in rounds)


def _round_price(loads: tuple[Loads, ...], nbytes: int, inside: Constants, between: Constants) -> float:
    latency = max(
        inside.round if any(load.inside.messages for load in loads) else 0.0,
        between.round if any(load.between.messages for load in loads) else 0.0,
    )
    return latency + max(load.inside.seconds(nbytes, inside) + load.between.seconds(nbytes, between) for load in loads)


@lru_cache(maxsize=512)
def round_loads(schedule: Schedule, topology: Topology) -> RoundLoads:
    """Count the loads of a schedule, once for each schedule, from a few ranks of the hosts that may be the busiest."""
    rounds: list[set[Loads]] = [set() for _ in range(schedule.rounds)]
    for host in _representative_hosts(topology):
        for i, loads in enumerate(_host_loads(schedule, topology, host)):
            rounds[i].update(loads)
    busy = Counter(tuple(sorted(loads)) for loads in rounds if any(any(load.inside + load.between) for load in loads))
    return tuple((times, loads) for loads, times in busy.items())


def _representative_hosts(topology: Topology) -> set[int]:
    """Return the first host, which has the root, the last, the smallest and the largest."""
    sizes = [len(ranks) for ranks in topology.hosts]
    return {0, len(sizes) - 1, sizes.index(min(sizes)), sizes.index(max(sizes))}


def _host_loads(schedule: Schedule, topology: Topology, host: int) -> Iterator[list[Loads]]:
    """Yield, for each round, the loads of the ranks of a host and of its network link to other hosts."""
    whole = schedule.size if schedule.collective == "all_to_all" else schedule.segments
    host_ranks = frozenset(topology.hosts[host])
    sample = _sample(topology.hosts[host])
    # Not `schedule.program`, which would cache all of them.
    programs = [schedule.phase.program(rank) for rank in sample]
    for ops_by_rank in zip(*programs, strict=True):
        inside = [_load(ops, host_ranks.__contains__, whole) for ops in ops_by_rank]
        if len(topology.hosts) == 1:
            yield [Loads(load, Load()) for load in inside]
            continue
        between = [_load(ops, lambda peer: peer not in host_ranks, whole) for ops in ops_by_rank]
        network = sum(load.sent * weight for load, weight in zip(between, sample.values(), strict=True))
        yield [*map(Loads, inside, between), Loads(Load(), Load(sent=network))]


def _sample(ranks: tuple[int, ...]) -> dict[int, float]:
    """Return sample ranks, with the number of ranks that each represents.

    The first and the last rank may have special programs, so they represent only themselves.
    """
    if len(ranks) <= SAMPLE:
        return dict.fromkeys(ranks, 1.0)
    chosen = [ranks[i * (len(ranks) - 1) // (SAMPLE - 1)] for i in range(SAMPLE)]
    weights = dict.fromkeys(chosen, (len(ranks) - 2) / (SAMPLE - 2))
    return weights | {ranks[0]: 1.0, ranks[-1]: 1.0}


def _load(ops: Round, counted: Callable[[int], bool], whole: int) -> Load:
    """Return the load of a round with those peers for which `counted` is true."""
    messages = staged = sent = received = folded = 0
    for op in ops:
        match op:
            case Send(piece, to):
                peers = sum(map(counted, to))
                messages += peers
                staged += piece.count * bool(peers)
                sent += piece.count * peers
            case Recv(piece, source) if counted(source):
                messages += 1
                received += piece.count
            case Fold(dst, terms):
                arriving = sum(isinstance(term, From) and counted(term.rank) for term in terms)
                messages += arriving
                received += dst.count * arriving
                folded += dst.count * arriving
    return Load(messages, staged / whole, sent / whole, received / whole, folded / whole)
