"""Runs gradwire's operations on a user's `Communicator`: the one place that decides what a group can do.

A `Group` runs operations itself: on its progress thread, and in registered memory. Any other communicator is wrapped in
an `EngineGroup`, which runs the same operations with the few calls of `Communicator`. The results have the same bits,
provided that the engine adds in the same order.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from gradwire.arrays import Array, DType, describe
from gradwire.errors import CollectiveMismatch, ConfigError, GradwireError, UnsupportedOp
from gradwire.executors import numerics
from gradwire.executors.plan import ragged_bounds
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.group.work import Work
from gradwire.operations import CallKey, Operation, Position, Shape, elementwise, split_join, values
from gradwire.operations.types import check_rank, result_or_raise
from gradwire.training.communicator import Communicator, current_communicator

_BOOLEAN = {"sum": "max", "prod": "min"}  # of booleans, as numbers 0 and 1


class EngineGroup:
    """A user's engine with the calls of `Group` and `GroupInternals` that training code makes."""

    def __init__(self, engine: Communicator) -> None:
        self.engine = engine
        self.position = _position(engine)
        self.rank, self.size = self.position
        generation = getattr(engine, "generation", None)
        self.generation = generation if isinstance(generation, int) else None
        self._exchange = EngineExchange(engine, self.position)

    # -- as in Group --------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        return self.run(elementwise.all_reduce(self.position, x, op))

    def broadcast(self, x: Any, root: int = 0) -> Any:
        return self.run(elementwise.broadcast(self.position, x, root))

    def all_gather(self, x: Any) -> Any:
        return self.run(split_join.all_gather(self.position, x))

    def broadcast_value(self, value: Any = None, root: int = 0) -> Any:
        return self.run(values.broadcast_value(self.position, value, root))

    def all_gather_values(self, value: Any) -> list[Any]:
        gathered: list[Any] = self.run(values.all_gather_values(self.position, value))
        return gathered

    def empty(self, shape: Any, dtype: Any = "float32") -> Array:
        return np.empty(shape, dtype)

    # -- as in GroupInternals -----------------------------------------------------------------------------------------

    def run(self, operation: Operation, timeout: float | None = None, site: Any = None) -> Any:
        """Run an operation on this thread, and return its result. The engine has its own timeouts."""
        if timeout is not None:
            raise UnsupportedOp(
                f"{type(self.engine).__name__} has its own timeouts: leave timeout=None", operation=operation.name
            )
        return result_or_raise(operation.body(self._exchange))

    def queue(self, operation: Operation, timeout: float | None = None) -> Work:
        """Run an operation at once, because an engine has no progress thread. Return a work that is done."""
        result = self.run(operation, timeout)
        work = Work(operation.name)
        work.run(lambda: result, first_error=True)
        return work

    def zeros(self, count: int, dtype: DType) -> Array:
        return np.zeros(count, dtype.storage)

    def check(self, operation: str | None = None) -> None:
        """Do nothing: the engine raises its own errors when it is called."""


AnyGroup = Group | EngineGroup
"""A group in the form that training code uses."""


def group_for(source: Any) -> AnyGroup:
    """Return a group, a user's engine or the current group of an elastic run in the form that training code uses."""
    if isinstance(source, EngineGroup):
        return source
    communicator = current_communicator(source)
    return communicator if isinstance(communicator, Group) else EngineGroup(communicator)


def internals_of(group: AnyGroup) -> GroupInternals | EngineGroup:
    """Return the object that runs operations in the group's order and allocates its memory."""
    return group if isinstance(group, EngineGroup) else GroupInternals(group)


def check_algorithm_of(group: AnyGroup, algorithm: str) -> None:
    """Raise `UnsupportedOp` if the group cannot use the algorithm: an engine chooses its own."""
    if isinstance(group, EngineGroup) and algorithm != "auto":
        raise UnsupportedOp(
            f"{type(group.engine).__name__} chooses its own algorithm: leave algorithm='auto'", operation="all_reduce"
        )


def _position(engine: Any) -> Position:
    name = type(engine).__name__
    if callable(engine.rank) or callable(engine.size):
        raise ConfigError(f"the rank and the size of {name} are methods: they must be numbers, such as properties")
    if isinstance(engine.size, bool) or not isinstance(engine.size, (int, np.integer)) or engine.size < 1:
        raise ConfigError(f"the size of {name} is {engine.size!r}: it must be a whole number, at least 1")
    size = int(engine.size)
    return Position(check_rank(engine.rank, size, f"{name}.rank"), size)


