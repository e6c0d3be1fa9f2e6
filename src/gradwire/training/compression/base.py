"""What all compressions share: one call on a group or a stream, and the residual of each bucket."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import ArrayError, ConfigError
from gradwire.executors import numerics
from gradwire.group import Group
from gradwire.group.internals import GroupInternals, queue_on
from gradwire.group.stream import Stream
from gradwire.host import native_core
from gradwire.operations import Exchange, Operation

BYTE = arrays.parse_dtype("uint8")
Key = tuple[int, int, Any]
Scale = float | Callable[[], float]


class Task(NamedTuple):
    """One bucket on its way: its elements, the factor of this rank's, and what is remembered between steps."""

    flat: Array
    scale: float
    work: np.dtype[Any]  # the type that is computed in
    kept: dict[str, Any]
    call: str  # as errors show it


class Compression:
    """A way to sum a bucket over all ranks with fewer bytes; the result is the same bits on every rank.

    Every rank decodes the same bytes in the same order. What a rank could not send of its own values it keeps, bucket
    by bucket, and adds to the next ones (error feedback): so nothing is lost, only late. `feedback=False` does without.
    Values that are not finite come out as such, and are not kept. One object serves one group at a time.

    >>> import gradwire as gw, numpy as np
    >>> from gradwire.training.compression import Int8
    >>> with gw.init() as group:                            # alone, nothing is sent, and nothing rounded
    ...     Int8().exchange(group, np.array([1.0, 0.5], np.float32), scale=0.5)
    array([0.5 , 0.25], dtype=float32)
    """

    name = ""

    def __init__(self, *, feedback: bool = True) -> None:
        self.feedback = feedback
        self._kept: dict[Key, dict[str, Any]] = {}
        self._rooms: dict[str, Array] = {}

    def exchange(self, through: Group | Stream, bucket: Any, scale: Scale = 1.0, timeout: float | None = None) -> Any:
        """Make the bucket the sum over all ranks of scale · bucket, in place; all ranks call it in the same order.

        On a group it returns the bucket; on a stream a `Work` whose result is the bucket. A mean is a sum whose scales
        add up to 1; a function is asked for its scale when the bucket's turn has come. Buckets are known by their
        memory: what was not sent of one is sent with the next that lies there.

        >>> import gradwire as gw, numpy as np
        >>> from gradwire.training.compression import F16
        >>> with gw.init() as group: F16().exchange(group.stream(), np.ones(2)).wait()
        array([1., 1.])
        """
        operation = self.operation(bucket, scale)
        if isinstance(through, Stream):
            return queue_on(through, operation, timeout)
        return GroupInternals(through).run(operation, timeout)

    def reset(self) -> None:
        """Forget what was not sent: the next bucket is the first, as in a new generation.

        >>> from gradwire.training.compression import TopK
        >>> TopK(0.5).reset()
        """
        self._kept.clear()

    def fresh(self) -> Compression:
        """Another one with the same settings, and nothing kept.

        >>> from gradwire.training.compression import TopK
        >>> TopK(0.5).fresh().ratio
        0.5
        """
        other = copy.copy(self)
        other._kept, other._rooms = {}, {}
        return other

    def residual(self, bucket: Any) -> Array | None:
        """What this rank has not sent yet of this bucket, if anything is kept for it."""
        kept = self._kept.get(_key(arrays.view(bucket, writable=False).array))
        return None if kept is None else kept.get("residual")

    def take_back(self, bucket: Any, place: slice, values: Array) -> None:
        """Keep these for the next exchange of a bucket: what was sent of this part of it, and not used by anybody."""
        residual = self.residual(bucket)
        if residual is not None:
            residual[place] += np.where(np.isfinite(values), values, 0).astype(residual.dtype)

    def describe(self) -> str:
        """The name and every setting that ranks must share."""
        return self.name

    def operation(self, bucket: Any, scale: Scale) -> Operation:
        """`exchange`, checked and ready to run in the group's order."""
        target = arrays.view(bucket, writable=True)
        work = _work_type(target.dtype)
        call = f"all_reduce({target.dtype.name}[{target.flat.size}], compression={self.describe()})"

        def body(exchange: Exchange) -> Any:
            factor = float(scale() if callable(scale) else scale)
            flat = target.load()
            with numerics.quiet(), _honest_floats():
                if exchange.size == 1:
                    np.multiply(flat, flat.dtype.type(factor), out=flat)
                elif flat.size:
                    kept = self._kept.setdefault(_key(target.array), {})
                    self._reduce(exchange, Task(flat, factor, work, kept, call))
            target.store()
            return bucket

        return Operation("all_reduce", body)

    def _reduce(self, exchange: Exchange, task: Task) -> None:
        """Sum `task.scale · task.flat` over all ranks, in place."""
        raise NotImplementedError

    def _room(self, name: str, count: int, dtype: Any) -> Array:
        """Memory that serves one bucket after another: a group's operations run one at a time."""
        kind = np.dtype(dtype)
        room = self._rooms.get(name)
        if room is None or room.nbytes < count * kind.itemsize:
            room = self._rooms[name] = np.empty(count * kind.itemsize, np.uint8)
        return room[: count * kind.itemsize].view(kind)

    def _remembered(self, task: Task, name: str, count: int) -> Array:
        """An array that lasts from step to step, zeros at first; without feedback, always the first."""
        if not self.feedback:
            room = self._room(name, count, task.work)
            room.fill(0)
            return room
        array: Array | None = task.kept.get(name)
        if array is None or array.size != count:
            array = task.kept[name] = np.zeros(count, task.work)
        return array


@contextlib.contextmanager
def _honest_floats() -> Iterator[None]:
    """Denormals are honoured, whatever a library has told this thread: else ranks could decode the same differently."""
    if not native_core.available():
        yield
        return
    kernels = native_core.native.kernels
    found = kernels.float_state()
    kernels.set_float_state(found & ~(kernels.FLUSHES | kernels.UPWARDS))
    try:
        yield
    finally:
        kernels.set_float_state(found)


def _work_type(dtype: arrays.DType) -> np.dtype[Any]:
    if dtype.accumulator not in (np.float32, np.float64):
        raise ArrayError(f"a bucket of {dtype.name} cannot be compressed: only those of floating point numbers can")
    return dtype.accumulator


def _key(array: Array) -> Key:
    return array.__array_interface__["data"][0], array.size, array.dtype


def check_ratio(name: str, value: Any) -> float:
    """A setting between 0 (not included) and 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(f"{name} is {value!r}: it must be a number above 0, and at most 1")
    return float(value)
