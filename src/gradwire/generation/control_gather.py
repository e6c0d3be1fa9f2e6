"""Exchanges small values between all ranks of a generation, outside of any group.

Each rank sends its value to all others over the control links. These links are the first to open, so a gather needs no
other links, no shared memory and no schedule. Rounds are numbered, and a round ends when all values have arrived. A
call log records them, so that errors can name a missing rank, and ranks that gather for different purposes.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gradwire.errors import Broken, Closed, InvalidSize
from gradwire.generation.failure_path import FailurePath
from gradwire.generation.waiting import DRAIN_SECONDS, OperationWait
from gradwire.liveness.call_log import CallDescription, CallLog, call_site
from gradwire.liveness.verdict import disagreement
from gradwire.wire import MAX_CONTROL, fingerprint

GATHERS = 2  # the group number of the gathers' call log; the world is group 1
ENVELOPE_BYTES = 256  # of a control message, without the value

Contribution = tuple[str, Any]  # the operation, and the value


class GatherRounds:
    """The values that have arrived, by round and rank. Thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = CallLog(GATHERS, range(size))
        self.changed = threading.Condition()
        self._arrived: dict[int, dict[int, Contribution]] = {}

    def begin(self, rank: int, operation: str, value: Any) -> tuple[int, dict[int, Contribution]]:
        """Begin the next round with this rank's value. Return its number, and a dict that fills as values arrive."""
        # "parley" is part of the wire format: ranks of other versions compute the same fingerprint.
        meaning = CallDescription(operation, f"{operation}()", fingerprint("parley", operation))
        with self.changed:
            number = self.calls.record(meaning, call_site())
            arrived = self._arrived.setdefault(number, {})
            arrived[rank] = operation, value
        return number, arrived

    def receive(self, peer: int, number: int, operation: str, value: Any) -> None:
        """Store a peer's value, of this round or of the next one; raise ValueError for any other round.

        A peer that has all values of this round may already send its value of the next one.
        """
        with self.changed:
            begun = self.calls.sequence
            expected = max(begun, self.calls.finished + 1) <= number <= begun + 1
            if not expected or peer in self._arrived.get(number, {}):
                raise ValueError(f"unexpected value of round {number}; the current round is {begun}")
            arrived = self._arrived.setdefault(number, {})
            arrived[peer] = operation, value
            if len(arrived) == self.size:  # waiting threads need all values
                self.changed.notify_all()

    def end(self, number: int) -> None:
        """End a round on this rank."""
        self.calls.finished = number
        with self.changed:
            del self._arrived[number]

    def wake(self) -> None:
        """Wake the waiting threads, because the generation has broken or ended."""
        with self.changed:
            self.changed.notify_all()


class ControlGather:
    """This rank's side of the gathers, one round at a time."""

    def __init__(self, failure: FailurePath, rounds: GatherRounds) -> None:
        self._failure = failure
        self._rounds = rounds
        failure.control.watch(rounds.calls, announced=False)

    @property
    def rounds(self) -> int:
        """The number of rounds that have begun. Ranks in the same round have the same number."""
        return self._rounds.calls.sequence

    def gather(self, value: Any, operation: str, timeout: float) -> list[Any]:
        """Return the values of all ranks, in rank order. All ranks call it together.

        `operation` is the name of this gather in errors.
        """
        return self.begin_gather(value, operation, timeout)()

    def begin_gather(self, value: Any, operation: str, timeout: float) -> Callable[[], list[Any]]:
        """Send this rank's value, and return a function that waits for the values of all ranks and returns them."""
        failure, control = self._failure, self._failure.control
        if failure.closed:  # before any lock: in a forked child its holder may not exist
            failure.check(operation)
        if len(json.dumps(value)) > MAX_CONTROL - ENVELOPE_BYTES:
            raise InvalidSize(f"the value of {operation} is too large for a control message of {MAX_CONTROL} bytes")
        number, arrived = self._rounds.begin(failure.identity.rank, operation, value)
        with self._or_break(operation):
            if not control.intact:
                control.called(time.monotonic())
                failure.check(operation)
            control.share(number, operation, value)
        wait = OperationWait(failure, self._rounds.calls, operation, number, timeout)
        return partial(self._collect, number, arrived, wait)

    @contextlib.contextmanager
    def _or_break(self, operation: str) -> Iterator[None]:
        """Break the generation if an exception ends a round here: the other ranks wait for this rank's value."""
        try:
            yield
        except (Broken, Closed):
            raise
        except BaseException as error:
            self._failure.interrupt(operation, error)
            raise

    def _collect(self, number: int, arrived: dict[int, Contribution], wait: OperationWait) -> list[Any]:
        with self._or_break(wait.operation):
            self._await(arrived, wait)
        self._rounds.end(number)
        if len({operation for operation, _ in arrived.values()}) > 1:
            self._failure.control.report(disagreement(self._rounds.calls, number), time.monotonic())
            raise wait.broken()
        return [arrived[peer][1] for peer in range(self._rounds.size)]

    def _await(self, arrived: dict[int, Contribution], wait: OperationWait) -> None:
        failure, size, changed = self._failure, self._rounds.size, self._rounds.changed
        gone: set[int] = set()
        while True:
            left = {peer for peer in range(size) if failure.control.has_left(peer)} | gone
            missing = [peer for peer in range(size) if peer not in arrived]
            if not missing:
                return
            if lost := left.intersection(missing):
                raise wait.lost(min(lost))
            pause = wait.poll()
            gone = {peer for peer in missing if failure.transport.gone(peer)}
            with changed:
                changed.wait_for(
                    lambda: len(arrived) == size or failure.closed or not failure.control.intact,
                    DRAIN_SECONDS if gone else pause,
                )
