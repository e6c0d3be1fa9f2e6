"""How an operation of a group waits: it logs slow waits, ends at its timeout, and finds the error to raise."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from gradwire.errors import Closed, GradwireError
from gradwire.generation.failure_path import ANSWER_SECONDS, FailurePath
from gradwire.liveness.call_log import CallLog
from gradwire.liveness.control_messages import Position
from gradwire.liveness.verdict import Finding, disagreement
from gradwire.transports.base import Link
from gradwire.wire import WireError, parse

log = logging.getLogger("gradwire")

SLOW_SECONDS = 5.0
DRAIN_SECONDS = 0.2  # after a rank's goodbye, in which its last messages may still arrive
POLL_SECONDS = 0.25  # between checks for events that ring no bell, such as the end of an in-process rank's thread


class SlowWait:
    """Computes when a long wait is logged: after 5, 10, 20 … seconds."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.due = began + SLOW_SECONDS

    def reported(self, now: float) -> None:
        self.due = now + (now - self.began)


def is_lowest_waiting(rank: int, sequence: int, positions: Mapping[int, Position]) -> bool:
    """Return whether `rank` is the lowest rank that waits in a call, by the positions of the ranks that answered.

    A rank that is late, has finished the call, or does not answer will not log the wait.
    """
    waiting = (peer for peer, place in positions.items() if place.finished < sequence <= place.sequence)
    return all(rank < peer for peer in waiting)


