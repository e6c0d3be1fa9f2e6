"""`PointToPoint`: sends messages between two ranks of a group, and receives them.

Messages are matched by peer and tag, outside of the order of the collectives.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradwire.arrays import DType
from gradwire.errors import Broken, Closed, GradwireError, InvalidRank, InvalidSize, PeerLost, Timeout
from gradwire.executors.python import after
from gradwire.generation.failure_path import ANSWER_SECONDS
from gradwire.generation.generation import Generation
from gradwire.generation.mailbox import COPY_TAG, Offer, Request
from gradwire.generation.waiting import POLL_SECONDS, SlowWait
from gradwire.liveness.verdict import Finding
from gradwire.operations.types import check_rank
from gradwire.transports.base import MESSAGE_CHANNEL, LinkClosed
from gradwire.transports.frames import Outbox
from gradwire.wire import MAX_EAGER, Header, Kind

log = logging.getLogger("gradwire")

MAX_TAG = (1 << 62) - 1
_TAG_MASK = (1 << 64) - 1


class OfferedMessage(NamedTuple):
    """A long message that was offered to its receiver and is not delivered yet."""

    outbox: Outbox
    offer: Offer
    data: memoryview
    dst: int
    tag: int
    deadline: float
    timeout: float
    operation: str


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """Sends and receives the messages of one group. Ranks are the group's; `members` are their world ranks."""

    generation: Generation
    group: int
    rank: int
    members: Sequence[int]

    @property
    def changed(self) -> threading.Condition:
        """A condition that is notified when a message arrives, leaves or is requested, and when the generation ends."""
        return self.generation.mailbox.changed

    def send(self, data: memoryview, dst: int, tag: int, timeout: float, operation: str = "send") -> None:
        """Send bytes: at once up to `MAX_EAGER` bytes, otherwise when the receiver has a buffer for them."""
        offered = self.begin_send(data, dst, tag, timeout, operation)
        if offered is not None:
            self.finish_send(offered)

    def begin_send(
        self, data: memoryview, dst: int, tag: int, timeout: float, operation: str = "send", *, waits: bool = True
    ) -> OfferedMessage | None:
        """Begin to send bytes to a rank, in order with earlier messages. Return None if nothing is left to do.

        If too many messages to that rank are waiting to be sent, a short message waits until there is room. With
        `waits=False` it is offered instead, like a long message.
        """
        deadline = time.monotonic() + timeout
        self._check(operation)
        outbox = self._outbox(dst, deadline, operation)
        if len(data) <= MAX_EAGER and (waits or not outbox.full):
            self._send_eagerly(outbox, data, dst, tag, deadline, timeout, operation)
            return None
        offer = self.generation.mailbox.offer()
        size = {"tile": len(data) & 0xFFFFFFFF, "round": len(data) >> 32}
        self._post(outbox, dst, operation, self._frame(Kind.OFFER, b"", tag, sequence=offer.identity, **size))
        return OfferedMessage(outbox, offer, data, dst, tag, deadline, timeout, operation)

    def _outbox(self, dst: int, deadline: float, operation: str) -> Outbox:
        generation, world = self.generation, self.members[dst]
        return generation.service.message_outbox(
            world, lambda: generation.connection.connect(world, MESSAGE_CHANNEL, deadline, operation)
        )

    def _send_eagerly(
        self, outbox: Outbox, data: memoryview, dst: int, tag: int, deadline: float, timeout: float, operation: str
    ) -> None:
        changed = self.generation.mailbox.changed
        while outbox.full:
            with changed:
                if outbox.full:
                    changed.wait(min(0.25, max(0.0, deadline - time.monotonic())))
            self._check_reachable(dst, operation)
            if time.monotonic() >= deadline:
                raise Timeout(
                    f"{operation} to rank {dst} waited {timeout:g} s: rank {dst} does not read its messages",
                    peer=dst,
                    operation=operation,
                    seconds=timeout,
                )
        self._post(outbox, dst, operation, self._frame(Kind.EAGER, bytes(data), tag))

    def due(self, offered: OfferedMessage) -> bool:
        """Whether `finish_send` would not wait: the receiver is ready or gone, or the time is over."""
        late = time.monotonic() >= offered.deadline
        return offered.offer.accepted or late or not self._usable() or self._departed(offered.dst)

    def finish_send(self, offered: OfferedMessage, within: float | None = None) -> None:
        """Send a long message when the receiver has a buffer for it. Withdraw it if that takes too long.

        `within` is the number of seconds to wait for the receiver; None means until the message's deadline.
        """
        outbox, offer, data, dst, tag, deadline, timeout, operation = offered
        begin_by, waited = deadline, timeout
        if within is not None:
            begin_by, waited = min(deadline, time.monotonic() + within), within
        try:
            self._await_acceptance(offer, dst, begin_by, operation)
            if not offer.accepted:
                raise Timeout(
                    f"{operation} of {len(data)} bytes to rank {dst} waited {waited:g} s for a recv there. Above "
                    f"{MAX_EAGER} bytes send waits for its recv: if both ranks send first, use sendrecv",
                    peer=dst,
                    operation=operation,
                    seconds=waited,
                )
            if not self._hold_link(outbox, dst, begin_by, operation):
                raise Timeout(
                    f"{operation} of {len(data)} bytes to rank {dst} waited {waited:g} s for earlier messages to that "
                    "rank",
                    peer=dst,
                    operation=operation,
                    seconds=waited,
                )
        except BaseException:  # Ctrl-C too: the receiver must not wait for a message that is not sent
            self.generation.mailbox.withdraw(offer)
            with contextlib.suppress(GradwireError):
                self._post(outbox, dst, operation, self._frame(Kind.WITHDRAW, b"", tag, sequence=offer.identity))
            raise
        head = Header(
            Kind.PAYLOAD,
            self.generation.identity.job,
            self.generation.identity.number,
            self.rank,
            self.group,
            offer.identity,
            tag & _TAG_MASK,
            0,
            0,
            len(data),
        ).pack()
        self._stream(outbox, [memoryview(head), data], dst, deadline, timeout, operation)

    def _await_acceptance(self, offer: Offer, dst: int, deadline: float, operation: str) -> None:
        """Return when an offer was accepted, or was withdrawn because the time is over."""
        mailbox = self.generation.mailbox
        slow_wait = SlowWait(time.monotonic())
        while True:
            with mailbox.changed:
                now = time.monotonic()
                if offer.accepted or (now >= deadline and mailbox.withdraw(offer)):
                    return
                mailbox.changed.wait(_pause(now, deadline, slow_wait))
            self._check_reachable(dst, operation)
            self._log_if_slow(slow_wait, f"in {operation} to rank {dst}, which has not called recv", [dst])

    def _post(self, outbox: Outbox, dst: int, operation: str, message: bytes) -> None:
        try:
            if outbox.post(message):
                self.generation.service.wake()
        except LinkClosed:
            raise self._gone(dst, operation) from None

    def _stream(
        self, outbox: Outbox, parts: list[memoryview], dst: int, deadline: float, timeout: float, operation: str
    ) -> None:
        """Write a payload directly from the user's memory. The caller holds the link; this releases it."""
        total = sum(map(len, parts))
        try:
            while parts:
                sent = outbox.link.send(parts)
                parts = after(parts, sent)
                if parts and not sent:
                    self._await_room(outbox, dst, deadline, timeout, operation)
        except LinkClosed:
            raise self._gone(dst, operation) from None
        except (Broken, Closed):
            raise
        except BaseException as error:
            if sum(map(len, parts)) < total:  # part of the payload was sent: no other message can follow it
                self.generation.failure.interrupt(operation, error)
            raise
        finally:
            outbox.release()
            with self.generation.mailbox.changed:
                self.generation.mailbox.changed.notify_all()
            self.generation.service.wake()

    def _hold_link(self, outbox: Outbox, dst: int, deadline: float, operation: str) -> bool:
        """Wait until no other message is being written to a link, and hold it; False if the time is over first."""
        changed = self.generation.mailbox.changed
        try:
            while not outbox.hold():
                with changed:
                    changed.wait(0.01)  # the service thread flushes the waiting messages
                self._check_reachable(dst, operation)
                if time.monotonic() >= deadline:
                    return False
        except LinkClosed:
            raise self._gone(dst, operation) from None
        return True

    def _await_room(self, outbox: Outbox, dst: int, deadline: float, timeout: float, operation: str) -> None:
        generation = self.generation
        generation.transport.wait((), (outbox.link,), generation.failure.alarm, 0.25)
        self._check_reachable(dst, operation)
        if time.monotonic() >= deadline:
            raise self._stalled(dst, timeout, operation)

    def _stalled(self, dst: int, timeout: float, operation: str) -> GradwireError:
        """Break the generation because the receiver stopped reading in the middle of a payload; return the error.

        The payload cannot be withdrawn any more.
        """
        reason = f"{operation} to rank {dst} did not finish in {timeout:g} s: rank {dst} stopped reading"
        finding = Finding("timeout", reason, self.members[dst], timeout, operation)
        self.generation.control.report(finding, time.monotonic())
        return self.generation.failure.error(operation)

    def post_request(self, target: memoryview, src: int | None, tag: int) -> Request:
        """Request a message, without waiting for it."""
        self._check("recv")
        request = Request(self.group, src, max(tag, COPY_TAG), target, dtype=max(0, -tag), members=self.members)
        self.generation.mailbox.post_request(request)
        return request

    def cancel_request(self, request: Request) -> None:
        """Cancel a request. A message that has arrived for it, even in part, stays for the next request."""
        self.generation.mailbox.cancel_request(request, self.generation.service.redirect)

    def finish_request(
        self, request: Request, timeout: float, operation: str = "recv", deadline: float | None = None
    ) -> int:
        """Wait for a requested message and return the sender's rank. After a timeout the request can be repeated."""
        generation, mailbox = self.generation, self.generation.mailbox
        if deadline is None:
            deadline = time.monotonic() + timeout
        slow_wait = SlowWait(time.monotonic())
        whom = "any rank" if request.source is None else f"rank {request.source}"
        peers = [request.source] if request.source is not None else self._others()
        try:
            while not request.done:
                with mailbox.changed:
                    now = time.monotonic()
                    if now >= deadline or not self._usable() or self._senders_departed(request):
                        break
                    if not request.done:
                        mailbox.changed.wait(_pause(now, deadline, slow_wait))
                self._log_if_slow(slow_wait, f"for a message from {whom} with tag {request.tag}", peers)
        finally:
            cancelled = mailbox.cancel_request(request, generation.service.redirect)
        if request.error is not None:
            raise request.error
        if not cancelled:
            assert request.sender is not None
            return request.sender
        self._check(operation, self.generation.failure.during(operation))
        if self._senders_departed(request):
            raise self._gone(min(peers), operation)
        raise Timeout(
            f"no message from {whom} with tag {request.tag} arrived in {timeout:g} s; the recv can be repeated",
            peer=request.source,
            operation=operation,
            seconds=timeout,
        )

    def exchange(self, data: memoryview, dst: int, target: memoryview, src: int, tag: int, timeout: float) -> None:
        """Send bytes to one rank and receive a message from another at the same time."""
        deadline = time.monotonic() + timeout
        request = self.post_request(target, src, tag)
        try:
            self.send(data, dst, tag, timeout, "sendrecv")
        except BaseException:
            self.cancel_request(request)
            raise
        self.finish_request(request, timeout, "sendrecv", deadline)

    def _log_if_slow(self, slow_wait: SlowWait, what: str, peers: Sequence[int]) -> None:
        now = time.monotonic()
        if now < slow_wait.due:
            return
        slow_wait.reported(now)
        last = self.generation.control.last_calls(self.group, [self.members[peer] for peer in peers], ANSWER_SECONDS)
        rank = self.generation.identity.rank
        log.warning("rank %d has waited %.0f s %s; %s", rank, now - slow_wait.began, what, last)

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.members)) if rank != self.rank]

    def _senders_departed(self, request: Request) -> bool:
        """Whether all ranks that could send the requested message have left."""
        peers = [request.source] if request.source is not None else self._others()
        return all(self._departed(peer) for peer in peers)

    def _departed(self, rank: int) -> bool:
        return self.generation.service.departed(self.members[rank])

    def _usable(self) -> bool:
        generation = self.generation
        return not generation.failure.closed and generation.control.intact and generation.control.open(self.group)

    def _check(self, operation: str, during: str = "") -> None:
        self.generation.failure.check(operation, during)
        if not self.generation.control.open(self.group):
            raise Closed("the group is closed", operation=operation)

    def check_peer(self, rank: int) -> int:
        """Return the number of another rank of this group; raise `InvalidRank` for anything else."""
        number = check_rank(rank, len(self.members))
        if number == self.rank:
            raise InvalidRank(
                f"rank {number} is this rank itself: point-to-point calls need another rank",
                rank=number,
                size=len(self.members),
                peer=number,
            )
        return number

    def _check_reachable(self, dst: int, operation: str) -> None:
        self._check(operation, self.generation.failure.during(operation))
        if self._departed(dst):
            raise self._gone(dst, operation)

    def _gone(self, rank: int, operation: str) -> GradwireError:
        failure = self.generation.failure
        error = failure.lost(self.members[rank], operation, failure.during(operation))
        if isinstance(error, PeerLost):
            error.peer = rank
        return error

    def _frame(self, kind: Kind, payload: bytes, tag: int, **fields: int) -> bytes:
        return self.generation.identity.frame(
            kind, payload, group=self.group, source=self.rank, fingerprint=tag & _TAG_MASK, **fields
        )


def _pause(now: float, deadline: float, slow_wait: SlowWait) -> float:
    return max(0.0, min(deadline - now, slow_wait.due - now, POLL_SECONDS))


def copy_tag(dtype: DType) -> int:
    """Return the tag of copies of this dtype. It is negative, unlike the tags of users."""
    return -dtype.code


def checked_tag(tag: int) -> int:
    if isinstance(tag, bool) or not isinstance(tag, (int, np.integer)) or not 0 <= tag <= MAX_TAG:
        raise InvalidSize(f"tag {tag!r} is not a number from 0 to 2**62 - 1")
    return int(tag)
