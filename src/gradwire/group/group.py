"""Group: the ranks that talk, and everything they can say to each other."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from gradwire.arrays import Array, parse_dtype
from gradwire.collectives import COLLECTIVES, algorithms
from gradwire.errors import InvalidRank, InvalidSize, UnsupportedOp
from gradwire.generation.generation import Generation
from gradwire.group.collective_calls import CollectiveCalls
from gradwire.group.point_to_point import PointToPoint, PointToPointCalls
from gradwire.group.runner import CollectiveRunner
from gradwire.group.stream import Stream
from gradwire.liveness.verdict import Finding
from gradwire.operations import Capabilities
from gradwire.operations.types import check_rank
from gradwire.topology import Topology
from gradwire.transports.base import Link
from gradwire.transports.shm.shared_memory import SharedMemory
from gradwire.wire import fingerprint, group_identity

CONFER_SECONDS = 0.25  # that leaving `with group` may take to learn whether the last calls agreed
WORLD = 1
_NOTHING = np.dtype([])  # elements without a byte: NumPy says what it thinks of a shape, and takes no memory


def collective_channel(identity: int) -> int:
    """The channel of a group's collectives."""
    return fingerprint("collective", identity)


class Group(CollectiveCalls, PointToPointCalls):
    """Some ranks of a job that call collectives together; each has one order of calls, the program's.

    All collectives take `algorithm="auto"` (or star, ring, tree, halving, direct, hierarchical, where they exist) and
    `timeout=None` (the group's). What cannot be is refused before anything is sent, and the group goes on. An error
    that breaks the group (`PeerLost`, `CollectiveMismatch`, `Aborted`, a collective's `Timeout`) is raised on every
    rank and names the rank that caused it.

    >>> import gradwire as gw, numpy as np
    >>> with gw.init() as group:           # alone here; with RANK, WORLD_SIZE … one of many
    ...     group.rank, group.size, group.generation, group.topology.hosts
    ...     group.all_reduce(np.arange(3.0), op="mean")
    (0, 1, 1, ((0,),))
    array([0., 1., 2.])
    """

    def __init__(
        self,
        generation: Generation,
        members: Sequence[int],
        identity: int,
        timeout: float,
        links: Iterable[Link] = (),
    ) -> None:
        self._generation = generation
        self._members = tuple(members)
        self._identity = identity
        self._topology = _restricted(generation.identity.topology, self._members)
        channel = collective_channel(identity)
        runner = CollectiveRunner(generation, identity, channel, self._members, self._topology, timeout, links)
        CollectiveCalls.__init__(self, runner)
        PointToPointCalls.__init__(self, PointToPoint(generation, identity, runner.position.rank, self._members))
        self._subgroups: dict[tuple[int, ...], Group] = {}
        self._instances: dict[tuple[int, ...], int] = {}
        self._lock = threading.Lock()

    # -- who ----------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's number in the group, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._size

    @property
    def generation(self) -> int:
        """The number of the membership that this group belongs to; the first is 1."""
        return self._generation.identity.number

    @property
    def topology(self) -> Topology:
        """Which of the group's ranks share a host."""
        return self._topology

    @property
    def capabilities(self) -> Capabilities:
        """What this group can do."""
        table = {name: algorithms(name) for name in COLLECTIVES}
        generation = self._generation
        sharing = self.size > 1 and len(self.topology.hosts) == 1 and all(map(generation.shares, self._members))
        transport = "shm" if sharing else generation.transport.name
        return Capabilities(
            transport,
            self._runner.links.is_native,
            generation.shared is not None,
            generation.membership is not None,
            table,
        )

    @property
    def bytes_sent(self) -> int:
        """How many bytes this rank has sent to others in this group's collectives so far.

        What goes over sockets counts with its headers, what goes through memory as it is, each as often as it has
        receivers.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group:
        ...     group.all_reduce(np.ones(1000)).size, group.bytes_sent   # nobody else is here
        (1000, 0)
        """
        return self._runner.bytes_sent

    def __repr__(self) -> str:
        return f"<gradwire.Group {self._runner}>"

    # -- beginning and end --------------------------------------------------------------------------------------------

    @property
    def _closed(self) -> bool:
        return self._runner.closed or self._generation.failure.closed

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unseen = None
        if error is not None and self._generation.control.sound and not self._closed:
            self.abort(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        elif error is None and self.size > 1 and not self._closed:
            self._generation.control.confer(self._runner.calls, time.monotonic(), CONFER_SECONDS)
            unseen = self._generation.failure.take_unseen_mismatch()
        self.close()
        if unseen is not None:
            raise unseen

    def close(self) -> None:
        """Say goodbye and let go of all links; idempotent. Others learn of it only if they still need this rank.

        Works that still wait end with `Closed`. Its subgroups end with the group.

        >>> import gradwire as gw
        >>> group = gw.init()
        >>> group.close(); group.close()
        """
        self._end_subgroups()
        self._runner.close()
        if self._identity == WORLD:
            self._generation.close()

    def _end_subgroups(self) -> None:
        for subgroup in list(self._subgroups.values()):
            subgroup.close()

    def abort(self, reason: str) -> None:
        """Break the group on every rank of the job with `Aborted`, giving the reason; idempotent.

        >>> import gradwire as gw
        >>> one, two = gw.loopback_pair()
        >>> one.abort("the loss is not a number")
        >>> try: two.barrier()
        ... except gw.Aborted as error: error.culprit
        0
        >>> one.close(); two.close()
        """
        if self._closed or not self._generation.control.sound:
            return
        finding = Finding("aborted", str(reason)[:2000], self._generation.identity.rank)
        self._generation.control.report(finding, time.monotonic())
        self._generation.service.wake()

    def recover(self, timeout: float | None = None) -> Group:
        """The next generation's group, after a break: of all members that are left, and those that wait to join.

        Needs an elastic job: `gradwire run --min … --max …`, or a coordinator of one's own. Where nothing is broken,
        all members call it together, to let others join. This group, its subgroups and streams end. While fewer
        members are there than the job needs it waits, and says so in the log.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.capabilities.recovers
        False
        """
        generation = self._generation
        if generation.membership is None:
            raise UnsupportedOp(
                "this job's membership is fixed, so it cannot go on without a lost rank: start it again, with "
                "`gradwire run --min … --max …` (or `gradwire coordinator` and GRADWIRE_ELASTIC=1)",
                operation="recover",
            )
        self._end_subgroups()
        successor: Group = generation.membership.next_group(generation, self._seconds(timeout))
        return successor

    # -- more -------------------------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        """A queue of collectives that run beside the program, in the order they were called.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().all_reduce(np.ones(2)).wait()
        array([1., 1.])
        """
        return Stream(self._runner)

    def subgroup(self, ranks: Iterable[int]) -> Group:
        """The group of some of these ranks, numbered anew in ascending order; only they call it. Made once and kept.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.subgroup([0]) is group.subgroup([0])
        True
        """
        wanted = self._chosen(ranks)
        self._runner.check("subgroup")
        with self._lock:
            known = self._subgroups.get(wanted)
            if known is not None and not known._closed:
                return known
            instance = self._instances[wanted] = self._instances.get(wanted, 0) + 1
            group = self._subgroups[wanted] = self._form(wanted, instance, self._runner.timeout)
            return group

    def _form(self, ranks: Sequence[int], instance: int, timeout: float) -> Group:
        """A group of these ranks in this order, told by its instance from others of the same ranks."""
        self._runner.check("subgroup")
        identity = group_identity(self._identity, ranks, instance)
        group = Group(self._generation, [self._members[rank] for rank in ranks], identity, timeout)
        try:
            group._runner.links.dial(time.monotonic() + max(timeout, self._runner.timeout))
        except BaseException:
            group.close()
            raise
        return group

    def _chosen(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The ranks of a subgroup, sorted, if they can be one of which this rank is a member."""
        try:
            wanted = tuple(sorted(check_rank(rank, self.size) for rank in ranks))
        except TypeError:
            raise InvalidRank(f"ranks {ranks!r} is not a sequence of ranks") from None
        if not wanted:
            raise InvalidSize("a subgroup needs at least one rank")
        if len(set(wanted)) != len(wanted):
            raise InvalidRank(f"ranks {list(wanted)} name a rank twice")
        if self.rank not in wanted:
            raise InvalidRank(f"rank {self.rank} is not a member of the subgroup {list(wanted)}", rank=self.rank)
        return wanted

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> Array:
        """An uninitialised array that this group exchanges best: in memory that its ranks share, if they share any.

        It is an array like any other, and its memory is free again when the last view of it is gone.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.empty((2, 3), "bfloat16").nbytes
        12
        """
        return _empty(shape, dtype, None if self._closed else self._generation.shared)


def _restricted(topology: Topology, members: Sequence[int]) -> Topology:
    return Topology.of([str(topology.host_of(world)) for world in members])


def _empty(shape: int | tuple[int, ...], dtype: Any, shared: SharedMemory | None) -> Array:
    """An uninitialised array, in shared memory if there is any."""
    row = parse_dtype(dtype)
    if shape is None:  # which NumPy used to take for ()
        raise InvalidSize("no array of shape None")
    try:
        lengths = np.empty(shape, _NOTHING).shape
        nbytes = math.prod(lengths) * row.storage.itemsize
        if shared is not None and nbytes:
            with contextlib.suppress(MemoryError):  # the arena is full: any memory will do
                return shared.own.array(nbytes).view(row.storage).reshape(lengths)
        return np.empty(shape, row.storage)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise InvalidSize(f"no array of shape {shape!r}: {error}") from error