class OperationWait:
    """The wait strategy of one operation, which an executor calls while it cannot progress."""

    def __init__(self, failure: FailurePath, calls: CallLog, operation: str, sequence: int, timeout: float) -> None:
        self._failure = failure
        self._calls = calls
        self.operation = operation
        self.sequence = sequence
        self.timeout = timeout
        self._slow_wait: SlowWait | None = None  # made when the operation waits for the first time
        self._deadline = 0.0
        self._last_poll = False

    def during(self) -> str:
        """Return the part of an error message that names this call: ` during all_reduce #812, train.py:88`."""
        call = self._calls.call(self.sequence)
        return self._failure.during(f"{self.operation} #{self.sequence}", call.site if call else "")

    def wait(self, reads: Iterable[Link], writes: Iterable[Link]) -> None:
        """Wait until there may be something to do. Raise if the group is broken or the time is over."""
        failure = self._failure
        failure.transport.wait(reads, writes, failure.alarm, self._pause(time.monotonic()))
        self.poll(reads, writes)

    def poll(self, reads: Iterable[Link] = (), writes: Iterable[Link] = ()) -> float:
        """Check what `wait` checks, without waiting. Return the seconds after which to check again."""
        failure = self._failure
        if self._calls.closed or failure.closed:
            raise self.broken()
        if not failure.control.intact:
            # Let the executor process data that has arrived: other ranks may need this rank's next call to explain a
            # mismatch.
            if self._last_poll:
                raise self.broken()
            self._last_poll = True
            return 0.0
        now = time.monotonic()
        slow_wait = self._begun(now)
        for link in {*reads, *writes}:
            if failure.transport.gone(link.peer):
                failure.control.lost(link.peer, now, "ended its thread")
                raise self.broken()
        if now >= self._deadline:
            raise self._timed_out()
        if now >= slow_wait.due:
            slow_wait.reported(now)
            self._log_slow(now - slow_wait.began)
        return self._pause(time.monotonic())

    def _log_slow(self, waited: float) -> None:
        """Log which ranks are late: one line for all ranks that wait in this call."""
        rank = self._failure.identity.rank
        positions = self._positions()
        if is_lowest_waiting(rank, self.sequence, positions):
            late = self._late(positions)
            log.warning("rank %d has waited %.0f s%s: %s", rank, waited, self.during(), self._describe(late))

    def _begun(self, now: float) -> SlowWait:
        if self._slow_wait is None:
            self._slow_wait = SlowWait(now)
            self._deadline = now + self.timeout
        return self._slow_wait

    def _pause(self, now: float) -> float:
        due = self._begun(now).due
        return max(0.0, min(self._deadline, due, now + POLL_SECONDS) - now)

    def broken(self) -> GradwireError:
        """Return the error to raise when the group cannot be used any more."""
        if self._failure.closed or (self._calls.closed and self._failure.control.intact):
            return Closed("the group was closed", operation=self.operation)
        return self._failure.error(self.operation, self.during())

    def lost(self, peer: int) -> GradwireError:
        """Return the error to raise after the link to a world rank ended."""
        if self._calls.closed:
            return self.broken()
        return self._failure.lost(peer, self.operation, self.during())

    def mismatch(self, peer: int, header: bytes) -> GradwireError:
        """Return the error to raise after a world rank sent an unexpected header."""
        now = time.monotonic()
        sequence = self._disputed(peer, header)
        if sequence is None:
            self._failure.control.lost(peer, now, "sent invalid data")
        else:
            self._failure.control.report(disagreement(self._calls, sequence), now)
        self._failure.wake()
        return self.broken()

    def _disputed(self, peer: int, header: bytes) -> int | None:
        """Return the number of the call on which a peer's header disagrees; None if the header is invalid."""
        try:
            seen = parse(header)
        except WireError as error:
            log.warning("rank %d sent an invalid header: %s", peer, error)
            return None
        identity = self._failure.identity
        mine = self._calls.call(self.sequence)
        belongs = (seen.job, seen.generation, seen.group) == (identity.job, identity.number, self._calls.group)
        same_call = seen.sequence == self.sequence and mine is not None and seen.fingerprint == mine.fingerprint
        if not belongs or same_call:
            log.warning("rank %d sent an invalid header: %s", peer, seen)
            return None
        return min(self.sequence, max(1, seen.sequence))

    def late(self) -> list[tuple[int, Position | None]]:
        """Return the ranks that have not reached this call or do not answer, with their positions, lowest first."""
        return self._late(self._positions())

    def _positions(self) -> dict[int, Position]:
        """Return the positions of the other ranks of the group that answer."""
        return self._failure.control.positions(self._calls, ANSWER_SECONDS)

    def _late(self, positions: Mapping[int, Position]) -> list[tuple[int, Position | None]]:
        peers = [rank for rank in self._calls.members if rank != self._failure.identity.rank]
        silent = [(rank, None) for rank in peers if rank not in positions]
        behind = [(rank, place) for rank, place in positions.items() if place.sequence < self.sequence]
        return sorted([*silent, *behind], key=lambda entry: entry[0])

    def _timed_out(self) -> GradwireError:
        late = self.late()
        culprit = late[0][0] if late else None
        what = f"{self.operation} #{self.sequence}{self._failure.step_text}"
        what = f"{what} did not finish within its timeout of {self.timeout:g} s"
        reason = f"{what}: {self._describe(late)}"
        finding = Finding("timeout", reason[:4000], culprit, self.timeout, self.operation)
        self._failure.control.report(finding, time.monotonic())
        self._failure.wake()
        return self.broken()

    def _describe(self, late: Sequence[tuple[int, Position | None]]) -> str:
        """Return a description of the ranks that the others wait for."""
        if not late:
            return "all ranks have made this call, but their messages have not arrived"
        return "; ".join(self._describe_one(rank, place) for rank, place in late)

    def _describe_one(self, rank: int, place: Position | None) -> str:
        if place is not None:
            if place.finished < place.sequence:
                return f"rank {rank} is alive but stuck in {place.last}"
            return f"rank {rank} is alive but stuck outside of any gradwire call, its last call was {place.last}"
        if not self._failure.alive(rank):
            return f"rank {rank} does not answer"
        known = self._failure.control.last_known_call(self._calls, rank)
        last = f"{known.what} #{known.sequence}" if known is not None else "unknown"
        why = "its Python interpreter does not run (a C extension may hold the GIL)"
        return f"rank {rank} is alive but stuck: {why}; its last call was {last}"
