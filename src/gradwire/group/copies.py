"""`Copies`: copies of an array from one rank to another, made now or queued on a stream.

Copies from one rank to another are matched in the program's order on both ranks, whether they are queued or not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from gradwire import arrays
from gradwire.arrays import View, raw, view
from gradwire.errors import ArrayError, GradwireError, Timeout
from gradwire.generation.message_format import OutgoingMessage
from gradwire.generation.messages import COPY_TAG
from gradwire.group.point_to_point import PointToPoint
from gradwire.group.work import Work
from gradwire.operations.types import Declined, Exchange, Operation, check_rank


class Copies:
    """The copies of one group."""

    def __init__(self, messages: PointToPoint) -> None:
        self._messages = messages
        self._queued: dict[tuple[int, int], Work] = {}  # the last queued copy, by source and destination
        self._lock = threading.Lock()

    def run_now(self, x: Any, y: Any, src: int, dst: int, seconds: float) -> None:
        """Make a copy on this thread, after the queued copies from the same rank to the same rank."""
        src, dst = self._ranks(src, dst)
        copy = self._prepared(x, y, src, dst)
        began = time.monotonic()
        with self._lock:
            earlier = self._queued.get((src, dst))
        if earlier is not None and not earlier.await_end(seconds):
            raise Timeout(
                f"copy from rank {src} to rank {dst} waited {seconds:g} s for an earlier copy on a stream",
                operation="copy",
                seconds=seconds,
            )
        copy(max(0.001, seconds - (time.monotonic() - began)))

    def queue(self, x: Any, y: Any, src: int, dst: int, seconds: float, queue: Callable[[Operation], Work]) -> Work:
        """Queue a copy. `queue` adds an operation to the group's order."""
        src, dst = self._ranks(src, dst)
        copy = self._prepared(x, y, src, dst)

        def body(exchange: Exchange) -> Declined | None:
            try:
                copy(seconds)
            except GradwireError as error:
                if not self._messages.usable():
                    raise
                return Declined(error)  # no other rank waits in a collective for this one: the group stays usable
            return None

        with self._lock:  # so that the program's last call is the last entry
            work = queue(Operation("copy", body))
            self._queued[src, dst] = work
        return work

    def _ranks(self, src: int, dst: int) -> tuple[int, int]:
        size = len(self._messages.members)
        return check_rank(src, size, "src"), check_rank(dst, size, "dst")

    def _prepared(self, x: Any, y: Any, src: int, dst: int) -> Callable[[float], None]:
        """Return a function that makes this rank's part of a copy in a number of seconds. The arrays are checked."""
        messages = self._messages
        if messages.rank == src == dst:
            source, target = view(x, writable=False), view(y, writable=True)
            _check_fit(source, target)
            return lambda seconds: _copy_here(source, target)
        if messages.rank == src:
            given = view(x, writable=False)
            return lambda seconds: messages.send(OutgoingMessage.of(given), dst, COPY_TAG, seconds, "copy")
        if messages.rank == dst:
            result = view(y, writable=True)
            return lambda seconds: self._receive(result, src, seconds)
        return lambda seconds: None

    def _receive(self, target: View, src: int, seconds: float) -> None:
        request = self._messages.post_request(raw(target.flat), src, COPY_TAG, copied=target.dtype)
        self._messages.finish_request(request, seconds, "copy")
        target.store()


def _check_fit(source: View, target: View) -> None:
    if source.dtype != target.dtype or source.flat.size != target.flat.size:
        raise ArrayError(f"{arrays.describe(source.array)} does not fit {arrays.describe(target.array)}")


def _copy_here(source: View, target: View) -> None:
    target.flat[:] = source.load().copy()
    target.store()
