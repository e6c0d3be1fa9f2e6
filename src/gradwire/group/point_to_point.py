"""The point-to-point calls `send`, `recv`, `sendrecv` and `copy`.

Messages are matched by peer and tag, outside of the order of the collectives.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradwire import arrays
from gradwire.arrays import DType, raw, view
from gradwire.errors import ArrayError, Broken, Closed, GradwireError, InvalidRank, InvalidSize, PeerLost, Timeout
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
        self._check(operation, f" during {operation}")
        if self._senders_departed(request):
            raise self._gone(min(peers), operation)
        raise Timeout(
            f"no message from {whom} with tag {request.tag} arrived in {timeout:g} s; the recv can be repeated",
            peer=request.source,
            operation=operation,
            seconds=timeout,
        )

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
                f"rank {number} is this rank itself: point-to-point calls need another rank", rank=number, peer=number
            )
        return number

    def _check_reachable(self, dst: int, operation: str) -> None:
        self._check(operation, f" during {operation}")
        if self._departed(dst):
            raise self._gone(dst, operation)

    def _gone(self, rank: int, operation: str) -> GradwireError:
        error = self.generation.failure.lost(self.members[rank], operation, f" during {operation}")
        if isinstance(error, PeerLost):
            error.peer = rank
        return error

    def _frame(self, kind: Kind, payload: bytes, tag: int, **fields: int) -> bytes:
        return self.generation.identity.frame(
            kind, payload, group=self.group, source=self.rank, fingerprint=tag & _TAG_MASK, **fields
        )


def _pause(now: float, deadline: float, slow_wait: SlowWait) -> float:
    return max(0.0, min(deadline - now, slow_wait.due - now, POLL_SECONDS))


MAX_TAG = (1 << 62) - 1


class PointToPointCalls:
    """The methods of `Group` that two ranks call without the other ranks."""

    def __init__(self, point_to_point: PointToPoint) -> None:
        self._point_to_point = point_to_point
        self._rank = point_to_point.rank
        self._size = len(point_to_point.members)

    def send(self, x: Any, dst: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send the bytes of x to another rank.

        Up to 64 KiB, the call copies x and returns; it waits only while too many earlier messages are unread. A longer
        message waits for the matching `recv`: if two ranks send long messages to each other, use `sendrecv`.

        Args:
            x: An array. Only its bytes travel: the receiver needs a buffer of the same number of bytes.
            dst: The rank that receives.
            tag: A number from 0 to 2**62 - 1. `recv` gets only messages with its own tag.
            timeout: Seconds that the call may take. None means the group's timeout.

        Raises:
            ArrayError: x cannot be used (not in CPU memory, unknown dtype).
            InvalidRank: The group has no rank `dst`, or it is the calling rank.
            Timeout: The receiver did not call `recv` in time. The group stays usable, unless the receiver stopped
                reading in the middle of a message: that breaks the group on every rank.
            PeerLost: The receiver is gone.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> one.send(np.arange(3), dst=1, tag=7)
        >>> x = np.zeros(3, int); two.recv(x, src=0, tag=7), x
        (0, array([0, 1, 2]))
        >>> one.close(); two.close()
        """
        peer = self._point_to_point.check_peer(dst)
        self._point_to_point.send(raw(view(x, writable=False).load()), peer, checked_tag(tag), self._seconds(timeout))

    def recv(self, x: Any, src: int | None = None, tag: int = 0, timeout: float | None = None) -> int:
        """Receive a message into x and return the rank of its sender.

        Messages of one sender with one tag arrive in the order in which they were sent.

        Args:
            x: A writable array with as many bytes as the message.
            src: The rank that sends. None means any rank.
            tag: The tag of the message.
            timeout: Seconds that the call may take. None means the group's timeout.

        Returns:
            The rank of the sender.

        Raises:
            SizeMismatch: The message and x differ in size. The message stays for a `recv` with a buffer that fits.
            ArrayError: x cannot be used (read-only, not in CPU memory, unknown dtype).
            InvalidRank: The group has no rank `src`, it is the calling rank, or the group has only one rank.
            Timeout: No message arrived in time. The call can be repeated; no message is lost.
            PeerLost: The sender is gone.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> try: two.recv(np.zeros(3), timeout=0.01)
        ... except gw.Timeout: one.send(np.ones(3), dst=1)
        >>> x = np.zeros(3); two.recv(x), x
        (0, array([1., 1., 1.]))
        >>> one.close(); two.close()
        """
        source = None if src is None else self._point_to_point.check_peer(src)
        if self._size == 1:
            raise InvalidRank("the group has only one rank: no other rank can send a message")
        target = view(x, writable=True)
        request = self._point_to_point.post_request(raw(target.flat), source, checked_tag(tag))
        sender = self._point_to_point.finish_request(request, self._seconds(timeout))
        target.store()
        return sender

    def sendrecv(self, x: Any, y: Any, dst: int, src: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send x to one rank and receive y from another, or from the same one, at the same time.

        Unlike `send` followed by `recv`, this cannot deadlock, whatever the sizes.

        Args:
            x: The array to send.
            y: A writable array for the received message. It must not overlap x.
            dst: The rank that receives x.
            src: The rank whose message y receives.
            tag: The tag of both messages.
            timeout: Seconds that the call may take. None means the group's timeout.

        Raises:
            ArrayError: An array cannot be used, or y overlaps x.
            InvalidRank: The group has no such rank, or it is the calling rank.
            SizeMismatch: The received message and y differ in size. The message is kept.
            Timeout: The call did not finish in time. `send` and `recv` describe the consequences.
            PeerLost: One of the two ranks is gone.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> one.send(np.ones(3), dst=1)
        >>> x, y = np.zeros(3), np.zeros(3)
        >>> two.sendrecv(x, y, dst=0, src=0); y
        array([1., 1., 1.])
        >>> one.close(); two.close()
        """
        to, source = self._point_to_point.check_peer(dst), self._point_to_point.check_peer(src)
        seconds = self._seconds(timeout)
        given, target = view(x, writable=False), view(y, writable=True)
        if arrays.overlap(given, target):
            raise ArrayError("y overlaps x: the received data would overwrite x while x is sent")
        deadline = time.monotonic() + seconds
        request = self._point_to_point.post_request(raw(target.flat), source, checked_tag(tag))
        try:
            self._point_to_point.send(raw(given.load()), to, checked_tag(tag), seconds, "sendrecv")
        except BaseException:
            self._point_to_point.cancel_request(request)
            raise
        self._point_to_point.finish_request(request, seconds, "sendrecv", deadline)
        target.store()

    def copy(self, x: Any, y: Any, src: int, dst: int, timeout: float | None = None) -> None:
        """Copy x on rank `src` into y on rank `dst`. Either array may be strided.

        Only these two ranks need to call it; on other ranks the call does nothing. Copies between two ranks arrive in
        order, and are never received by `recv`.

        Args:
            x: On rank `src`, the array to copy. Ignored on other ranks.
            y: On rank `dst`, a writable array with the dtype and number of elements of x. Ignored on other ranks.
            src: The rank that has x.
            dst: The rank that has y. It may be the same rank.
            timeout: Seconds that the call may take. None means the group's timeout.

        Raises:
            ArrayError: An array cannot be used, or the dtypes differ.
            SizeMismatch: x and y, on two ranks, differ in size. The copy is kept for a call with a y that fits.
            InvalidRank: The group has no such rank.
            Timeout: The other rank did not call `copy` in time.
            PeerLost: The other rank is gone.

        >>> import gradwire as gw, numpy as np
        >>> one, two = gw.loopback_pair()
        >>> one.copy(np.arange(6).reshape(2, 3).T, None, src=0, dst=1)
        >>> y = np.zeros(12, int); two.copy(None, y[::2], src=0, dst=1); y
        array([0, 0, 3, 0, 1, 0, 4, 0, 2, 0, 5, 0])
        >>> one.close(); two.close()
        """
        src, dst = check_rank(src, self._size, "src"), check_rank(dst, self._size, "dst")
        seconds = self._seconds(timeout)
        if self._rank == src == dst:
            _copy_here(x, y)
        elif self._rank == src:
            source = view(x, writable=False)
            self._point_to_point.send(raw(source.load()), dst, copy_tag(source.dtype), seconds, "copy")
        elif self._rank == dst:
            target = view(y, writable=True)
            request = self._point_to_point.post_request(raw(target.flat), src, copy_tag(target.dtype))
            self._point_to_point.finish_request(request, seconds, "copy")
            target.store()

    def _seconds(self, timeout: float | None) -> float:
        """Return the timeout of a call, or the group's timeout if the call has none."""
        raise NotImplementedError


def copy_tag(dtype: DType) -> int:
    """Return the tag of copies of this dtype. It is negative, unlike the tags of users."""
    return -dtype.code


def _copy_here(x: Any, y: Any) -> None:
    source, target = view(x, writable=False), view(y, writable=True)
    if source.dtype != target.dtype or source.flat.size != target.flat.size:
        raise ArrayError(f"{arrays.describe(source.array)} does not fit {arrays.describe(target.array)}")
    target.flat[:] = source.load().copy()
    target.store()


def checked_tag(tag: int) -> int:
    if isinstance(tag, bool) or not isinstance(tag, (int, np.integer)) or not 0 <= tag <= MAX_TAG:
        raise InvalidSize(f"tag {tag!r} is not a number from 0 to 2**62 - 1")
    return int(tag)
