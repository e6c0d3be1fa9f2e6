"""Streams: queues of a group's collectives that run beside the program."""

from __future__ import annotations

import threading
import time
from typing import Any

from gradwire import operations
from gradwire.arrays import Counts
from gradwire.errors import Timeout
from gradwire.group.runner import CollectiveRunner
from gradwire.group.work import Work, bounded
from gradwire.liveness.call_log import call_site
from gradwire.operations import Operation

CROWDED = 64  # works that a stream keeps before it looks which of them are done


class Stream:
    """A queue of a group's collectives. Each call returns a `Work`; errors come out of `wait()` and `synchronize()`.

    The methods are those of `Group`, with the same arguments; arrays belong to the stream until their work is done.

    >>> import gradwire as gw, numpy as np
    >>> with gw.init() as group:
    ...     stream = group.stream()
    ...     works = [stream.all_reduce(np.full(2, i)) for i in range(3)]
    ...     stream.synchronize()
    >>> works[2].result
    array([2, 2])
    """

    def __init__(self, runner: CollectiveRunner) -> None:
        """For `Group.stream`, which makes streams."""
        self._runner = runner
        self._lock = threading.Lock()
        self._works: list[Work] = []  # those that synchronize() still has to look at
        self._crowded = CROWDED

    def __repr__(self) -> str:
        pending = sum(not work.done for work in self._works)
        return f"<gradwire.Stream of <gradwire.Group {self._runner}>, {pending} pending>"

    def _queue(self, operation: Operation, timeout: float | None) -> Work:
        runner = self._runner
        work = runner.later(operation, bounded(timeout) or runner.timeout, call_site())
        with self._lock:
            self._works.append(work)
            if len(self._works) >= self._crowded:  # of those that went well there is nothing more to say
                self._works = [one for one in self._works if not one.done or one._error is not None]
                self._crowded = max(CROWDED, 2 * len(self._works))
        return work

    def synchronize(self, timeout: float | None = None) -> None:
        """Return when everything queued so far has run; raises the first error among it.

        Without a timeout it waits for as long as the collectives themselves may take; `Timeout` leaves them running.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.stream().synchronize()
        """
        seconds = bounded(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            works = list(self._works)
        if works:
            works[-1].hurry(here=deadline is None)
        late = next((work for work in works if not work._done.wait(_left(deadline))), None)
        ended = {work for work in works if work.done}
        first = next((work._error for work in works if work in ended and work._error is not None), None)
        if late is not None and first is None:
            raise Timeout(
                f"{len(works) - len(ended)} of {len(works)} works were not done in {timeout:g} s; they go on",
                operation=late.operation,
                seconds=timeout,
            )
        for work in ended:
            work.heed()
        with self._lock:
            self._works = [work for work in self._works if work not in ended]
        if first is not None:
            raise first

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto", timeout: float | None = None
    ) -> Work:
        """`Group.all_reduce`, queued.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().all_reduce(np.ones(2), op="mean").wait()
        array([1., 1.])
        """
        return self._queue(operations.all_reduce(x, op, out, algorithm), timeout)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", timeout: float | None = None) -> Work:
        """`Group.broadcast`, queued.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().broadcast(np.ones(2), root=0).wait()
        array([1., 1.])
        """
        runner = self._runner
        return self._queue(operations.broadcast(x, root, runner.size, runner.rank, algorithm), timeout)

    def reduce(
        self,
        x: Any,
        op: str = "sum",
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Work:
        """`Group.reduce`, queued.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().reduce(np.ones(2), root=0).wait()
        array([1., 1.])
        """
        runner = self._runner
        return self._queue(operations.reduce(x, op, root, out, runner.size, runner.rank, algorithm), timeout)

    def all_gather(self, x: Any, *, out: Any = None, algorithm: str = "auto", timeout: float | None = None) -> Work:
        """`Group.all_gather`, queued.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().all_gather(np.ones((2, 3))).wait().shape
        (2, 3)
        """
        return self._queue(operations.all_gather(x, out, algorithm), timeout)

    def gather(self, x: Any, root: int = 0, *, algorithm: str = "auto", timeout: float | None = None) -> Work:
        """`Group.gather`, queued.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().gather(np.ones((2, 3))).wait().shape
        (2, 3)
        """
        return self._queue(operations.gather(x, root, self._runner.size, algorithm), timeout)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        counts: Counts | None = None,
        out: Any = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Work:
        """`Group.reduce_scatter`, queued.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().reduce_scatter(np.ones(2)).wait()
        array([1., 1.])
        """
        runner = self._runner
        return self._queue(operations.reduce_scatter(x, op, counts, out, runner.size, runner.rank, algorithm), timeout)

    def scatter(
        self,
        x: Any = None,
        root: int = 0,
        *,
        counts: Counts | None = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Work:
        """`Group.scatter`, queued.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().scatter(np.ones(2)).wait()
        array([1., 1.])
        """
        runner = self._runner
        return self._queue(operations.scatter(x, root, counts, runner.size, runner.rank, algorithm), timeout)

    def all_to_all(
        self,
        x: Any,
        send_counts: Counts | None = None,
        recv_counts: Counts | None = None,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Work:
        """`Group.all_to_all`, queued.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().all_to_all(np.ones(2)).wait()
        array([1., 1.])
        """
        operation = operations.all_to_all(x, send_counts, recv_counts, self._runner.size, algorithm)
        return self._queue(operation, timeout)

    def all_reduce_named(
        self, tensors: dict[str, Any], op: str = "sum", *, algorithm: str = "auto", timeout: float | None = None
    ) -> Work:
        """`Group.all_reduce_named`, queued.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group: group.stream().all_reduce_named({"w": np.ones(2)}).wait()
        {'w': array([1., 1.])}
        """
        return self._queue(operations.all_reduce_named(tensors, op, algorithm), timeout)

    def barrier(self, *, algorithm: str = "auto", timeout: float | None = None) -> Work:
        """`Group.barrier`, queued.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.stream().barrier().wait()
        """
        return self._queue(operations.barrier(algorithm), timeout)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
