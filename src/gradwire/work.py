"""Handles of collectives that run beside the program, and the queues they wait in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gradwire import operations
from gradwire.errors import Timeout
from gradwire.liveness.calls import call_site
from gradwire.operations import Operation

if TYPE_CHECKING:
    from gradwire.group import Group

log = logging.getLogger("gradwire")


class Work:
    """A collective that was queued. Its result is there after `wait()`; an error it met is raised by `wait()`.

    An error that nobody waits for is logged when the handle goes away.
    """

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._heeded = True

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the work is done and return its result; `Timeout` leaves work and group as they are.

        >>> import gradwire as gw, numpy as np
        >>> [group] = gw.local_group(1)
        >>> group.stream().all_reduce(np.ones(2)).wait()
        array([1., 1.])
        >>> group.close()
        """
        if not self._done.wait(timeout):
            raise Timeout(
                f"{self.operation} was not done in {timeout:g} s; it goes on", operation=self.operation, seconds=timeout
            )
        if self._error is not None:
            self._heeded = True
            raise self._error
        return self._result

    @property
    def done(self) -> bool:
        """Whether it has run, well or badly."""
        return self._done.is_set()

    @property
    def result(self) -> Any:
        """What the collective returned; waits for it."""
        return self.wait()

    def heed(self) -> BaseException | None:
        """The error, if there is one; from now on somebody knows of it."""
        self._heeded = True
        return self._error

    def run(self, body: Callable[[], Any], *, first_error: bool) -> bool:
        """Do the work; True if it went well. Of a chain of failures only the first is worth a line in the log."""
        try:
            self._result = body()
        except BaseException as error:
            self._error = error
            self._heeded = not first_error
        self._done.set()
        return self._error is None

    def __del__(self) -> None:
        if not self._heeded and self._error is not None:
            log.error("%s failed and nobody waited for it: %s", self.operation, self._error)


class Stream:
    """A queue of a group's collectives. Each call returns a `Work`; errors come out of `wait()` and `synchronize()`."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._works: list[Work] = []

    def _later(self, operation: Operation, timeout: float | None) -> Work:
        work = self._group._runner.later(operation, self._group._seconds(timeout), call_site())
        self._works = [*(one for one in self._works if not one.done or one._error is not None), work]
        return work

    def synchronize(self, timeout: float | None = None) -> None:
        """Return when everything queued so far has run; raises the first error that none has waited for."""
        seconds = self._group._seconds(timeout)
        deadline = time.monotonic() + seconds
        works, self._works = self._works, []
        first: BaseException | None = None
        for position, work in enumerate(works):
            if not work._done.wait(max(0.0, deadline - time.monotonic())):
                self._works = [*works[position:], *self._works]
                work.wait(1e-9)
            first = first or work.heed()
        if first is not None:
            raise first

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto", timeout: float | None = None
    ) -> Work:
        """`Group.all_reduce`, queued."""
        return self._later(operations.all_reduce(x, op, out, algorithm), timeout)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", timeout: float | None = None) -> Work:
        """`Group.broadcast`, queued."""
        group = self._group
        return self._later(operations.broadcast(x, root, group.size, group.rank, algorithm), timeout)

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
        """`Group.reduce`, queued."""
        group = self._group
        return self._later(operations.reduce(x, op, root, out, group.size, group.rank, algorithm), timeout)

    def all_gather(self, x: Any, *, algorithm: str = "auto", timeout: float | None = None) -> Work:
        """`Group.all_gather`, queued."""
        return self._later(operations.all_gather(x, algorithm), timeout)

    def gather(self, x: Any, root: int = 0, *, algorithm: str = "auto", timeout: float | None = None) -> Work:
        """`Group.gather`, queued."""
        return self._later(operations.gather(x, root, self._group.size, algorithm), timeout)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Work:
        """`Group.reduce_scatter`, queued."""
        group = self._group
        return self._later(operations.reduce_scatter(x, op, counts, group.size, group.rank, algorithm), timeout)

    def scatter(
        self,
        x: Any = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Work:
        """`Group.scatter`, queued."""
        group = self._group
        return self._later(operations.scatter(x, root, counts, group.size, group.rank, algorithm), timeout)

    def all_to_all(
        self,
        x: Any,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Work:
        """`Group.all_to_all`, queued."""
        operation = operations.all_to_all(x, send_counts, recv_counts, self._group.size, algorithm)
        return self._later(operation, timeout)

    def all_reduce_named(
        self, tensors: dict[str, Any], op: str = "sum", *, algorithm: str = "auto", timeout: float | None = None
    ) -> Work:
        """`Group.all_reduce_named`, queued."""
        return self._later(operations.all_reduce_named(tensors, op, algorithm), timeout)

    def barrier(self, *, algorithm: str = "auto", timeout: float | None = None) -> Work:
        """`Group.barrier`, queued."""
        return self._later(operations.barrier(algorithm), timeout)
