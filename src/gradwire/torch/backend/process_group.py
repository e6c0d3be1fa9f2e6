"""The backend "gradwire" of torch.distributed: a process group that calls a `Group`.

torch calls a Python process group by two sets of names. Its Python code (`dist.all_reduce` …) calls the methods here
directly. Its C++ code (DDP's reducer, functional collectives) calls the names that its trampoline class knows. Calls
with `async_op=False` run on the caller's thread, the others on the group's progress thread; all of them follow the
group's one order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup

from gradwire.errors import InvalidSize, UnsupportedOp
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.host import malloc
from gradwire.job.config import TRANSPORT, resolve
from gradwire.operations import Exchange, Operation, elementwise, named
from gradwire.operations.preallocated import Strip, all_gather_into, all_to_all_into, gather_into, scatter_into
from gradwire.torch.backend import reductions, sparse, store_rendezvous
from gradwire.torch.backend.monitored_barrier import monitored_barrier
from gradwire.torch.backend.no_dynamo import no_dynamo
from gradwire.torch.backend.p2p import Receiving, Sending
from gradwire.torch.backend.tensors import array_of, arrays_of, describe, reduction
from gradwire.torch.backend.work import Done, Handle, seconds

NAME = "gradwire"
Tensors = Sequence[torch.Tensor]


def create(options: Any, backend_options: Any) -> GradwireProcessGroup:
    """Create a process group. torch calls it in `init_process_group` and `new_group`, on the members of the group."""
    timeout: float = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group)
    world = _world() if ranks else None
    if world is None:
        # Reject an invalid setting before the ranks wait for each other. A single rank is checked too.
        resolve(environ={TRANSPORT: os.environ[TRANSPORT]} if TRANSPORT in os.environ else {})
        group = store_rendezvous.join_world(options.store, options.group_rank, options.group_size, timeout)
        malloc.keep(group.topology, group.rank)
    else:
        group = world.part(ranks, options.group_id, timeout)
    return GradwireProcessGroup(options.store, group)


def _world() -> GradwireProcessGroup | None:
    """Return torch's default group if it is an open gradwire group: new groups are then subgroups of it."""
    world = dist.group.WORLD
    return world if isinstance(world, GradwireProcessGroup) and not world._internals.is_closed else None


