"""How one operation of a group waits: it reports long waits, ends at its timeout, and finds the error to raise."""

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
LAST_WORDS_SECONDS = 0.2  # in which messages that a rank sent before its end may still arrive
POLL_SECONDS = 0.25  # between looks at what rings no bell: the end of an in-process rank's thread


class Slowness:
    """When a wait is long enough to be told: at 5, 10, 20 … seconds."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.due = began + SLOW_SECONDS

    def told(self, now: float) -> None:
        self.due = now + (now - self.began)


def is_lowest_waiting(rank: int, sequence: int, positions: Mapping[int, Position]) -> bool:
    """Return whether `rank` is the lowest rank that waits in a call, by the positions of the ranks that answered.

    A rank that is late, has finished the call, or does not answer will not log the wait.
    """
    waiting = (peer for peer, place in positions.items() if place.finished < sequence <= place.sequence)
    return all(rank < peer for peer in waiting)


class OperationWait:
    """What an executor asks while it can do nothing."""

    def __init__(self, failure: FailurePath, calls: CallLog, operation: str, sequence: int, timeout: float) -> None:
        self._failure = failure
        self._calls = calls
        self.operation = operation
        self.sequence = sequence
        self.timeout = timeout
        self._slowness: Slowness | None = None  # begins when the operation first has to wait
        self._deadline = 0.0
        self._last_look = False

    def during(self) -> str:
        call = self._calls.call(self.sequence)
        site = f", {call.site}" if call else ""
        return f" during {self.operation} #{self.sequence}{site}"

    def wait(self, reads: Iterable[Link], writes: Iterable[Link]) -> None:
        """Return when there may be something to do; raise when the group broke or the time is over."""
        failure = self._failure
        failure.transport.wait(reads, writes, failure.alarm, self._pause(time.monotonic()))
        self.look(reads, writes)

    def look(self, reads: Iterable[Link] = (), writes: Iterable[Link] = ()) -> float:
        """As `wait`, by one that has waited already: the seconds until it should ask again."""
        failure = self._failure
        if self._calls.closed or failure.closed:
            raise self.broken()
        if not failure.control.sound:
            # What has arrived is still taken: the call that others dispute may be the next one.
            if self._last_look:
                raise self.broken()
            self._last_look = True
            return 0.0
        now = time.monotonic()
        slowness = self._begun(now)
        for link in {*reads, *writes}:
            if failure.transport.gone(link.peer):
                failure.control.lost(link.peer, now, "ended its thread")
                raise self.broken()
        if now >= self._deadline:
            raise self._timed_out()
        if now >= slowness.due:
            slowness.told(now)
            self._log_slow(now - slowness.began)
        return self._pause(time.monotonic())

    def _log_slow(self, waited: float) -> None:
        """Log which ranks are late: one line for all ranks that wait in this call."""
        rank = self._failure.identity.rank
        positions = self._positions()
        if is_lowest_waiting(rank, self.sequence, positions):
            late = self._late(positions)
            log.warning("rank %d has waited %.0f s%s: %s", rank, waited, self.during(), self._describe(late))

    def _begun(self, now: float) -> Slowness:
        if self._slowness is None:
            self._slowness = Slowness(now)
            self._deadline = now + self.timeout
        return self._slowness

    def _pause(self, now: float) -> float:
        due = self._begun(now).due
        return max(0.0, min(self._deadline, due, now + POLL_SECONDS) - now)

    def broken(self) -> GradwireError:
        """The error to raise when the group can no longer be used."""
        if self._failure.closed or (self._calls.closed and self._failure.control.sound):
            return Closed("the group was closed", operation=self.operation)
        return self._failure.error(self.operation, self.during())

    def lost(self, peer: int) -> GradwireError:
        """The link to a world rank ended: the error to raise."""
        if self._calls.closed:
            return self.broken()
        return self._failure.lost(peer, self.operation, self.during())

    def mismatch(self, peer: int, header: bytes) -> GradwireError:
        """A world rank sent something else than was expected: the error to raise."""
        now = time.monotonic()
        sequence = self._disputed(peer, header)
        if sequence is None:
            self._failure.control.lost(peer, now, "sent nonsense")
        else:
            self._failure.control.report(disagreement(self._calls, sequence), now)
        self._failure.wake()
        return self.broken()

    def _disputed(self, peer: int, header: bytes) -> int | None:
        """The call on which a peer's header shows that it means something else; None if it is no header of ours."""
        try:
            seen = parse(header)
        except WireError as error:
            log.warning("rank %d sent nonsense: %s", peer, error)
            return None
        identity = self._failure.identity
        mine = self._calls.call(self.sequence)
        belongs = (seen.job, seen.generation, seen.group) == (identity.job, identity.number, self._calls.group)
        same_call = seen.sequence == self.sequence and mine is not None and seen.fingerprint == mine.fingerprint
        if not belongs or same_call:
            log.warning("rank %d sent nonsense: %s", peer, seen)
            return None
        return min(self.sequence, max(1, seen.sequence))

    def late(self) -> list[tuple[int, Position | None]]:
        """Ranks that have not reached this call, as far as they answer; lowest first."""
        return self._late(self._positions())

    def _positions(self) -> dict[int, Position]:
        """How far the other ranks of the group are, those that answer."""
        return self._failure.control.positions(self._calls, ANSWER_SECONDS)

    def _late(self, positions: Mapping[int, Position]) -> list[tuple[int, Position | None]]:
        peers = [rank for rank in self._calls.members if rank != self._failure.identity.rank]
        silent = [(rank, None) for rank in peers if rank not in positions]
        behind = [(rank, place) for rank, place in positions.items() if place.sequence < self.sequence]
        return sorted([*silent, *behind], key=lambda entry: entry[0])

    def _timed_out(self) -> GradwireError:
        late = self.late()
        culprit = late[0][0] if late else None
        what = f"{self.operation} #{self.sequence} did not finish within its timeout of {self.timeout:g} s"
        reason = f"{what}: {self._describe(late)}"
        finding = Finding("timeout", reason[:4000], culprit, self.timeout, self.operation)
        self._failure.control.report(finding, time.monotonic())
        self._failure.wake()
        return self.broken()

    def _describe(self, late: Sequence[tuple[int, Position | None]]) -> str:
        """Who keeps the others waiting, in words."""
        if not late:
            return "all ranks have arrived, but their messages have not"
        return "; ".join(self._describe_one(rank, place) for rank, place in late)

    def _describe_one(self, rank: int, place: Position | None) -> str:
        if place is not None:
            if place.finished < place.sequence:
                return f"rank {rank} is alive but stuck in {place.last}"
            return f"rank {rank} is alive but stuck outside of any call, its last call was {place.last}"
        if not self._failure.alive(rank):
            return f"rank {rank} does not answer"
        known = self._failure.control.last_heard(self._calls, rank)
        last = f"{known.what} #{known.sequence}" if known is not None else "not told"
        why = "its interpreter does not run, as if a call into C held its lock"
        return f"rank {rank} is alive but stuck: {why}; its last call was {last}"
