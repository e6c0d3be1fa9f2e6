"""Group: the ranks that talk, and everything they can say to each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from gradwire import arrays, operations
from gradwire.arrays import REDUCE_OPS, Array, parse_dtype, raw, view
from gradwire.collectives import COLLECTIVES, algorithms
from gradwire.errors import ArrayError, InvalidRank, InvalidSize, UnsupportedOp
from gradwire.exchange import Runner
from gradwire.generation import Generation
from gradwire.liveness.calls import call_site
from gradwire.liveness.verdict import Finding
from gradwire.operations import Operation
from gradwire.post import Post
from gradwire.topology import Topology
from gradwire.wire import fingerprint, group_identity
from gradwire.work import Stream

WORLD = 1
OTHER_OPERATIONS = (
    *("send", "recv", "sendrecv", "copy", "barrier", "all_reduce_named", "broadcast_value", "all_gather_values"),
    *("subgroup", "stream", "empty", "abort"),
)
_COPY_TAG = -1  # users' tags are not negative
MAX_TAG = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this group's backend can do; ask before, instead of catching `UnsupportedOp` after.

    >>> import gradwire as gw
    >>> [group] = gw.local_group(1)
    >>> group.capabilities.native, "ring" in group.capabilities.algorithms["all_reduce"]
    (False, True)
    >>> group.capabilities.supports("all_reduce", dtype="int32", op="mean")
    False
    >>> group.close()
    """

    transport: str
    native: bool
    registered: bool
    recovers: bool
    algorithms: Mapping[str, tuple[str, ...]]
    reduce_ops: tuple[str, ...] = REDUCE_OPS

    def supports(
        self, operation: str, *, dtype: Any = "float32", op: str | None = None, algorithm: str = "auto"
    ) -> bool:
        """Whether a call with these arguments is understood here."""
        if operation not in self.algorithms:
            return operation in OTHER_OPERATIONS
        try:
            row = parse_dtype(dtype)
        except ArrayError:
            return False
        return (op is None or op in row.ops) and (algorithm == "auto" or algorithm in self.algorithms[operation])


