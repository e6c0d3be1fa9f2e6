"""Predicts the seconds that a schedule takes, from the cost of a round, a message and a byte on the links it uses.

The model is plain on purpose: it has to rank algorithms, not to foretell times. Rounds follow one another, a round
lasts as long as its busiest rank or wire, and the ranks of a host share one wire to other hosts. A round that uses two
kinds of links waits for the slower one. Ranks that outnumber the cores, and tiles that overlap, are not in it.
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
"""So many ranks of a host are looked at: those in between do what their neighbours do."""


@dataclass(frozen=True)
class Constants:
    """What things cost on one kind of link, in seconds."""

    round: float
    """Until what was sent arrives, however small."""
    message: float
    """Each message that a rank sends or receives."""
    staged: float
    """Each byte that a rank sends, however many ranks it is for."""
    sent: float
    """Each byte for each rank that it is sent to."""
    received: float
    """Each byte that arrives."""
    folded: float
    """Each byte that is folded as it arrives, besides."""


@dataclass(frozen=True)
class Table:
    """Constants by kind of link: memory that ranks of a host share, sockets inside a host, sockets between hosts."""

    shm: Constants
    tcp: Constants
    net: Constants

    def inside(self, transport: str) -> Constants:
        """Those of the links that a transport makes inside a host."""
        return self.shm if transport == "shm" else self.tcp


DEFAULTS = Table(
    shm=Constants(round=0.3e-6, message=0.1e-6, staged=0.08e-9, sent=0.0, received=0.1e-9, folded=0.01e-9),
    tcp=Constants(round=12e-6, message=1e-6, staged=0.0, sent=0.35e-9, received=0.3e-9, folded=0.1e-9),
    net=Constants(round=25e-6, message=1e-6, staged=0.0, sent=0.8e-9, received=0.3e-9, folded=0.1e-9),
)
"""Of the native core with spinning ranks; `net` is a network of 10 Gbit/s."""


class Load(NamedTuple):
    """What one rank has to do in one round on one kind of link; bytes are in units of the whole array."""

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
    """A rank's round: on the links inside its host, and on those to other hosts."""

    inside: Load
    between: Load


Bill = tuple[tuple[int, tuple[Loads, ...]], ...]
"""Different rounds, how often each occurs, and what the ranks that were looked at have to do in it."""


def price(schedule: Schedule, topology: Topology, nbytes: int, inside: Constants, between: Constants) -> float:
    """Seconds for an array of so many bytes.

    >>> from gradwire.collectives import build
    >>> oneshot = build("all_reduce", "oneshot", 2)
    >>> seconds = price(oneshot, Topology.single(2), 1000, DEFAULTS.shm, DEFAULTS.net)
    >>> round(seconds * 1e9)  # 300 for the round, 200 for a message each way, 190 for the bytes
    690
    """
    return sum(times * _round_price(loads, nbytes, inside, between) for times, loads in bill(schedule, topology))


def _round_price(loads: tuple[Loads, ...], nbytes: int, inside: Constants, between: Constants) -> float:
    latency = max(
        inside.round if any(load.inside.messages for load in loads) else 0.0,
        between.round if any(load.between.messages for load in loads) else 0.0,
    )
    return latency + max(load.inside.seconds(nbytes, inside) + load.between.seconds(nbytes, between) for load in loads)


@lru_cache(maxsize=512)
def bill(schedule: Schedule, topology: Topology) -> Bill:
    """Counted once for each schedule, from the programs of a few ranks: those of the hosts that may have most to do."""
    rounds: list[set[Loads]] = [set() for _ in range(schedule.rounds)]
    for host in _telling_hosts(topology):
        for i, loads in enumerate(_host_loads(schedule, topology, host)):
            rounds[i].update(loads)
    busy = Counter(tuple(sorted(loads)) for loads in rounds if any(any(load.inside + load.between) for load in loads))
    return tuple((times, loads) for loads, times in busy.items())


def _telling_hosts(topology: Topology) -> set[int]:
    """The first, which has the root, the last, the smallest and the largest."""
    sizes = [len(ranks) for ranks in topology.hosts]
    return {0, len(sizes) - 1, sizes.index(min(sizes)), sizes.index(max(sizes))}


def _host_loads(schedule: Schedule, topology: Topology, host: int) -> Iterator[list[Loads]]:
    """What the ranks of a host do, round by round, and what its wire to other hosts does."""
    whole = schedule.size if schedule.collective == "all_to_all" else schedule.segments
    family = frozenset(topology.hosts[host])
    sample = _sample(topology.hosts[host])
    # Not `schedule.program`, which would keep them all.
    programs = [schedule.phase.program(rank) for rank in sample]
    for ops_by_rank in zip(*programs, strict=True):
        inside = [_load(ops, family.__contains__, whole) for ops in ops_by_rank]
        if len(topology.hosts) == 1:
            yield [Loads(load, Load()) for load in inside]
            continue
        between = [_load(ops, lambda peer: peer not in family, whole) for ops in ops_by_rank]
        wire = sum(load.sent * weight for load, weight in zip(between, sample.values(), strict=True))
        yield [*map(Loads, inside, between), Loads(Load(), Load(sent=wire))]


def _sample(ranks: tuple[int, ...]) -> dict[int, float]:
    """Ranks, and for how many each of them stands. The first and the last, who may be special, stand for themselves."""
    if len(ranks) <= SAMPLE:
        return dict.fromkeys(ranks, 1.0)
    chosen = [ranks[i * (len(ranks) - 1) // (SAMPLE - 1)] for i in range(SAMPLE)]
    weights = dict.fromkeys(chosen, (len(ranks) - 2) / (SAMPLE - 2))
    return weights | {ranks[0]: 1.0, ranks[-1]: 1.0}


def _load(ops: Round, counted: Callable[[int], bool], whole: int) -> Load:
    """What is exchanged with the peers that count."""
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