class GradwireProcessGroup(ProcessGroup):  # type: ignore[misc]
    """A torch process group on top of a gradwire `Group`.

    Attributes:
        group: The gradwire group.
    """

    def __init__(self, store: Any, group: Group) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        self._internals = GroupInternals(group)
        self._store = store
        self._at = self._internals.position
        self._rank, self._size = self._at
        self._name = self._description = ""
        self._parts: dict[str, int] = {}

    # -- properties ---------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  # torch's names, here and below
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> GradwireProcessGroup:
        """Return this group: unlike other process groups, it has no separate backend for each device."""
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the backend {NAME!r} supports tensors on the CPU, not on {device}")
        return self

    def get_group_store(self) -> Any:
        return self._store

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self._internals.calls_made

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: gradwire numbers the calls of a group itself."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._internals.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def part(self, ranks: Sequence[int], name: str, timeout: float) -> Group:
        """Return a subgroup of some ranks. torch reuses a name after the group with that name was destroyed."""
        times = self._parts[name] = self._parts.get(name, 0) + 1
        return store_rendezvous.part(self.group, ranks, name, times, timeout)

    def shutdown(self) -> None:
        self.group.close()

    def abort(self) -> None:
        """Break the group on all ranks, so that every rank that waits in it gets an error."""
        self.group.abort("torch's abort() was called")

    # -- running ------------------------------------------------------------------------------------------------------

    def _run(self, operation: Operation, options: Any, tensors: Any) -> Done | Handle:
        timeout = None if options is None else seconds(options.timeout)
        if options is not None and not options.asyncOp:
            self._internals.run(operation, timeout)
            return Done(tensors)
        return Handle(self._internals.queue(operation, timeout), tensors, self._internals.check)

    # -- collectives --------------------------------------------------------------------------------------------------

    @no_dynamo
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Done | Handle:
        if isinstance(tensors, torch.Tensor):  # DDP's join() passes a bare tensor
            tensors = [tensors]
        tensor = _only(tensors)
        opts = _options(opts, timeout, c10d.AllreduceOptions)
        if tensor.layout is not torch.strided:
            return self._run(sparse.all_reduce(tensor, opts.reduceOp, self._size), opts, tensors)
        how, array = reduction(opts.reduceOp, tensor), array_of(tensor)
        if how.plain and not opts.asyncOp and opts.timeout < timedelta(0):
            self.group.all_reduce(array, how.op)
            return Done(tensors)
        return self._run(reductions.all_reduce(self._at, array, how), opts, tensors)

    @no_dynamo
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Done | Handle:
        opts = _options(opts, None, c10d.AllreduceCoalescedOptions)
        hows = [reduction(opts.reduceOp, tensor) for tensor in tensors]
        if len(tensors) > 1 and all(how.plain for how in hows):
            arrays = {f"{number:06}": array_of(tensor) for number, tensor in enumerate(tensors)}
            return self._run(named.all_reduce_named(self._at, arrays, hows[0].op), opts, tensors)
        parts = [
            reductions.all_reduce(self._at, array_of(tensor), how) for tensor, how in zip(tensors, hows, strict=True)
        ]
        return self._run(_in_sequence("all_reduce", parts), opts, tensors)

    @no_dynamo
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Done | Handle:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        tensor = _only(tensors)
        opts = _options(opts, timeout, c10d.BroadcastOptions)
        array, root = array_of(tensor), opts.rootRank
        if not opts.asyncOp and opts.timeout < timedelta(0):
            self.group.broadcast(array, root)
            return Done(tensors)
        return self._run(elementwise.broadcast(self._at, array, root), opts, tensors)

    @no_dynamo
    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> Done | Handle:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if isinstance(opts, int):
            opts = _filled(c10d.ReduceOptions(), rootRank=opts, reduceOp=more[0] if more else None)
        tensor = _only(tensors)
        opts = _options(opts, None, c10d.ReduceOptions)
        how = reduction(opts.reduceOp, tensor)
        operation = reductions.reduce(self._at, array_of(tensor), how, opts.rootRank)
        return self._run(operation, opts, tensors)

    @no_dynamo
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Done | Handle:
        if isinstance(input_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        outputs, tensor = _only(output_tensors), _only(input_tensors)
        if len(outputs) != self._size:
            raise InvalidSize(f"the output list has {len(outputs)} tensors for {self._size} ranks")
        opts = _options(opts, None, c10d.AllgatherOptions)
        return self._run(self._gathering(outputs, tensor), opts, list(outputs))

    @no_dynamo
    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> Done | Handle:
        opts = _options(opts, None, c10d.AllgatherOptions)
        # torch passes one list for each rank, with one result for each tensor.
        if len(output_lists) != self._size or any(len(outs) != len(input_list) for outs in output_lists):
            raise InvalidSize(
                f"expected output lists for {self._size} ranks with {len(input_list)} tensors each, got "
                f"{len(output_lists)} lists of {[len(outs) for outs in output_lists]} tensors"
            )
        outputs = zip(*output_lists, strict=True)
        parts = [self._gathering(list(outs), tensor) for outs, tensor in zip(outputs, input_list, strict=True)]
        return self._run(_in_sequence("all_gather", parts), opts, [one for outs in output_lists for one in outs])

    def _gathering(self, outputs: Tensors, tensor: torch.Tensor) -> Operation:
        """Return the all-gather into one tensor for each rank, or into one tensor for all ranks."""
        out, x = Strip.of(arrays_of(outputs), writable=True), Strip.of([array_of(tensor)], writable=False)
        counts = out.counts if len(outputs) == self._size > 1 else (x.size,) * self._size
        return all_gather_into(out, x, counts, self._rank)

    @no_dynamo
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Done | Handle:
        return self._run(self._gathering([output], tensor), _options(opts, None, c10d.AllgatherOptions), [output])

    @no_dynamo
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done | Handle:
        opts = _options(opts, None, c10d.AllgatherOptions)
        parts = [self._gathering([output], tensor) for output, tensor in zip(outputs, inputs, strict=True)]
        return self._run(_in_sequence("all_gather", parts), opts, list(outputs))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @no_dynamo
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Done | Handle:
        tensor = _only(input_tensors)
        opts = _options(opts, None, c10d.GatherOptions)
        out, outputs = None, []
        if self._rank == opts.rootRank:
            outputs = list(_only(output_tensors))
            if len(outputs) != self._size:
                raise InvalidSize(f"the output list has {len(outputs)} tensors for {self._size} ranks")
            out = Strip.of(arrays_of(outputs), writable=True)
        x = Strip.of([array_of(tensor)], writable=False)
        return self._run(gather_into(out, x, opts.rootRank, self._size), opts, outputs)

    @no_dynamo
    def scatter(self, output_tensors: Tensors, input_tensors: Any, opts: Any = None) -> Done | Handle:
        output = _only(output_tensors)
        opts = _options(opts, None, c10d.ScatterOptions)
        x = None
        if self._rank == opts.rootRank:
            inputs = _only(input_tensors)
            if len(inputs) != self._size:
                raise InvalidSize(f"the input list has {len(inputs)} tensors for {self._size} ranks")
            x = Strip.of(arrays_of(inputs), writable=False)
        out = Strip.of([array_of(output)], writable=True)
        return self._run(scatter_into(out, x, opts.rootRank, self._size), opts, output_tensors)

    @no_dynamo
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Done | Handle:
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        opts = _options(opts, None, c10d.ReduceScatterOptions)
        output, inputs = _only(output_tensors), _only(input_tensors)
        counts = [tensor.numel() for tensor in inputs]
        return self._run(self._scattering(output, inputs, counts, opts), opts, output_tensors)

    def _scattering(self, output: torch.Tensor, inputs: Tensors, counts: Sequence[int], opts: Any) -> Operation:
        if len(counts) != self._size:
            raise InvalidSize(f"the input list has {len(counts)} tensors for {self._size} ranks")
        how = reduction(opts.reduceOp, output)
        return reductions.reduce_scatter(self._at, array_of(output), arrays_of(inputs), how, counts)

    @no_dynamo
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Done | Handle:
        opts = _options(opts, None, c10d.ReduceScatterOptions)
        operation = self._scattering(output, [tensor], (output.numel(),) * self._size, opts)
        return self._run(operation, opts, [output])

    @no_dynamo
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done | Handle:
        opts = _options(opts, None, c10d.ReduceScatterOptions)
        parts = [
            self._scattering(output, [tensor], (output.numel(),) * self._size, opts)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._run(_in_sequence("reduce_scatter", parts), opts, list(outputs))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @no_dynamo
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Done | Handle:
        received, even_out = _split(output, output_split_sizes, self._size)
        sent, even_in = _split(tensor, input_split_sizes, self._size)
        out, x = Strip.of([array_of(output)], writable=True), Strip.of([array_of(tensor)], writable=False)
        operation = all_to_all_into(out, x, received, sent, even=even_out and even_in)
        return self._run(operation, _options(opts, None, c10d.AllToAllOptions), [output])

    alltoall_base = all_to_all_single

    @no_dynamo
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done | Handle:
        if len(outputs) != self._size or len(inputs) != self._size:
            raise InvalidSize(f"got {len(outputs)} output and {len(inputs)} input tensors for {self._size} ranks")
        out, x = Strip.of(arrays_of(outputs), writable=True), Strip.of(arrays_of(inputs), writable=False)
        operation = all_to_all_into(out, x, out.counts, x.counts, even=False)
        return self._run(operation, _options(opts, None, c10d.AllToAllOptions), list(outputs))

    @no_dynamo
    def barrier(self, opts: Any = None, timeout: Any = None) -> Done | Handle:
        opts = _options(opts, timeout, c10d.BarrierOptions)
        return self._run(elementwise.barrier(self._at), opts, [])

    @no_dynamo
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        limit = self._internals.timeout if timeout is None else timeout.total_seconds()
        monitored_barrier(self.group, limit, report_all=wait_all_ranks)

    # -- point to point -----------------------------------------------------------------------------------------------

    @no_dynamo
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Sending:
        return Sending(self.group, _only(tensors), dst, tag)

    @no_dynamo
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Receiving:
        return Receiving(self.group, _only(tensors), src, tag)

    @no_dynamo
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Receiving:
        return Receiving(self.group, _only(tensors), None, tag)


def _only(tensors: Any) -> Any:
    """Return the only entry of a list. Old versions of torch passed several tensors per process."""
    if len(tensors) != 1:
        raise UnsupportedOp(f"expected a list of one tensor per process, got {len(tensors)}")
    return tensors[0]


def _options(given: Any, timeout: Any, kind: Any) -> Any:
    """Return `given` if it is an options object, else new options from a reduce op, a root rank, a timeout or None."""
    if isinstance(given, kind):
        return given
    values: dict[str, Any] = {}
    if given is not None and hasattr(kind, "reduceOp"):
        values["reduceOp"] = getattr(given, "reduceOp", given)
    elif given is not None and hasattr(kind, "rootRank"):
        values["rootRank"] = given
    elif isinstance(given, timedelta):
        timeout = given
    if timeout is not None:
        values["timeout"] = timeout
    return _filled(kind(), **values)


def _filled(options: Any, **values: Any) -> Any:
    for name, value in values.items():
        if value is not None:
            setattr(options, name, value)
    return options


def _in_sequence(name: str, parts: Sequence[Operation]) -> Operation:
    """Return one operation that runs several, one after the other."""

    def body(exchange: Exchange) -> None:
        for part in parts:
            part.body(exchange)

    return Operation(name, body)


def _split(tensor: torch.Tensor, sizes: Sequence[int], size: int) -> tuple[tuple[int, ...], bool]:
    """Return the number of elements for each rank, and whether no sizes were given, so that the parts are equal."""
    if sizes:
        if len(sizes) != size or sum(sizes) != tensor.shape[0]:
            raise InvalidSize(f"{describe(tensor)} cannot be split by {list(sizes)} over {size} ranks")
        width = math.prod(tensor.shape[1:])
        return tuple(n * width for n in sizes), False
    rows = tensor.shape[0] if tensor.dim() else 1
    if rows % size:
        raise InvalidSize(f"{describe(tensor)} cannot be split evenly over {size} ranks")
    return (tensor.numel() // size,) * size, True