class Group:
    """Some ranks of a job that call collectives together; each has one order of calls, the program's.

    All collectives take `algorithm="auto"` (or star, ring, tree, halving, direct, hierarchical, where they exist) and
    `timeout=None` (the group's). An error that breaks the group (`PeerLost`, `CollectiveMismatch`, `Aborted`, a
    collective's `Timeout`) is raised on every rank and names the rank that caused it.

    >>> import gradwire as gw, numpy as np
    >>> with gw.init() as group:           # alone here; with RANK, WORLD_SIZE … one of many
    ...     group.all_reduce(np.arange(3.0), op="mean")
    array([0., 1., 2.])
    """

    def __init__(self, generation: Generation, members: Sequence[int], identity: int, timeout: float) -> None:
        self._generation = generation
        self._timeout = timeout
        self._members = tuple(members)
        self._identity = identity
        self._topology = _restricted(generation.identity.topology, self._members)
        channel = fingerprint("collective", identity)
        self._runner = Runner(generation, identity, channel, self._members, self._topology)
        self._post = Post(generation, identity, self._runner.rank, self._members)
        self._subgroups: dict[tuple[int, ...], Group] = {}
        self._instances: dict[tuple[int, ...], int] = {}
        self._lock = threading.Lock()

    # -- who ----------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self._runner.rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self._members)

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
        return Capabilities(self._generation.transport.name, False, False, False, table)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if not self._generation.control.sound else "open"
        return f"<gradwire.Group rank {self.rank} of {self.size}, generation {self.generation}, {state}>"

    # -- beginning and end --------------------------------------------------------------------------------------------

    @property
    def _closed(self) -> bool:
        return self._runner.closed or self._generation.closed

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._generation.control.sound and not self._closed:
            self.abort(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        self.close()

    def close(self) -> None:
        """Say goodbye and let go of all links; idempotent. Others learn of it only if they still need this rank.

        >>> import gradwire as gw
        >>> [group] = gw.local_group(1)
        >>> group.close(); group.close()
        """
        self._runner.close()
        if self._identity == WORLD:
            self._generation.close()

    def abort(self, reason: str) -> None:
        """Break the group on every rank of the job with `Aborted`, giving the reason; idempotent."""
        if self._closed or not self._generation.control.sound:
            return
        finding = Finding("aborted", str(reason)[:2000], self._generation.identity.rank)
        self._generation.control.report(finding, time.monotonic())
        self._generation.wake()

    def recover(self, timeout: float | None = None) -> Group:
        """The group of the next generation, after a break. Jobs of fixed membership have none: they say so."""
        raise UnsupportedOp(
            "this job's membership is fixed, so it cannot go on without a lost rank: start it again "
            "(recovery needs a coordinator that outlives its workers)",
            operation="recover",
        )

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self._timeout
        if not timeout > 0:
            raise InvalidSize(f"a timeout of {timeout!r} s: it must be more than 0", seconds=timeout)
        return float(timeout)

    def _now(self, operation: Operation, timeout: float | None) -> Any:
        return self._runner.now(operation, self._seconds(timeout), call_site())

    # -- collectives --------------------------------------------------------------------------------------------------

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto", timeout: float | None = None
    ) -> Any:
        """Reduce x over all ranks, in place unless `out` is given; returns the result, the same bits on every rank.

        op is sum, mean, min, max or prod. Half types accumulate in float32. A Python number returns a number.

        >>> import gradwire as gw
        >>> [group] = gw.local_group(1)
        >>> group.all_reduce(2.5)
        2.5
        >>> group.close()
        """
        return self._now(operations.all_reduce(x, op, out, algorithm), timeout)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", timeout: float | None = None) -> Any:
        """Copy the root's x into every rank's x; returns x."""
        return self._now(operations.broadcast(x, root, self.size, self.rank, algorithm), timeout)

    def reduce(
        self,
        x: Any,
        op: str = "sum",
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Any:
        """Reduce x over all ranks into a new array (or `out`) on the root; None elsewhere. x stays as it is."""
        return self._now(operations.reduce(x, op, root, out, self.size, self.rank, algorithm), timeout)

    def all_gather(self, x: Any, *, algorithm: str = "auto", timeout: float | None = None) -> Array:
        """Every rank's x joined along the first axis, in rank order; first axes may differ in length.

        >>> import gradwire as gw, numpy as np
        >>> [group] = gw.local_group(1)
        >>> group.all_gather(np.zeros((2, 3))).shape
        (2, 3)
        >>> group.close()
        """
        result: Array = self._now(operations.all_gather(x, algorithm), timeout)
        return result

    def gather(self, x: Any, root: int = 0, *, algorithm: str = "auto", timeout: float | None = None) -> Array | None:
        """As `all_gather`, but only the root gets the result; None elsewhere."""
        result: Array | None = self._now(operations.gather(x, root, self.size, algorithm), timeout)
        return result

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Array:
        """Reduce x over all ranks and return this rank's part of the first axis: an equal one, or as `counts` says."""
        operation = operations.reduce_scatter(x, op, counts, self.size, self.rank, algorithm)
        result: Array = self._now(operation, timeout)
        return result

    def scatter(
        self,
        x: Any = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Array:
        """This rank's part of the root's x along the first axis; x may be None on the others."""
        operation = operations.scatter(x, root, counts, self.size, self.rank, algorithm)
        result: Array = self._now(operation, timeout)
        return result

    def all_to_all(
        self,
        x: Any,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Array:
        """Send part j of x's first axis to rank j, and return what all ranks sent here, joined in rank order."""
        operation = operations.all_to_all(x, send_counts, recv_counts, self.size, algorithm)
        result: Array = self._now(operation, timeout)
        return result

    def all_reduce_named(
        self, tensors: dict[str, Any], op: str = "sum", *, algorithm: str = "auto", timeout: float | None = None
    ) -> dict[str, Any]:
        """Reduce a dict of arrays in place, in one go; names and shapes that differ between ranks are named.

        >>> import gradwire as gw, numpy as np
        >>> [group] = gw.local_group(1)
        >>> group.all_reduce_named({"w": np.ones(2), "b": np.zeros(1)}, op="mean")
        {'w': array([1., 1.]), 'b': array([0.])}
        >>> group.close()
        """
        self._now(operations.all_reduce_named(tensors, op, algorithm), timeout)
        return tensors

    def barrier(self, *, algorithm: str = "auto", timeout: float | None = None) -> None:
        """Return when every rank has called it."""
        self._now(operations.barrier(algorithm), timeout)

    def broadcast_value(self, value: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """The root's JSON-like value, on every rank.

        >>> import gradwire as gw
        >>> [group] = gw.local_group(1)
        >>> group.broadcast_value({"epoch": 3})
        {'epoch': 3}
        >>> group.close()
        """
        return self._now(operations.broadcast_value(value, root, self.size, self.rank), timeout)

    def all_gather_values(self, value: Any, *, timeout: float | None = None) -> list[Any]:
        """Every rank's JSON-like value, in rank order."""
        result: list[Any] = self._now(operations.all_gather_values(value), timeout)
        return result

    # -- point to point -----------------------------------------------------------------------------------------------

    def send(self, x: Any, dst: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send the bytes of x to a rank. Up to 64 KiB return at once; longer ones wait for the matching `recv`."""
        self._peer(dst)
        self._post.send(raw(view(x, writable=False).flat), dst, _tag(tag), self._seconds(timeout))

    def recv(self, x: Any, src: int | None = None, tag: int = 0, timeout: float | None = None) -> int:
        """Receive into x from a rank (None: anyone) and return who sent it; a `recv` that timed out can be repeated.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> one.send(np.arange(3), dst=1)
        >>> x = np.zeros(3, int); two.recv(x), x
        (0, array([0, 1, 2]))
        >>> one.close(); two.close()
        """
        if src is not None:
            self._peer(src)
        target = view(x, writable=True)
        request = self._post.post_request(raw(target.flat), src, _tag(tag))
        sender = self._post.finish_request(request, self._seconds(timeout))
        target.store()
        return sender

    def sendrecv(self, x: Any, y: Any, dst: int, src: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send x to one rank while y receives from another (or the same): never locks up, whatever the sizes."""
        self._peer(dst)
        self._peer(src)
        seconds = self._seconds(timeout)
        source, target = view(x, writable=False), view(y, writable=True)
        request = self._post.post_request(raw(target.flat), src, _tag(tag))
        try:
            self._post.send(raw(source.flat), dst, _tag(tag), seconds, "sendrecv")
        except BaseException:
            self._post.cancel_request(request)
            raise
        self._post.finish_request(request, seconds, "sendrecv")
        target.store()

    def copy(self, x: Any, y: Any, src: int, dst: int, timeout: float | None = None) -> None:
        """Copy x on rank src into y on rank dst, whatever strides either has; only those two need call it."""
        self._rank(src)
        self._rank(dst)
        if self.rank == src == dst:
            source, target = view(x, writable=False), view(y, writable=True)
            if source.dtype != target.dtype or source.flat.size != target.flat.size:
                raise ArrayError(f"{arrays.describe(source.array)} does not fit {arrays.describe(target.array)}")
            target.flat[:] = source.flat.copy()
            target.store()
        elif self.rank == src:
            data = raw(view(x, writable=False).flat)
            self._post.send(data, dst, _COPY_TAG, self._seconds(timeout), "copy")
        elif self.rank == dst:
            target = view(y, writable=True)
            request = self._post.post_request(raw(target.flat), src, _COPY_TAG)
            self._post.finish_request(request, self._seconds(timeout), "copy")
            target.store()

    def _rank(self, rank: int) -> None:
        if not isinstance(rank, (int, np.integer)) or not 0 <= rank < self.size:
            raise InvalidRank(f"rank {rank!r} is not one of 0 … {self.size - 1}")

    def _peer(self, rank: int) -> None:
        self._rank(rank)
        if rank == self.rank:
            raise InvalidRank(f"rank {rank} is this rank itself: there is nobody to talk to", rank=rank, peer=rank)

    # -- more -------------------------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        """A queue of collectives that run beside the program, in the order they were called.

        >>> import gradwire as gw, numpy as np
        >>> [group] = gw.local_group(1)
        >>> stream = group.stream()
        >>> work = stream.all_reduce(np.ones(2))
        >>> stream.synchronize()
        >>> work.result
        array([1., 1.])
        >>> group.close()
        """
        return Stream(self)

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """The group of some of these ranks, numbered anew in ascending order; only they call it. Made once and kept."""
        wanted = tuple(sorted(int(rank) for rank in ranks))
        if not wanted:
            raise InvalidSize("a subgroup needs at least one rank")
        if len(set(wanted)) != len(wanted):
            raise InvalidRank(f"ranks {list(wanted)} name a rank twice")
        for rank in wanted:
            self._rank(rank)
        if self.rank not in wanted:
            raise InvalidRank(f"rank {self.rank} is not a member of the subgroup {list(wanted)}", rank=self.rank)
        self._runner.check("subgroup")
        with self._lock:
            known = self._subgroups.get(wanted)
            if known is not None and not known._closed:
                return known
            instance = self._instances[wanted] = self._instances.get(wanted, 0) + 1
            identity = group_identity(self._identity, wanted, instance)
            members = [self._members[rank] for rank in wanted]
            group = self._subgroups[wanted] = Group(self._generation, members, identity, self._timeout)
            group._runner.dial(time.monotonic() + self._timeout)
            return group

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> Array:
        """An uninitialised array that this group exchanges best."""
        row = parse_dtype(dtype)
        try:
            return np.empty(shape, row.storage)
        except (TypeError, ValueError, MemoryError) as error:
            raise InvalidSize(f"no array of shape {shape!r}: {error}") from error


def _tag(tag: int) -> int:
    if not isinstance(tag, (int, np.integer)) or not 0 <= tag <= MAX_TAG:
        raise InvalidSize(f"tag {tag!r} is not a number from 0 to 2**62 - 1")
    return int(tag)


def _restricted(topology: Topology, members: Sequence[int]) -> Topology:
    return Topology.of([str(topology.host_of(world)) for world in members])
