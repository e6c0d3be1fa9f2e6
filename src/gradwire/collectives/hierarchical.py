"""The hierarchical algorithm: few bytes between hosts, the rest inside hosts. Hosts may have different sizes.

There are h hosts, and the largest has l ranks. The segments form l columns of h segments. Each host assigns all columns
to its ranks, so a rank of a smaller host owns several columns.

A reduction has three phases. Each host folds each column (`direct`). The owners of a column on all hosts reduce it
among themselves (`ring`, one segment for each host). Each host gathers the columns (`direct`). A broadcast first
scatters the columns on the root's host. Their owners send them to the owners on the other hosts (`direct`), and each
host gathers. So a host sends as many bytes to other hosts as a single rank would if each host had one rank.

With h hosts of l ranks each, in units of S, the bytes of the whole array:

| collective | rounds                    | most sent by a rank   | most received by a rank |
|------------|---------------------------|-----------------------|-------------------------|
| all_reduce | 2 * (h - 1) + 2 * (l > 1) | 2 * (1 - 1 / (h * l)) | 2 * (1 - 1 / (h * l))   |
| broadcast  | 2 * (h > 1) + 2 * (l > 1) | 2 * (1 - 1 / (h * l)) | 1 * (h * l > 1)         |
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from gradwire.collectives import direct, ring
from gradwire.collectives.combine import beside, relabel, then
from gradwire.collectives.schedule import Phase
from gradwire.topology import Topology


def all_reduce(topology: Topology, root: int) -> Phase:
    grid = _Grid(topology)
    return then(
        beside(*(grid.inside(host, direct.fold_own(len(ranks))) for host, ranks in enumerate(topology.hosts))),
        # The inputs of the reduction between hosts are the partial results of the fold inside hosts.
        grid.across(relabel(ring.all_reduce(len(topology.hosts), 0), buffers={"in": "acc"})),
        beside(*(grid.inside(host, _gather_results(len(ranks))) for host, ranks in enumerate(topology.hosts))),
    )


def broadcast(topology: Topology, root: int) -> Phase:
    grid = _Grid(topology)
    root_host = topology.host_of(root)
    ranks = topology.hosts[root_host]
    return then(
        grid.inside(root_host, direct.scatter_segments(len(ranks), ranks.index(root))),
        grid.across(relabel(direct.broadcast(len(topology.hosts), root_host), buffers={"in": "out"})),
        beside(
            grid.inside(root_host, direct.share_segments(len(ranks), ranks.index(root))),
            *(grid.inside(host, _gather_results(len(r))) for host, r in enumerate(topology.hosts) if host != root_host),
        ),
    )


def _gather_results(size: int) -> Phase:
    return relabel(direct.all_gather(size, 0), buffers={"in": "out"})


class _Grid:
    """The columns of segments and their owners: column c is the segments c * h … c * h + h - 1."""

    def __init__(self, topology: Topology) -> None:
        self.hosts = topology.hosts
        self.columns = max(map(len, topology.hosts))
        self.segments = self.columns * len(topology.hosts)
        # The columns of the i-th rank of host h are bounds[h][i] … bounds[h][i + 1] - 1.
        self.bounds = [[i * self.columns // len(r) for i in range(len(r) + 1)] for r in topology.hosts]

    def inside(self, host: int, phase: Phase) -> Phase:
        """Return a phase of a host's ranks, in which the segment of a rank is all columns that it owns."""
        bounds = [column * len(self.hosts) for column in self.bounds[host]]
        return relabel(phase, ranks=self.hosts[host], bounds=bounds, segments=self.segments)

    def across(self, phase: Phase) -> Phase:
        """Return a phase of one rank and one segment per host, for all columns at the same time."""
        return beside(*(self._across(column, phase) for column in range(self.columns)))

    def _across(self, column: int, phase: Phase) -> Phase:
        height = len(self.hosts)
        hosts = zip(self.hosts, self.bounds, strict=True)
        owners = [ranks[bisect_right(starts, column) - 1] for ranks, starts in hosts]
        bounds = range(column * height, (column + 1) * height + 1)
        return relabel(phase, ranks=owners, bounds=bounds, segments=self.segments)


PHASES: dict[str, Callable[[Topology, int], Phase]] = {"all_reduce": all_reduce, "broadcast": broadcast}
