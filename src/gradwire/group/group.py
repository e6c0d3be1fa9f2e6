"""`Group`: the ranks that communicate, with the collectives and the point-to-point calls between them."""

from __future__ import annotations

import contextlib
import itertools
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
from gradwire.group.point_to_point import PointToPoint
from gradwire.group.point_to_point_calls import PointToPointCalls
from gradwire.group.runner import CollectiveRunner
from gradwire.group.stream import Stream
from gradwire.liveness.verdict import Finding
from gradwire.operations import Capabilities
from gradwire.operations.types import check_rank
from gradwire.topology import Topology
from gradwire.transports.base import Link
from gradwire.transports.shm.shared_memory import SharedMemory
from gradwire.wire import fingerprint, group_identity

COMPARE_SECONDS = 0.25  # longest delay at the end of `with group`, to compare the last calls of all ranks
WORLD = 1
_NOTHING = np.dtype([])  # its elements have 0 bytes: NumPy validates a shape without allocating memory


def collective_channel(identity: int) -> int:
    """Return the channel on which a group's collectives run."""
    return fingerprint("collective", identity)


class Group(CollectiveCalls, PointToPointCalls):
    """The ranks of a job, or some of them, that communicate with each other.

    `gw.init` returns the group of all ranks; `subgroup` makes smaller ones. Leaving `with group:` closes the group. If
    an exception leaves the block, the group is aborted first, so that no other rank waits for this one.

    Collectives (`all_reduce`, `broadcast`, `barrier` …) must be called by all ranks of the group, in the same order and
    with matching arguments. A group has one order of calls, the order of the program: calls made here and calls queued
    on a `Stream` run one at a time in that order. Point-to-point calls (`send`, `recv`, `sendrecv`, `copy`) are outside
    of that order, and are matched by peer and tag. Any thread may make calls.

    Arrays can be NumPy arrays, CPU tensors of any library that supports DLPack (torch, JAX …), and objects with the
    buffer protocol. They may be strided.

    Two kinds of errors are raised:

    - Wrong arguments (`ConfigError`, `ArrayError`, `UnsupportedOp`) are found before anything is sent. The group stays
      usable.
    - `Broken` and its subclasses break the group on every rank: `PeerLost` (a rank died or cannot be reached),
      `CollectiveMismatch` (ranks called different things), `Aborted` (a rank gave up), and `GroupTimeout` (a collective
      took too long). Every rank raises the same error, and `error.culprit` is the rank that caused it. In an elastic
      job `recover` returns a new group. The plain `Timeout` of `send`, `recv`, `Work.wait` or `Stream.synchronize` does
      not break the group.

    After `close`, calls raise `Closed`.

    >>> import gradwire as gw, numpy as np
    >>> with gw.init() as group:           # a job of one rank, unless RANK, WORLD_SIZE … say otherwise
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

    # -- identity -----------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of this process in the group, from 0 to `size - 1`."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self._size

    @property
    def local_rank(self) -> int:
        """The number of this rank among the ranks of the group on its host, from 0 to `local_size - 1`."""
        return self._neighbours.index(self._rank)

    @property
    def local_size(self) -> int:
        """The number of ranks of the group on this host."""
        return len(self._neighbours)

    @property
    def node_rank(self) -> int:
        """The number of this host among the hosts of the group, from 0, in the order of their lowest ranks."""
        return self._topology.host_of(self._rank)

    @property
    def _neighbours(self) -> tuple[int, ...]:
        return self._topology.hosts[self.node_rank]

    @property
    def generation(self) -> int:
        """The number of the membership that this group belongs to. It starts at 1 and grows with each recovery."""
        return self._generation.identity.number

    @property
    def topology(self) -> Topology:
        """Which ranks of the group share a host, as a `Topology`."""
        return self._topology

    @property
    def capabilities(self) -> Capabilities:
        """What this group can do: transport, algorithms, dtypes, recovery. See `Capabilities`."""
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
        """The number of bytes that this rank has sent to other ranks in this group's collectives so far.

        Data sent over sockets counts with its headers. Data sent through shared memory counts without headers, once
        for each receiver.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group:
        ...     group.all_reduce(np.ones(1000)).size, group.bytes_sent   # a job of one rank sends nothing
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
        if error is not None and self._generation.control.intact and not self._closed:
            self.abort(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        elif error is None and self.size > 1 and not self._closed:
            self._generation.control.compare_calls(self._runner.calls, time.monotonic(), COMPARE_SECONDS)
            unseen = self._generation.failure.take_unseen_mismatch()
        self.close()
        if unseen is not None:
            raise unseen

    def close(self) -> None:
        """Close the links of this group and of its subgroups. Calling it again has no effect.

        Works that have not run yet fail with `Closed`. Another rank notices the closing only if it still needs this
        rank: its call then raises `PeerLost`. A process that exits normally closes its groups automatically.

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
        """Break this group, and all groups of the job, on every rank. Later and waiting calls raise `Aborted`.

        Aborting a group that is closed or broken has no effect.

        Args:
            reason: The text that the error shows on every rank. Text beyond 2000 characters is cut off.

        >>> import gradwire as gw
        >>> one, two = gw.loopback_pair()
        >>> one.abort("the loss is not a number")
        >>> try: two.barrier()
        ... except gw.Aborted as error: error.culprit
        0
        >>> one.close(); two.close()
        """
        if self._closed or not self._generation.control.intact:
            return
        finding = Finding("aborted", str(reason)[:2000], self._generation.identity.rank)
        self._generation.control.report(finding, time.monotonic())
        self._generation.service.wake()

    def recover(self, timeout: float | None = None) -> Group:
        """Return the group of the next generation: the members that are left, and those that are waiting to join.

        Every surviving member calls this after the group broke. Members can also call it together while the group
        works, to let waiting members join. This group, its subgroups and its streams are closed. While the job has
        fewer members than it needs, the call waits and logs the reason.

        Recovery needs an elastic job: `gradwire run --min … --max …`, or `gradwire coordinator` and GRADWIRE_ELASTIC=1.

        Args:
            timeout: Seconds that the call may take. None means the group's timeout.

        Raises:
            UnsupportedOp: The membership of this job is fixed; `capabilities.recovers` is False.
            Timeout: No next generation was formed in time.
            NoConnection: The coordinator cannot be reached.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.capabilities.recovers
        False
        """
        generation = self._generation
        if generation.membership is None:
            raise UnsupportedOp(
                "this job has a fixed membership, so it cannot continue without a lost rank: start it again as an "
                "elastic job, with `gradwire run --min … --max …` (or `gradwire coordinator` and GRADWIRE_ELASTIC=1)",
                operation="recover",
            )
        self._end_subgroups()
        successor: Group = generation.membership.next_group(generation, self._seconds(timeout))
        return successor

    # -- streams, subgroups, memory -----------------------------------------------------------------------------------

    def stream(self) -> Stream:
        """Return a new `Stream`: a queue of collectives that run while the program continues.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().all_reduce(np.ones(2)).wait()
        array([1., 1.])
        """
        return Stream(self._runner)

    def subgroup(self, ranks: Iterable[int]) -> Group:
        """Return the group of some ranks of this group. Only these ranks call it, all of them.

        In the subgroup, ranks are numbered from 0 in ascending order. A second call with the same ranks returns the
        same group, unless it was closed. The subgroup closes with this group, and breaks with it.

        Args:
            ranks: Ranks of this group, without duplicates, in any order. They must include the calling rank.

        Raises:
            InvalidRank: A rank does not exist, appears twice, or the calling rank is missing.
            InvalidSize: `ranks` is empty.
            Broken: A rank of the job failed. See `Group`.

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
        """Return a group of these ranks, in this order. `instance` distinguishes groups of the same ranks."""
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
        """Return the ranks of a subgroup, sorted, after checking that they can form one with this rank."""
        try:
            wanted = tuple(sorted(check_rank(rank, self.size) for rank in ranks))
        except TypeError:
            raise InvalidRank(f"ranks {ranks!r} is not a sequence of ranks", size=self.size) from None
        if not wanted:
            raise InvalidSize("a subgroup needs at least one rank")
        if len(set(wanted)) != len(wanted):
            twice = next(rank for rank, following in itertools.pairwise(wanted) if rank == following)
            raise InvalidRank(f"ranks {list(wanted)} contain rank {twice} twice", rank=twice, size=self.size)
        if self.rank not in wanted:
            message = f"rank {self.rank} is not a member of the subgroup {list(wanted)}"
            raise InvalidRank(message, rank=self.rank, size=self.size)
        return wanted

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> Array:
        """Return a new uninitialised array that collectives of this group exchange fastest.

        If ranks on this host share memory, the array lies in that memory, so that it is reduced without a copy.
        Otherwise, and when the shared memory is full, it is an ordinary array. Its memory is freed with the last view.

        Args:
            shape: An int or a tuple of ints.
            dtype: A name ("float32", "bfloat16" …) or a NumPy dtype.

        Raises:
            InvalidSize: There is no array of this shape, or not enough memory.
            ArrayError: The dtype is unknown.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.empty((2, 3), "bfloat16").nbytes
        12
        """
        return _empty(shape, dtype, None if self._closed else self._generation.shared)


def _restricted(topology: Topology, members: Sequence[int]) -> Topology:
    return Topology.of([str(topology.host_of(world)) for world in members])


def _empty(shape: int | tuple[int, ...], dtype: Any, shared: SharedMemory | None) -> Array:
    """Return an uninitialised array, in shared memory if there is any."""
    row = parse_dtype(dtype)
    if shape is None:  # older versions of NumPy treat it as ()
        raise InvalidSize("no array of shape None")
    try:
        lengths = np.empty(shape, _NOTHING).shape
        nbytes = math.prod(lengths) * row.storage.itemsize
        if shared is not None and nbytes:
            with contextlib.suppress(MemoryError):  # the arena is full: use ordinary memory
                return shared.own.array(nbytes).view(row.storage).reshape(lengths)
        return np.empty(shape, row.storage)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise InvalidSize(f"no array of shape {shape!r}: {error}") from error
