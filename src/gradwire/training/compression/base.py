"""The base class of all compressions: the call on a group or a stream, and the residual of each bucket."""

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
from gradwire.group.internals import queue_on
from gradwire.group.stream import Stream
from gradwire.host import native_core
from gradwire.operations import Exchange, Operation
from gradwire.training.communicator import Communicator
from gradwire.training.engine_group import group_for, internals_of

BYTE = arrays.parse_dtype("uint8")
Key = tuple[int, int, Any]
Scale = float | Callable[[], float]


class Task(NamedTuple):
    """The reduction of one bucket."""

    flat: Array
    scale: float  # this rank's factor in the sum
    work: np.dtype[Any]  # the dtype of the computation
    saved: dict[str, Any]  # arrays that last from step to step
    call: str  # the call's description in errors


class Compression:
    """The base class of compressions: sums a bucket over all ranks with fewer bytes.

    The result has the same bits on every rank, because every rank decodes the same bytes in the same order.

    With error feedback, a rank keeps the part of its values that was not sent (the residual) for each bucket, and adds
    it to the next values of that bucket. So nothing is lost: it only arrives later. NaN and infinite values arrive as
    NaN or infinite, and are not kept.

    One object serves one group at a time.

    Args:
        feedback: Use error feedback. False discards the part that was not sent.

    >>> import gradwire as gw, numpy as np
    >>> from gradwire.training.compression import Int8
    >>> with gw.init() as group:                            # one rank: nothing is sent, so nothing is rounded
    ...     Int8().exchange(group, np.array([1.0, 0.5], np.float32), scale=0.5)
    array([0.5 , 0.25], dtype=float32)
    """

    name = ""

    def __init__(self, *, feedback: bool = True) -> None:
        self.feedback = feedback
        self._saved: dict[Key, dict[str, Any]] = {}
        self._scratch: dict[str, Array] = {}

    def exchange(
        self, through: Communicator | Stream, bucket: Any, scale: Scale = 1.0, timeout: float | None = None
    ) -> Any:
        """Replace the bucket by the sum over all ranks of `scale · bucket`, in place. All ranks must call it.

        A bucket is identified by its memory: the residual of an array is added to the next array at the same address
        with the same size and dtype.

        Args:
            through: The group, stream or communicator that exchanges the bytes.
            bucket: A writable array of floating-point numbers.
            scale: The factor of this rank. For a mean, the factors of all ranks add up to 1. A function is called when
                the exchange runs, and returns the factor.
            timeout: Seconds for the whole exchange; None means the group's timeout.

        Returns:
            On a group or communicator, the bucket. On a stream, a `Work` whose result is the bucket.

        Raises:
            ArrayError: The bucket does not hold floating-point numbers.

        >>> import gradwire as gw, numpy as np
        >>> from gradwire.training.compression import F16
        >>> with gw.init() as group: F16().exchange(group.stream(), np.ones(2)).wait()
        array([1., 1.])
        """
        operation = self.operation(bucket, scale)
        if isinstance(through, Stream):
            return queue_on(through, operation, timeout)
        return internals_of(group_for(through)).run(operation, timeout)

    def reset(self) -> None:
        """Discard all residuals. Call it on every rank when a new generation begins.

        >>> from gradwire.training.compression import TopK
        >>> TopK(0.5).reset()
        """
        self._saved.clear()

    def fresh(self) -> Compression:
        """Return a new compression with the same settings and without residuals.

        >>> from gradwire.training.compression import TopK
        >>> TopK(0.5).fresh().ratio
        0.5
        """
        other = copy.copy(self)
        other._saved, other._scratch = {}, {}
        return other

    def residual(self, bucket: Any) -> Array | None:
        """Return the part of this bucket that this rank has not sent yet, or None if there is no residual for it."""
        saved = self._saved.get(_key(arrays.view(bucket, writable=False).array))
        return None if saved is None else saved.get("residual")

    def add_to_residual(self, bucket: Any, place: slice, values: Array) -> None:
        """Add values to the residual of a part of a bucket, so that the next exchange sends them (again)."""
        residual = self.residual(bucket)
        if residual is not None:
            residual[place] += np.where(np.isfinite(values), values, 0).astype(residual.dtype)

    def describe(self) -> str:
        """Return the name and every setting that must be the same on all ranks."""
        return self.name

    def operation(self, bucket: Any, scale: Scale) -> Operation:
        """Check the arguments of `exchange`, and return the operation that runs it in the group's order."""
        target = arrays.view(bucket, writable=True)
        work = _work_type(target.dtype)
        call = f"all_reduce({target.dtype.name}[{target.flat.size}], compression={self.describe()})"

        def body(exchange: Exchange) -> Any:
            factor = float(scale() if callable(scale) else scale)
            flat = target.load()
            with numerics.quiet(), _ieee_floats():
                if exchange.size == 1:
                    np.multiply(flat, flat.dtype.type(factor), out=flat)
                elif flat.size:
                    saved = self._saved.setdefault(_key(target.array), {})
                    self._reduce(exchange, Task(flat, factor, work, saved, call))
            target.store()
            return bucket

        return Operation("all_reduce", body)

    def _reduce(self, exchange: Exchange, task: Task) -> None:
        """Sum `task.scale · task.flat` over all ranks, in place."""
        raise NotImplementedError

    def _scratch_array(self, name: str, count: int, dtype: Any) -> Array:
        """Return uninitialised memory. All buckets share it, because a group's operations run one at a time."""
        kind = np.dtype(dtype)
        memory = self._scratch.get(name)
        if memory is None or memory.nbytes < count * kind.itemsize:
            memory = self._scratch[name] = np.empty(count * kind.itemsize, np.uint8)
        return memory[: count * kind.itemsize].view(kind)

    def _saved_array(self, task: Task, name: str, count: int) -> Array:
        """Return the array that lasts from step to step: zeros in the first step; without feedback, in every step."""
        if not self.feedback:
            zeros = self._scratch_array(name, count, task.work)
            zeros.fill(0)
            return zeros
        array: Array | None = task.saved.get(name)
        if array is None or array.size != count:
            array = task.saved[name] = np.zeros(count, task.work)
        return array


@contextlib.contextmanager
def _ieee_floats() -> Iterator[None]:
    """Turn off flush-to-zero, denormals-are-zero and upward rounding on this thread, if a library has set them.

    Otherwise two ranks could decode the same bytes to different values.
    """
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
        raise ArrayError(f"a bucket of {dtype.name} cannot be compressed: only floating-point numbers can")
    return dtype.accumulator


def _key(array: Array) -> Key:
    return array.__array_interface__["data"][0], array.size, array.dtype


def check_ratio(name: str, value: Any) -> float:
    """Return the value as a float if 0 < value ≤ 1; raise `ConfigError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(f"{name} is {value!r}: it must be a number above 0 and at most 1")
    return float(value)
