"""The collectives of `Group`: each method tries the fast path first, and otherwise builds its operation and runs it."""

from __future__ import annotations

from typing import Any

from gradwire.arrays import Counts
from gradwire.group.runner import CollectiveRunner
from gradwire.group.work import bounded
from gradwire.liveness.call_log import call_site
from gradwire.operations import Operation, elementwise, named, split_join, values
from gradwire.operations.types import result_or_raise


class CollectiveCalls:
    """The methods of `Group` that all ranks call together.

    Every fast-path function takes (x, op, root, out, algorithm, timeout). It returns None if it did nothing; the call
    then takes the general path.
    """

    def __init__(self, runner: CollectiveRunner) -> None:
        self._runner = runner
        self._fast_path = runner.fast_path
        self._position = runner.position

    def _seconds(self, timeout: float | None) -> float:
        """Return the timeout of a call, or the group's timeout if the call has none."""
        return bounded(timeout) or self._runner.timeout

    def _now(self, operation: Operation, timeout: float | None) -> Any:
        return result_or_raise(self._runner.now(operation, self._seconds(timeout), call_site()))

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto", timeout: float | None = None
    ) -> Any:
        """Reduce x over all ranks. Every rank gets the result, with exactly the same bits.

        Half-precision types (float16, bfloat16) accumulate in float32. Integers wrap on overflow, and so do Python
        integers, at 64 bits. For booleans, sum is a logical or and prod a logical and.

        Args:
            x: An array, with the same number of elements and dtype on every rank, or a number. Strided arrays are
                allowed. The result replaces the contents of x, unless `out` is given.
            op: "sum", "mean", "min", "max" or "prod".
            out: An array for the result, with the dtype and number of elements of x; x then keeps its contents.
            algorithm: "auto", or a name from `group.capabilities.algorithms["all_reduce"]`.
            timeout: Seconds that this call may take. None means the group's timeout.

        Returns:
            x, or `out` if it was given. For a number: the reduced number.

        Raises:
            ArrayError: x cannot be used (read-only, not in CPU memory, unknown dtype), or `out` does not fit it.
            UnsupportedOp: The dtype has no such op (for example the mean of integers), or the algorithm does not exist.
            Broken: Another rank failed or called something else. See `Group`.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.all_reduce(2.5)
        2.5
        """
        done = self._fast_path.all_reduce(x, op, None, out, algorithm, timeout)
        if done is not None:
            return done
        return self._now(elementwise.all_reduce(self._position, x, op, out=out, algorithm=algorithm), timeout)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", timeout: float | None = None) -> Any:
        """Copy the root's x into x on every other rank.

        Args:
            x: An array, with the same number of elements and dtype on every rank.
            root: The rank whose x is copied.
            algorithm: "auto", or a name from `group.capabilities.algorithms["broadcast"]`.
            timeout: Seconds that this call may take. None means the group's timeout.

        Returns:
            x.

        Raises:
            ArrayError: x cannot be used (read-only on a rank that receives, not in CPU memory, unknown dtype).
            InvalidRank: The group has no rank `root`.
            Broken: Another rank failed or called something else. See `Group`.

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
        """Reduce x over all ranks into an array on the root. x keeps its contents.

        Args:
            x: An array, with the same number of elements and dtype on every rank.
            op: "sum", "mean", "min", "max" or "prod"; `all_reduce` explains them.
            root: The rank that gets the result.
            out: On the root, an array for the result, with the dtype and number of elements of x.
            algorithm: "auto", or a name from `group.capabilities.algorithms["reduce"]`.
            timeout: Seconds that this call may take. None means the group's timeout.

        Returns:
            On the root, a new array, or `out` if it was given. None on the other ranks.

        Raises:
            ArrayError: x cannot be used (not in CPU memory, unknown dtype), or `out` does not fit it.
            InvalidRank: The group has no rank `root`.
            UnsupportedOp: The dtype has no such op, or the algorithm does not exist.
            Broken: Another rank failed or called something else. See `Group`.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.reduce(np.ones(2), op="max", root=0)
        array([1., 1.])
        """
        return self._now(elementwise.reduce(self._position, x, op, root, out=out, algorithm=algorithm), timeout)

    def all_gather(self, x: Any, *, out: Any = None, algorithm: str = "auto", timeout: float | None = None) -> Any:
        """Join every rank's x along the first axis, in rank order. Every rank gets the result.

        Args:
            x: An array. The length of the first axis may differ between ranks, the other axes may not.
            out: An array for the result, with the dtype of x and exactly as many elements as all ranks' x together.
            algorithm: "auto", or a name from `group.capabilities.algorithms["all_gather"]`.
            timeout: Seconds that this call may take. None means the group's timeout.

        Returns:
            A new array, or `out` if it was given.

        Raises:
            ArrayError: x cannot be used (not in CPU memory, unknown dtype), or `out` does not fit the result. An `out`
                of the wrong size fails this rank's call only: the other ranks get their results.
            UnsupportedOp: The algorithm does not exist.
            Broken: Another rank failed or called something else. See `Group`.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.all_gather(np.zeros((2, 3))).shape
        (2, 3)
        """
        done = self._fast_path.all_gather(x, None, None, out, algorithm, timeout)
        if done is not None:
            return done
        return self._now(split_join.all_gather(self._position, x, out=out, algorithm=algorithm), timeout)

    def gather(
        self, x: Any, root: int = 0, *, out: Any = None, algorithm: str = "auto", timeout: float | None = None
    ) -> Any:
        """Join every rank's x along the first axis, in rank order, on the root.

        Args:
            x: An array. The length of the first axis may differ between ranks, the other axes may not.
            root: The rank that gets the result.
            out: On the root, an array for the result, with the dtype of x and exactly as many elements as all ranks' x
                together. Ignored on the other ranks.
            algorithm: "auto", or a name from `group.capabilities.algorithms["gather"]`.
            timeout: Seconds that this call may take. None means the group's timeout.

        Returns:
            On the root, a new array, or `out` if it was given. None on the other ranks.

        Raises:
            ArrayError: x cannot be used (not in CPU memory, unknown dtype), or `out` does not fit the result. An `out`
                of the wrong size fails the root's call only.
            InvalidRank: The group has no rank `root`.
            UnsupportedOp: The algorithm does not exist.
            Broken: Another rank failed or called something else. See `Group`.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.gather(np.zeros((2, 3)), root=0).shape
        (2, 3)
        """
        return self._now(split_join.gather(self._position, x, root, out=out, algorithm=algorithm), timeout)

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
        """Reduce x over all ranks and split the result along the first axis. Rank i gets part i.

        Args:
            x: An array, with the same shape and dtype on every rank. It keeps its contents.
            op: "sum", "mean", "min", "max" or "prod"; `all_reduce` explains them.
            counts: The number of rows of each rank's part. None means equal parts.
            out: An array for the result, with the dtype of x and exactly as many elements as this rank's part.
            algorithm: "auto", or a name from `group.capabilities.algorithms["reduce_scatter"]`.
            timeout: Seconds that this call may take. None means the group's timeout.

        Returns:
            This rank's part: a new array, or `out` if it was given.

        Raises:
            ArrayError: x cannot be used (not in CPU memory, unknown dtype), or `out` does not fit this rank's part.
            InvalidSize: `counts` do not add up to the rows of x, or without `counts` the rows cannot be split evenly.
            UnsupportedOp: The dtype has no such op, or the algorithm does not exist.
            Broken: Another rank failed or called something else. See `Group`.

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
        out: Any = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Any:
        """Split the root's x along the first axis. Rank i gets part i.

        Args:
            x: On the root, an array. Other ranks may pass None; what they pass is ignored.
            root: The rank whose x is split.
            counts: The number of rows of each rank's part. None means equal parts on the root, and no check elsewhere.
            out: An array for the result, with the dtype of the root's x and exactly as many elements as this rank's
                part.
            algorithm: "auto", or a name from `group.capabilities.algorithms["scatter"]`.
            timeout: Seconds that this call may take. None means the group's timeout.

        Returns:
            This rank's part: a new array, or `out` if it was given.

        Raises:
            ArrayError: The root passed no array, or one that cannot be used. Raised on every rank; the group stays
                usable. Or `out` does not fit this rank's part: that fails this rank's call only.
            InvalidSize: The root's `counts` do not add up to the rows of x, or without `counts` the rows cannot be
                split evenly. Raised on every rank; the group stays usable.
            InvalidRank: The group has no rank `root`.
            UnsupportedOp: The algorithm does not exist.
            Broken: Another rank failed, called something else, or passed other `counts`. See `Group`.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.scatter(np.arange(3), root=0)
        array([0, 1, 2])
        """
        operation = split_join.scatter(self._position, x, root, counts=counts, out=out, algorithm=algorithm)
        return self._now(operation, timeout)

    def all_to_all(
        self,
        x: Any,
        send_counts: Counts | None = None,
        recv_counts: Counts | None = None,
        *,
        out: Any = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Any:
        """Send part j of x to rank j, and return the parts that all ranks sent to this one, joined in rank order.

        Args:
            x: An array, split along its first axis.
            send_counts: The number of rows for each rank. None means equal parts.
            recv_counts: The number of rows that this rank expects from each rank. A difference is an error. None means
                that the numbers are not checked. If one rank passes any counts, every rank must pass some.
            out: An array for the result, with the dtype of x and exactly as many elements as this rank receives.
            algorithm: "auto", or a name from `group.capabilities.algorithms["all_to_all"]`.
            timeout: Seconds that this call may take. None means the group's timeout.

        Returns:
            The received parts: a new array, or `out` if it was given.

        Raises:
            ArrayError: x cannot be used (not in CPU memory, unknown dtype), or `out` does not fit the result. If only
                the other ranks know the size of the result, an `out` of the wrong size fails this rank's call only.
            InvalidSize: `send_counts` do not add up to the rows of x, or without them the rows cannot be split evenly.
            UnsupportedOp: The algorithm does not exist.
            Broken: Another rank failed, called something else, or sends other counts than `recv_counts`. See `Group`.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.all_to_all(np.arange(3), send_counts=[3])
        array([0, 1, 2])
        """
        operation = split_join.all_to_all(self._position, x, send_counts, recv_counts, out=out, algorithm=algorithm)
        return self._now(operation, timeout)

    def all_reduce_named(
        self, tensors: dict[str, Any], op: str = "sum", *, algorithm: str = "auto", timeout: float | None = None
    ) -> dict[str, Any]:
        """Reduce a dict of arrays over all ranks, in place and as one call.

        Small arrays of one dtype travel together. If names, shapes or dtypes differ between ranks, the error names the
        entries that differ. An array may appear under several names (tied weights).

        Args:
            tensors: Arrays by name, with the same names, shapes and dtypes on every rank. The order does not matter.
            op: "sum", "mean", "min", "max" or "prod"; `all_reduce` explains them.
            algorithm: "auto", or a name from `group.capabilities.algorithms["all_reduce"]`.
            timeout: Seconds that this call may take. None means the group's timeout.

        Returns:
            `tensors`.

        Raises:
            ArrayError: `tensors` is not a dict with string keys, or an array cannot be used (read-only, not in CPU
                memory, unknown dtype).
            UnsupportedOp: A dtype has no such op, or the algorithm does not exist.
            Broken: Another rank failed or called something else. See `Group`.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.all_reduce_named({"w": np.ones(2), "b": np.zeros(1)}, op="mean")
        {'w': array([1., 1.]), 'b': array([0.])}
        """
        self._now(named.all_reduce_named(self._position, tensors, op, algorithm=algorithm), timeout)
        return tensors

    def barrier(self, *, algorithm: str = "auto", timeout: float | None = None) -> None:
        """Wait until every rank has called this.

        Args:
            algorithm: "auto", or a name from `group.capabilities.algorithms["all_reduce"]`.
            timeout: Seconds that this call may take. None means the group's timeout.

        Raises:
            UnsupportedOp: The algorithm does not exist.
            Broken: Another rank failed or called something else. See `Group`.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.barrier()
        """
        if self._fast_path.barrier(None, None, None, None, algorithm, timeout) is None:
            self._now(elementwise.barrier(self._position, algorithm=algorithm), timeout)

    def broadcast_value(self, value: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """Return the root's value on every rank.

        Args:
            value: On the root, a JSON-like value: numbers, strings, booleans, None, lists and dicts with string keys.
                It arrives as JSON would return it: tuples become lists, and NumPy's numbers become Python numbers.
                Other ranks may omit it.
            root: The rank whose value is sent.
            timeout: Seconds that this call may take. None means the group's timeout.

        Raises:
            ArrayError: The value is not JSON-like. Raised on every rank; the group stays usable.
            InvalidSize: The value takes more than 256 MiB. Raised on every rank; the group stays usable.
            InvalidRank: The group has no rank `root`.
            Broken: Another rank failed or called something else. See `Group`.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.broadcast_value({"epoch": 3})
        {'epoch': 3}
        """
        return self._now(values.broadcast_value(self._position, value, root), timeout)

    def all_gather_values(self, value: Any, *, timeout: float | None = None) -> list[Any]:
        """Return the values of all ranks, as a list in rank order.

        Args:
            value: A JSON-like value: numbers, strings, booleans, None, lists and dicts with string keys. It arrives as
                JSON would return it: tuples become lists, and NumPy's numbers become Python numbers. Its type may
                differ between ranks.
            timeout: Seconds that this call may take. None means the group's timeout.

        Raises:
            ArrayError: A rank's value is not JSON-like. Raised on every rank; the group stays usable.
            InvalidSize: A rank's value takes more than 256 MiB. Raised on every rank; the group stays usable.
            Broken: Another rank failed or called something else. See `Group`.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.all_gather_values({"loss": 0.5})
        [{'loss': 0.5}]
        """
        result: list[Any] = self._now(values.all_gather_values(self._position, value), timeout)
        return result
