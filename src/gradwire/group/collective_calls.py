"""The collectives of a group as users call them: each one tries the fast path, or builds its operation and runs it."""

from __future__ import annotations

from typing import Any

from gradwire.arrays import Array, Counts
from gradwire.group.runner import CollectiveRunner
from gradwire.group.work import bounded
from gradwire.liveness.call_log import call_site
from gradwire.operations import Operation, elementwise, named, split_join, values
from gradwire.operations.types import settled


class CollectiveCalls:
    """The part of a group that all ranks use together.

    A fast call gets (x, op, root, out, algorithm, timeout), and returns None where it has done nothing.
    """

    def __init__(self, runner: CollectiveRunner) -> None:
        self._runner = runner
        self._fast_path = runner.fast_path
        self._position = runner.position

    def _seconds(self, timeout: float | None) -> float:
        """The timeout of a call, or the group's if it has none."""
        return bounded(timeout) or self._runner.timeout

    def _now(self, operation: Operation, timeout: float | None) -> Any:
        return settled(self._runner.now(operation, self._seconds(timeout), call_site()))

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto", timeout: float | None = None
    ) -> Any:
        """Reduce x over all ranks, in place unless `out` is given; returns the result, the same bits on every rank.

        op is sum, mean, min, max or prod. Half types accumulate in float32; integers wrap, Python's too (at 64 bits);
        of booleans sum is "or" and prod "and". A Python number returns a number.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.all_reduce(2.5)
        2.5
        """
        done = self._fast_path.all_reduce(x, op, None, out, algorithm, timeout)
        if done is not None:
            return done
        return self._now(elementwise.all_reduce(self._position, x, op, out=out, algorithm=algorithm), timeout)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", timeout: float | None = None) -> Any:
        """Copy the root's x into every rank's x; returns x.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.broadcast(np.ones(2), root=0)
        array([1., 1.])
        """
        done = self._fast_path.broadcast(x, None, root, None, algorithm, timeout)
        if done is not None:
            return done
        return self._now(elementwise.broadcast(self._position, x, root, algorithm=algorithm), timeout)

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
        """Reduce x over all ranks into a new array (or `out`) on the root; None elsewhere. x stays as it is.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.reduce(np.ones(2), op="max", root=0)
        array([1., 1.])
        """
        return self._now(elementwise.reduce(self._position, x, op, root, out=out, algorithm=algorithm), timeout)

    def all_gather(self, x: Any, *, out: Any = None, algorithm: str = "auto", timeout: float | None = None) -> Any:
        """Every rank's x joined along the first axis, in rank order; first axes may differ in length.

        The result is a new array, or `out`, which must have room for exactly as many elements.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.all_gather(np.zeros((2, 3))).shape
        (2, 3)
        """
        done = self._fast_path.all_gather(x, None, None, out, algorithm, timeout)
        if done is not None:
            return done
        return self._now(split_join.all_gather(self._position, x, out=out, algorithm=algorithm), timeout)

    def gather(self, x: Any, root: int = 0, *, algorithm: str = "auto", timeout: float | None = None) -> Array | None:
        """As `all_gather`, but only the root gets the result; None elsewhere.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.gather(np.zeros((2, 3)), root=0).shape
        (2, 3)
        """
        operation = split_join.gather(self._position, x, root, algorithm=algorithm)
        result: Array | None = self._now(operation, timeout)
        return result

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        counts: Counts | None = None,
        out: Any = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Any:
        """Reduce x over all ranks and return this rank's part of the first axis: an equal one, or as `counts` says.

        The result is a new array, or `out`, which must have room for exactly as many elements.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.reduce_scatter(np.arange(3), counts=[3])
        array([0, 1, 2])
        """
        if counts is None:
            done = self._fast_path.reduce_scatter(x, op, None, out, algorithm, timeout)
            if done is not None:
                return done
        operation = split_join.reduce_scatter(self._position, x, op, counts=counts, out=out, algorithm=algorithm)
        return self._now(operation, timeout)

    def scatter(
        self,
        x: Any = None,
        root: int = 0,
        *,
        counts: Counts | None = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Array:
        """This rank's part of the root's x along the first axis; x may be None on the others.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.scatter(np.arange(3), root=0)
        array([0, 1, 2])
        """
        operation = split_join.scatter(self._position, x, root, counts=counts, algorithm=algorithm)
        result: Array = self._now(operation, timeout)
        return result

    def all_to_all(
        self,
        x: Any,
        send_counts: Counts | None = None,
        recv_counts: Counts | None = None,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Array:
        """Send part j of x's first axis to rank j, and return what all ranks sent here, joined in rank order.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.all_to_all(np.arange(3), send_counts=[3])
        array([0, 1, 2])
        """
        operation = split_join.all_to_all(self._position, x, send_counts, recv_counts, algorithm=algorithm)
        result: Array = self._now(operation, timeout)
        return result

    def all_reduce_named(
        self, tensors: dict[str, Any], op: str = "sum", *, algorithm: str = "auto", timeout: float | None = None
    ) -> dict[str, Any]:
        """Reduce a dict of arrays in place, in one go; names and shapes that differ between ranks are named.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.all_reduce_named({"w": np.ones(2), "b": np.zeros(1)}, op="mean")
        {'w': array([1., 1.]), 'b': array([0.])}
        """
        self._now(named.all_reduce_named(self._position, tensors, op, algorithm=algorithm), timeout)
        return tensors

    def barrier(self, *, algorithm: str = "auto", timeout: float | None = None) -> None:
        """Return when every rank has called it.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.barrier()
        """
        if self._fast_path.barrier(None, None, None, None, algorithm, timeout) is None:
            self._now(elementwise.barrier(self._position, algorithm=algorithm), timeout)

    def broadcast_value(self, value: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """The root's JSON-like value, on every rank. One that cannot be sent is an error on all; the group goes on.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.broadcast_value({"epoch": 3})
        {'epoch': 3}
        """
        return self._now(values.broadcast_value(self._position, value, root), timeout)

    def all_gather_values(self, value: Any, *, timeout: float | None = None) -> list[Any]:
        """Every rank's JSON-like value, in rank order. One that cannot be sent is an error on all; the group goes on.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.all_gather_values({"loss": 0.5})
        [{'loss': 0.5}]
        """
        result: list[Any] = self._now(values.all_gather_values(self._position, value), timeout)
        return result
