"""All ranks of a generation exchange small values outside of any group: who they are, and where they stand.

Each rank's value goes to all others over the control links, which are there before anything else is; so this needs no
links of its own, no memory and no schedule. Rounds are numbered, and one is over when all values are there. They are in
a log of calls: a rank that does not come is named, and so are ranks that exchange different things.
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

GATHERS = 2  # as a group; the first one is the world
ENVELOPE_BYTES = 256  # of a control message, around a value

Contribution = tuple[str, Any]  # the operation, and the value


class GatherRounds:
    """The values that have arrived, by round and rank; any thread may add and await them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = CallLog(GATHERS, range(size))
        self.changed = threading.Condition()
        self._arrived: dict[int, dict[int, Contribution]] = {}

    def begin(self, rank: int, operation: str, value: Any) -> tuple[int, dict[int, Contribution]]:
        """Begin the next round with this rank's value: its number, and the values as they arrive."""
        meaning = CallDescription(operation, f"{operation}()", fingerprint("parley", operation))  # as the wire has it
        with self.changed:
            number = self.calls.record(meaning, call_site())
            arrived = self._arrived.setdefault(number, {})
            arrived[rank] = operation, value
        return number, arrived

    def receive(self, peer: int, number: int, operation: str, value: Any) -> None:
        """A rank has sent its value: of this round, or, if it has everybody's, of the next; ValueError otherwise."""
        with self.changed:
            begun = self.calls.sequence
            expected = max(begun, self.calls.finished + 1) <= number <= begun + 1
            if not expected or peer in self._arrived.get(number, {}):
                raise ValueError(f"it sends a value of round {number} out of turn, this is round {begun}")
            arrived = self._arrived.setdefault(number, {})
            arrived[peer] = operation, value
            if len(arrived) == self.size:  # nobody waits for less
                self.changed.notify_all()

    def end(self, number: int) -> None:
        """A round is over on this rank."""
        self.calls.finished = number
        with self.changed:
            del self._arrived[number]

    def wake(self) -> None:
        """Let threads that wait look around: the generation has broken or ended."""
        with self.changed:
            self.changed.notify_all()


class ControlGather:
    """This rank's part in the rounds; one at a time."""

    def __init__(self, failure: FailurePath, rounds: GatherRounds) -> None:
        self._failure = failure
        self._rounds = rounds
        failure.control.watch(rounds.calls, announced=False)

    @property
    def rounds(self) -> int:
        """How many have begun; the same on all ranks that have come as far."""
        return self._rounds.calls.sequence

    def gather(self, value: Any, operation: str, timeout: float) -> list[Any]:
        """Everybody's value, by rank; all call it together. `operation` is what errors call it."""
        return self.begin_gather(value, operation, timeout)()

    def begin_gather(self, value: Any, operation: str, timeout: float) -> Callable[[], list[Any]]:
        """The same, for a caller that has something to do meanwhile: what this returns waits for the others."""
        failure, control = self._failure, self._failure.control
        if failure.closed:  # before any lock: in a forked child nobody may be there to release it
            failure.check(operation)
        if len(json.dumps(value)) > MAX_CONTROL - ENVELOPE_BYTES:
            raise InvalidSize(f"{operation} cannot tell all ranks so much: more than {MAX_CONTROL} bytes")
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
        """Whatever goes wrong in a round, others wait for this rank: then no rank can go on."""
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
