"""Hierarchical: few bytes between hosts, the rest inside them; hosts may have unequal numbers of ranks.

The segments are l columns of h, for h hosts of which the largest has l ranks. Each host deals the columns out to its
ranks; on a smaller host a rank owns several. A reduction folds each column inside each host (`direct`), then the owners
of a column on all hosts reduce it among themselves (`ring`, a segment for each host), then hosts gather inside
(`direct`). A broadcast deals the columns out on the root's host, their owners hand them to the owners on other hosts
(`direct`), then hosts gather inside. So a host sends to other hosts what one rank would if each host were one rank.

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
        # What is reduced between hosts is the partial results of the fold inside.
        grid.across(relabel(ring.all_reduce(len(topology.hosts), 0), buffers={"in": "acc"})),
        beside(*(grid.inside(host, _gathered(len(ranks))) for host, ranks in enumerate(topology.hosts))),
    )


def broadcast(topology: Topology, root: int) -> Phase:
    grid = _Grid(topology)
    home = topology.host_of(root)
    family = topology.hosts[home]
    return then(
        grid.inside(home, direct.hand_out(len(family), family.index(root))),
        grid.across(relabel(direct.broadcast(len(topology.hosts), home), buffers={"in": "out"})),
        beside(
            grid.inside(home, direct.complete(len(family), family.index(root))),
            *(grid.inside(host, _gathered(len(r))) for host, r in enumerate(topology.hosts) if host != home),
        ),
    )


def _gathered(size: int) -> Phase:
    return relabel(direct.all_gather(size, 0), buffers={"in": "out"})


class _Grid:
    """The columns of segments and who owns them: column c is segments c * h … c * h + h - 1."""

    def __init__(self, topology: Topology) -> None:
        self.hosts = topology.hosts
        self.columns = max(map(len, topology.hosts))
        self.segments = self.columns * len(topology.hosts)
        # The columns of the i-th rank of host h are deals[h][i] … deals[h][i + 1] - 1.
        self.deals = [[i * self.columns // len(r) for i in range(len(r) + 1)] for r in topology.hosts]

    def inside(self, host: int, phase: Phase) -> Phase:
        """A phase of a host's ranks, in which each rank's segment is all the columns that it owns."""
        bounds = [column * len(self.hosts) for column in self.deals[host]]
        return relabel(phase, ranks=self.hosts[host], bounds=bounds, segments=self.segments)

    def across(self, phase: Phase) -> Phase:
        """A phase of one rank per host and one segment per host, for each column at the same time."""
        return beside(*(self._across(column, phase) for column in range(self.columns)))

    def _across(self, column: int, phase: Phase) -> Phase:
        height = len(self.hosts)
        owners = [ranks[bisect_right(deal, column) - 1] for ranks, deal in zip(self.hosts, self.deals, strict=True)]
        bounds = range(column * height, (column + 1) * height + 1)
        return relabel(phase, ranks=owners, bounds=bounds, segments=self.segments)


PHASES: dict[str, Callable[[Topology, int], Phase]] = {"all_reduce": all_reduce, "broadcast": broadcast}
