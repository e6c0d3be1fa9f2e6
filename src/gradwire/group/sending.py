"""`Sender`: sends a group's point-to-point messages."""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

from gradwire.errors import Broken, Closed, GradwireError, Timeout
from gradwire.executors.python import after
from gradwire.generation.mailbox import Offer
from gradwire.generation.message_format import OutgoingMessage
from gradwire.generation.waiting import SlowWait
from gradwire.group.message_endpoint import MessageEndpoint, pause
from gradwire.liveness.control import MAX_SHOWN
from gradwire.liveness.verdict import Finding
from gradwire.transports.base import MESSAGE_CHANNEL, LinkClosed
from gradwire.transports.frames import Outbox
from gradwire.wire import MAX_EAGER, Header, Kind

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

    def until(self, deadline: float) -> OfferedMessage:
        """Return the same message with another deadline."""
        return self._replace(deadline=deadline)


class Sender(MessageEndpoint):
    """Sends messages to the other ranks of a group."""

    __slots__ = ()

    def send(self, message: OutgoingMessage, dst: int, tag: int, timeout: float, operation: str = "send") -> None:
        """Send a message: at once up to `MAX_EAGER` bytes, otherwise when the receiver has requested it."""
        offered = self.begin_send(message, dst, tag, timeout, operation)
        if offered is not None:
            self.finish_send(offered)

    def begin_send(
        self,
        message: OutgoingMessage,
        dst: int,
        tag: int,
        timeout: float,
        operation: str = "send",
        *,
        waits: bool = True,
    ) -> OfferedMessage | None:
        """Begin to send a message to a rank, in order with earlier ones. Return None if nothing is left to do.

        If too many messages to that rank are waiting to be sent, a short message waits until there is room. With
        `waits=False` it is offered instead, like a long message.
        """
        data = message.data
        deadline = time.monotonic() + timeout
        self.check(operation)
        outbox = self._outbox(dst, deadline, operation)
        if len(data) <= MAX_EAGER and (waits or not outbox.full):
            self._send_eagerly(outbox, message, dst, tag, deadline, timeout, operation)
            return None
        offer = self.generation.mailbox.offer()
        size = {"tile": len(data) & 0xFFFFFFFF, "round": len(data) >> 32}
        frame = self._frame(Kind.OFFER, message.description(waits=waits), tag, sequence=offer.identity, **size)
        self._post(outbox, dst, operation, frame)
        return OfferedMessage(outbox, offer, data, dst, tag, deadline, timeout, operation)

    def _outbox(self, dst: int, deadline: float, operation: str) -> Outbox:
        generation, world = self.generation, self.members[dst]
        return generation.service.message_outbox(
            world, lambda: generation.connection.connect(world, MESSAGE_CHANNEL, deadline, operation)
        )

    def _send_eagerly(
        self,
        outbox: Outbox,
        message: OutgoingMessage,
        dst: int,
        tag: int,
        deadline: float,
        timeout: float,
        operation: str,
    ) -> None:
        changed = self.generation.mailbox.changed
        while outbox.full:
            with changed:
                if outbox.full:
                    changed.wait(min(0.25, max(0.0, deadline - time.monotonic())))
            self.check_reachable(dst, operation)
            if time.monotonic() >= deadline:
                raise Timeout(
                    f"{operation} to rank {dst} waited {timeout:g} s: rank {dst} does not read its messages",
                    peer=dst,
                    operation=operation,
                    seconds=timeout,
                )
        content = message.description(waits=False) + bytes(message.data)
        self._post(outbox, dst, operation, self._frame(Kind.EAGER, content, tag))

    def due(self, offered: OfferedMessage) -> bool:
        """Whether `finish_send` would not wait: the receiver is ready or gone, or the time is over."""
        late = time.monotonic() >= offered.deadline
        return offered.offer.accepted or late or not self.usable() or self.departed(offered.dst)

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
                    f"{MAX_EAGER} bytes send waits for its recv: if both ranks send first, use sendrecv or isend",
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
                mailbox.changed.wait(pause(now, deadline, slow_wait))
            self.check_reachable(dst, operation)
            waits = f"in {operation} to rank {dst}, which has not called recv"
            self.log_if_slow(slow_wait, waits, lambda: self.explain_slow_send(dst))

    def explain_slow_send(self, dst: int) -> str:
        """Return why a message to a rank may not be received: a cycle of sends, or that rank's last call."""
        mailbox = self.generation.mailbox
        others = [
            rank for rank, world in enumerate(self.members) if rank != self.rank and mailbox.blocked_sender(world)
        ]
        advice = "use sendrecv, or isend and then recv"
        if dst in others:
            return f"rank {dst} waits in a send to this rank: this is a cycle of blocking sends; {advice}"
        if others:
            named = ", ".join(map(str, others[:MAX_SHOWN]))
            return f"ranks that wait in a send to this rank: {named}; if this is a cycle of blocking sends, {advice}"
        return self.last_calls([dst])

    def _post(self, outbox: Outbox, dst: int, operation: str, message: bytes) -> None:
        try:
            if outbox.post(message):
                self.generation.service.wake()
        except LinkClosed:
            raise self.gone(dst, operation) from None

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
            raise self.gone(dst, operation) from None
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
                self.check_reachable(dst, operation)
                if time.monotonic() >= deadline:
                    return False
        except LinkClosed:
            raise self.gone(dst, operation) from None
        return True

    def _await_room(self, outbox: Outbox, dst: int, deadline: float, timeout: float, operation: str) -> None:
        generation = self.generation
        generation.transport.wait((), (outbox.link,), generation.failure.alarm, 0.25)
        self.check_reachable(dst, operation)
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

    def _frame(self, kind: Kind, payload: bytes, tag: int, **fields: int) -> bytes:
        return self.generation.identity.frame(
            kind, payload, group=self.group, source=self.rank, fingerprint=tag & _TAG_MASK, **fields
        )
