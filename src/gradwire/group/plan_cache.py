"""The plans of a group: for each shape of call, the schedule with the lowest cost, bound to this rank, and cached."""

from __future__ import annotations

from collections import OrderedDict

from gradwire.collectives import build, choose, prove_once
from gradwire.executors.plan import Plan, even_bounds, ragged_bounds
from gradwire.generation.generation import Generation
from gradwire.liveness.call_log import CallDescription
from gradwire.operations import Position, Shape
from gradwire.topology import Topology
from gradwire.wire import fingerprint

MAX_PLANS = 256  # per group


class PlanCache:
    """The most recently used plans of one rank in one group."""

    def __init__(
        self, generation: Generation, topology: Topology, at: Position, hosts_share: bool, tile_bytes: int | None
    ) -> None:
        """`hosts_share`: whether ranks of the same host share memory, on all hosts. `tile_bytes`: the tile size of
        plans; None selects the default, which suits sockets."""
        self._generation = generation
        self._topology = topology
        self._at = at
        self._host_transport = "shm" if hosts_share else generation.transport.name
        self._tile_bytes = tile_bytes
        self._plans: OrderedDict[Shape, Plan] = OrderedDict()  # least recently used first

    def find(self, shape: Shape) -> Plan | None:
        """Return the cached plan of this shape, or None."""
        plan = self._plans.get(shape)
        if plan is not None:
            self._plans.move_to_end(shape)
        return plan

    def make(self, shape: Shape) -> Plan:
        """Make and cache a plan with the algorithm that the shape names or, for "auto", the cheapest one."""
        dtype, counts = shape.dtype, shape.counts
        total = (counts if isinstance(counts, int) else sum(counts)) * dtype.itemsize
        table = self._generation.table
        algorithm = choose(shape.collective, shape.algorithm, total, self._topology, table, self._host_transport)
        schedule = build(shape.collective, algorithm, self._at.size, topology=self._topology, root=shape.root or 0)
        prove_once(schedule)
        if isinstance(counts, int):
            bounds = even_bounds(counts, schedule.segments, dtype.itemsize)
        else:
            bounds = ragged_bounds(counts)
        plan = Plan(schedule, self._at.rank, dtype, shape.op, bounds, _description(shape, algorithm), self._tile_bytes)
        self._plans[shape] = plan
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return plan


def _description(shape: Shape, algorithm: str) -> CallDescription:
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
