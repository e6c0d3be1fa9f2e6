"""The plans of a group: a schedule chosen by price for each shape of call and bound to this rank; the last ones are
cached."""

from __future__ import annotations

from collections import OrderedDict

from gradwire.collectives import build, choose, prove_once
from gradwire.executors.plan import Plan, even_bounds, ragged_bounds
from gradwire.generation.generation import Generation
from gradwire.liveness.call_log import CallDescription
from gradwire.operations import Position, Shape
from gradwire.topology import Topology
from gradwire.wire import fingerprint

KEPT = 256  # per group


class PlanCache:
    """The plans of one rank in one group, the last ones used."""

    def __init__(
        self, generation: Generation, topology: Topology, at: Position, hosts_share: bool, tile_bytes: int | None
    ) -> None:
        """`hosts_share`: whether ranks of the same host share memory, on all hosts. `tile_bytes`: None is best for
        sockets."""
        self._generation = generation
        self._topology = topology
        self._at = at
        self._inside = "shm" if hosts_share else generation.transport.name
        self._tile_bytes = tile_bytes
        self._kept: OrderedDict[Shape, Plan] = OrderedDict()

    def find(self, shape: Shape) -> Plan | None:
        """A plan that was made before."""
        plan = self._kept.get(shape)
        if plan is not None:
            self._kept.move_to_end(shape)
        return plan

    def make(self, shape: Shape) -> Plan:
        """A new one, by the algorithm that costs least."""
        dtype, counts = shape.dtype, shape.counts
        total = (counts if isinstance(counts, int) else sum(counts)) * dtype.itemsize
        table = self._generation.table
        algorithm = choose(shape.collective, shape.algorithm, total, self._topology, table, self._inside)
        schedule = build(shape.collective, algorithm, self._at.size, topology=self._topology, root=shape.root or 0)
        prove_once(schedule)
        if isinstance(counts, int):
            bounds = even_bounds(counts, schedule.segments, dtype.itemsize)
        else:
            bounds = ragged_bounds(counts)
        plan = Plan(schedule, self._at.rank, dtype, shape.op, bounds, _meaning(shape, algorithm), self._tile_bytes)
        self._kept[shape] = plan
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return plan


def _meaning(shape: Shape, algorithm: str) -> CallDescription:
    call = shape.call
    operation = call.partition("(")[0] or shape.collective
    if not call:
        counts = shape.counts if isinstance(shape.counts, int) else ", ".join(map(str, shape.counts))
        call = f"{shape.collective}({shape.dtype.name}[{counts}]"
        call += f", op={shape.op!r}" if shape.op else ""
        call += f", root={shape.root}" if shape.root is not None else ""
        call += f", algorithm={shape.algorithm!r})" if shape.algorithm != "auto" else ")"
    print64 = fingerprint(
        shape.collective, shape.dtype.name, shape.counts, shape.op, shape.root, algorithm, shape.call, shape.items
    )
    return CallDescription(operation, call, print64, shape.items)