class EngineExchange:
    """Runs each exchange of an operation with one call of the engine."""

    def __init__(self, engine: Any, position: Position) -> None:
        self._engine = engine
        self.rank, self.size = position

    def __call__(self, shape: Shape, x: Array, out: Array, key: CallKey | None = None) -> None:
        """Run the exchange. Nothing is called for an exchange without elements, which all ranks know."""
        if shape.counts == 0 or (isinstance(shape.counts, tuple) and not sum(shape.counts)):
            return
        match shape.collective:
            case "all_reduce":
                self._all_reduce(shape, x, out)
            case "broadcast":
                self._broadcast(shape, x, out)
            case "all_gather" if isinstance(shape.counts, tuple):
                self._all_gather(shape.counts, _bytes(x), _bytes(out), shape.dtype.itemsize)
            case "all_to_all" if isinstance(shape.counts, tuple):
                self._all_to_all(np.array(shape.counts).reshape(self.size, self.size), x, out)
            case other:
                raise UnsupportedOp(f"{self._name} is not called for {other}", operation=other)

    def disagree(self, reason: str) -> GradwireError:
        """Return the error to raise because ranks have made different calls. The engine does not get to know it."""
        return CollectiveMismatch(reason)

    @property
    def _name(self) -> str:
        return type(self._engine).__name__

    def _all_reduce(self, shape: Shape, x: Array, out: Array) -> None:
        """Reduce with the engine's "sum", and divide here: then the engine need not know the mean.

        16-bit floats are reduced as float32 and rounded once, as in a `Group`.
        """
        op, dtype = shape.op or "sum", shape.dtype
        with numerics.quiet():
            if dtype.widens:
                work = x.astype(dtype.accumulator)
            else:
                if not numerics.same_memory(x, out):
                    np.copyto(out, x)
                work = out
            parts = work
            if dtype.storage.kind == "c" and op != "prod":
                parts = work.view(work.real.dtype)
            elif dtype.storage.kind == "b":
                parts, op = work.view(np.uint8), _BOOLEAN.get(op, op)
            engine_op = "sum" if op == "mean" else op
            self._store(parts, self._engine.all_reduce(parts, op=engine_op), "all_reduce")
            numerics.finish(out, work, self.size if op == "mean" else None)

    def _broadcast(self, shape: Shape, x: Array, out: Array) -> None:
        """Send the root's bytes. On the root, x and `out` are the same array, which may be read-only."""
        data = _bytes(x).copy() if self.rank == shape.root else _bytes(out)
        self._store(data, self._engine.broadcast(data, root=shape.root), "broadcast")

    def _all_gather(self, counts: tuple[int, ...], x: Array, out: Array, itemsize: int = 1) -> None:
        """Gather the bytes of all ranks. An engine gathers equal lengths only, so short arrays are padded."""
        longest = max(counts) * itemsize
        padded = np.zeros(longest, np.uint8)
        padded[: x.size] = x
        gathered = self._result(self._engine.all_gather(padded), padded.dtype, self.size * longest, "all_gather")
        bounds = ragged_bounds([count * itemsize for count in counts])
        for rank, (first, last) in enumerate(itertools.pairwise(bounds)):
            out[first:last] = gathered[rank * longest : rank * longest + last - first]

    def _all_to_all(self, counts: Array, x: Array, out: Array) -> None:
        """Exchange parts. `counts[i, j]` is the number of elements that rank i sends to rank j."""
        size, data, received = x.dtype.itemsize, _bytes(x), _bytes(out)
        sent, arriving = counts[self.rank] * size, counts[:, self.rank] * size
        if callable(getattr(self._engine, "all_to_all", None)):
            result = self._engine.all_to_all(data.copy(), sent.tolist(), arriving.tolist())
            np.copyto(received, self._result(result, data.dtype, received.size, "all_to_all"))
            return
        totals = tuple(int(total) * size for total in counts.sum(axis=1))
        everything = np.empty(sum(totals), np.uint8)
        self._all_gather(totals, data, everything)
        starts = np.concatenate([[0], np.cumsum(counts * size)])  # in the order of rows, then of columns
        at = 0
        for source, count in enumerate(arriving.tolist()):
            first = int(starts[source * self.size + self.rank])
            received[at : at + count] = everything[first : first + count]
            at += count

    def _store(self, x: Array, returned: Any, call: str) -> None:
        """Copy the result of a call into x, if the engine returned a new array instead of changing x."""
        if returned is not None and returned is not x:
            np.copyto(x, self._result(returned, x.dtype, x.size, call))

    def _result(self, returned: Any, dtype: np.dtype[Any], count: int, call: str) -> Array:
        """Return the elements that a call of the engine returned; raise `ConfigError` if their number is wrong."""
        try:
            array = np.asarray(returned)
        except ValueError:  # for example arrays of different lengths
            array = np.empty(0, object)
        if array.dtype != dtype or array.size != count:
            raise ConfigError(
                f"{self._name}.{call} returned {describe(array)} on rank {self.rank}, "
                f"but the result has {count} elements of {dtype}",
                operation=call,
                rank=self.rank,
            )
        return array.reshape(-1)


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
