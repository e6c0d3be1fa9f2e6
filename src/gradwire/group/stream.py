"""`Stream`: a queue of a group's collectives that run while the program continues."""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from gradwire.errors import Timeout
from gradwire.group.collective_calls import CollectiveCalls
from gradwire.group.copies import Copies
from gradwire.group.runner import CollectiveRunner
from gradwire.group.work import Work, bounded
from gradwire.liveness.call_log import call_site
from gradwire.operations import COLLECTIVES, Operation

Parameters = ParamSpec("Parameters")
CLEANUP_SIZE = 64  # a stream with this many works drops those that are done


def queued(
    method: Callable[Concatenate[CollectiveCalls, Parameters], Any],
) -> Callable[Concatenate[Stream, Parameters], Work]:
    """Return the `Stream` method for a method of `Group`: it has the same parameters, queues the call and returns a
    `Work`."""
    name = method.__name__
    build = COLLECTIVES[name].build

    def queue(self: Stream, /, *args: Parameters.args, **keywords: Parameters.kwargs) -> Work:
        timeout: Any = keywords.pop("timeout", None)
        return self._queue(build(self._position, *args, **keywords), timeout)

    queue.__name__, queue.__qualname__ = name, f"Stream.{name}"
    # The group's documentation, with an example that calls the stream.
    described = inspect.cleandoc(method.__doc__ or "")
    described = re.sub(rf"\bgroup\.{name}\((.*)\)", rf"group.stream().{name}(\1).result", described)
    queue.__doc__ = (
        f"Queue `Group.{name}` and return its `Work` at once.\n\n"
        "The arguments are those of the group's method. Wrong arguments raise here, and nothing is queued.\n"
        "`Work.wait` returns the result and raises the errors of the call itself.\n\n"
        f"What `Group.{name}` does:\n\n{described}"
    )
    queue.__signature__ = inspect.signature(method).replace(return_annotation="Work")  # type: ignore[attr-defined]
    return queue


class Stream:
    """A queue of a group's collectives that run while the program continues. `Group.stream` makes it.

    A stream has the array collectives of `Group` and `copy`, with the same arguments. Each call returns a `Work` at
    once. The calls run in the order of the program's calls on the group and on all of its streams. Do not change or
    read the arrays of a call until its work is done. `Work.wait` and `synchronize` raise the errors.

    >>> import gradwire as gw, numpy as np
    >>> with gw.init() as group:
    ...     stream = group.stream()
    ...     works = [stream.all_reduce(np.full(2, i)) for i in range(3)]
    ...     stream.synchronize()
    >>> works[2].result
    array([2, 2])
    """

    def __init__(self, runner: CollectiveRunner, copies: Copies) -> None:
        """Use `Group.stream` to make a stream."""
        self._runner = runner
        self._copies = copies
        self._position = runner.position
        self._lock = threading.Lock()
        self._works: list[Work] = []  # works that synchronize() has not checked yet
        self._cleanup_size = CLEANUP_SIZE

    def __repr__(self) -> str:
        pending = sum(not work.done for work in self._works)
        return f"<gradwire.Stream of <gradwire.Group {self._runner}>, {pending} pending>"

    def copy(self, x: Any, y: Any, src: int, dst: int, timeout: float | None = None) -> Work:
        """Queue `Group.copy` and return its `Work` at once.

        The copy takes its place among the other calls of this rank: on rank `src` it reads x after the earlier calls of
        the group and its streams, and on rank `dst` it writes y after the earlier calls there. Later calls wait for it.
        A copy that fails does not break the group.

        The arguments are those of `Group.copy`.

        Raises:
            ArrayError: An array cannot be used. `Work.wait` raises it if the dtypes on two ranks differ.
            InvalidRank: The group has no such rank.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> sent = one.stream().copy(np.arange(3), None, src=0, dst=1)
        >>> y = np.zeros(3, int); two.stream().copy(None, y, src=0, dst=1).wait(); y
        array([0, 1, 2])
        >>> sent.wait(); one.close(); two.close()
        """
        seconds = bounded(timeout) or self._runner.timeout
        return self._copies.queue(x, y, src, dst, seconds, lambda operation: self._queue(operation, seconds))

    def _queue(self, operation: Operation, timeout: float | None) -> Work:
        runner = self._runner
        work = runner.later(operation, bounded(timeout) or runner.timeout, call_site())
        with self._lock:
            self._works.append(work)
            if len(self._works) >= self._cleanup_size:  # synchronize() needs only pending and failed works
                self._works = [one for one in self._works if not one.done or one._error is not None]
                self._cleanup_size = max(CLEANUP_SIZE, 2 * len(self._works))
        return work

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until everything queued on this stream so far has run.

        Args:
            timeout: Seconds to wait. None means no limit, but each collective still ends at its own timeout.

        Raises:
            Timeout: Some works were not done in time. They keep running, and the group stays usable.
            GradwireError: The first error among the works, if one failed.

        >>> import gradwire as gw
        >>> with gw.init() as group: group.stream().synchronize()
        """
        seconds = bounded(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            works = list(self._works)
        if works:
            works[-1].expedite(on_this_thread=deadline is None)
        late = next((work for work in works if not work._done.wait(_remaining(deadline))), None)
        ended = {work for work in works if work.done}
        first = next((work._error for work in works if work in ended and work._error is not None), None)
        if late is not None and first is None:
            raise Timeout(
                f"{len(works) - len(ended)} of {len(works)} works were not done in {timeout:g} s; they keep running",
                operation=late.operation,
                seconds=timeout,
            )
        for work in ended:
            work.acknowledge_error()
        with self._lock:
            self._works = [work for work in self._works if work not in ended]
        if first is not None:
            raise first

    all_reduce = queued(CollectiveCalls.all_reduce)
    broadcast = queued(CollectiveCalls.broadcast)
    reduce = queued(CollectiveCalls.reduce)
    all_gather = queued(CollectiveCalls.all_gather)
    gather = queued(CollectiveCalls.gather)
    reduce_scatter = queued(CollectiveCalls.reduce_scatter)
    scatter = queued(CollectiveCalls.scatter)
    all_to_all = queued(CollectiveCalls.all_to_all)
    all_reduce_named = queued(CollectiveCalls.all_reduce_named)
    barrier = queued(CollectiveCalls.barrier)


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
