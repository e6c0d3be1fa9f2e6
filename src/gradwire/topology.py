"""Defines `Topology`, which ranks share a host, and formats lists of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gradwire.errors import ConfigError, InvalidRank, InvalidSize


@dataclass(frozen=True)
class Topology:
    """The ranks of a group by host: each host's ranks in order, hosts in the order of their lowest rank.

    Equal topologies compare and hash equal on every rank. The plan cache uses them as keys.
    """

    hosts: tuple[tuple[int, ...], ...]
    _host: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.hosts or not all(self.hosts):
            raise InvalidSize("a topology needs at least one host, and each host at least one rank")
        placed = {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks}
        size = sum(map(len, self.hosts))
        if placed.keys() != set(range(size)):
            raise ConfigError(f"the hosts {self.hosts} do not hold each rank of 0 … {size - 1} once")
        if self.hosts != tuple(sorted(tuple(sorted(ranks)) for ranks in self.hosts)):
            raise ConfigError(f"the hosts {self.hosts} are not ordered by their ranks")
        object.__setattr__(self, "_host", tuple(placed[rank] for rank in range(size)))

    @classmethod
    def single(cls, size: int) -> Topology:
        """Return the topology with all ranks on one host.

        >>> Topology.single(3).hosts
        ((0, 1, 2),)
        """
        if size < 1:
            raise InvalidSize(f"a topology of {size} ranks")
        return cls((tuple(range(size)),))

    @classmethod
    def of(cls, host_names: Sequence[str]) -> Topology:
        """Return the topology for the names of the ranks' hosts, in rank order. Equal names are one host.

        >>> Topology.of(["a", "b", "a"]).hosts
        ((0, 2), (1,))
        """
        hosts: dict[str, list[int]] = {}
        for rank, name in enumerate(host_names):
            hosts.setdefault(name, []).append(rank)
        return cls(tuple(map(tuple, hosts.values())))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._host)

    def host_of(self, rank: int) -> int:
        """Return the index in `hosts` of the host that has this rank.

        >>> Topology.of(["a", "b", "a"]).host_of(2)
        0
        """
        if not 0 <= rank < self.size:
            raise InvalidRank(f"rank {rank} is not one of 0 … {self.size - 1}", rank=rank, size=self.size)
        return self._host[rank]


def rank_ranges(ranks: Iterable[int]) -> str:
    """Ranks as people write them: three or more in a row are a range.

    >>> rank_ranges([3, 2, 0]), rank_ranges([0, 1, 2, 3, 4, 6, 7])
    ('0, 2, 3', '0-4, 6, 7')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
