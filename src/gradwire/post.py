"""`send`, `recv` and what is made of them: the waiting side of point-to-point messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.errors import GradwireError, PeerLost, Timeout
from gradwire.generation import Generation
from gradwire.liveness.verdict import Finding
from gradwire.messages import Request
from gradwire.transports.base import LinkClosed
from gradwire.transports.frames import Outbox
from gradwire.wire import MAX_EAGER, Header, Kind

_TAG_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Post:
    """One group's post office; ranks are the group's, `members` their world ranks."""

    generation: Generation
    group: int
    rank: int
    members: Sequence[int]

    def send(self, data: memoryview, dst: int, tag: int, timeout: float, operation: str = "send") -> None:
        """Deliver bytes: at once up to the eager bound, else when the receiver has a buffer for them."""
        deadline = time.monotonic() + timeout
        self.generation.check(operation)
        if len(data) <= MAX_EAGER:
            self._send_eagerly(data, dst, tag, deadline, timeout, operation)
        else:
            self._send_on_offer(data, dst, tag, deadline, timeout, operation)

    def _outbox(self, dst: int, deadline: float) -> Outbox:
        return self.generation.message_outbox(self.members[dst], deadline)

    def _send_eagerly(
        self, data: memoryview, dst: int, tag: int, deadline: float, timeout: float, operation: str
    ) -> None:
        outbox = self._outbox(dst, deadline)
        changed = self.generation.mailbox.changed
        while outbox.full:
            with changed:
                if outbox.full:
                    changed.wait(min(0.25, max(0.0, deadline - time.monotonic())))
            self._check_peer(dst, operation)
            if time.monotonic() >= deadline:
                raise Timeout(
                    f"{operation} to rank {dst} waited {timeout:g} s: it takes no messages off its link",
                    peer=dst,
                    operation=operation,
                    seconds=timeout,
                )
        message = self._frame(Kind.EAGER, bytes(data), tag)
        try:
            if outbox.post(message):
                self.generation.wake()
        except LinkClosed:
            raise self._gone(dst, operation) from None

    def _send_on_offer(
        self, data: memoryview, dst: int, tag: int, deadline: float, timeout: float, operation: str
    ) -> None:
        mailbox = self.generation.mailbox
        outbox = self._outbox(dst, deadline)
        offer = mailbox.offer()
        size = {"tile": len(data) & 0xFFFFFFFF, "round": len(data) >> 32}
        try:
            if outbox.post(self._frame(Kind.OFFER, b"", tag, sequence=offer.identity, **size)):
                self.generation.wake()
        except LinkClosed:
            raise self._gone(dst, operation) from None
        with mailbox.changed:
            while not offer.accepted:
                left = deadline - time.monotonic()
                if left <= 0 and mailbox.withdraw(offer):
                    break
                mailbox.changed.wait(min(0.25, max(0.0, left)))
                if not self.generation.control.sound or self.generation.closed or self._absent(dst):
                    break
        if not offer.accepted:
            self._check_peer(dst, operation)
            outbox.post(self._frame(Kind.WITHDRAW, b"", tag, sequence=offer.identity))
            raise Timeout(
                f"{operation} of {len(data)} bytes to rank {dst} waited {timeout:g} s for a recv there. Above "
                f"{MAX_EAGER} bytes send waits for its recv: if both ranks send first, use sendrecv",
                peer=dst,
                operation=operation,
                seconds=timeout,
            )
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

    def _stream(
        self, outbox: Outbox, parts: list[memoryview], dst: int, deadline: float, timeout: float, operation: str
    ) -> None:
        """Write a payload straight from the user's memory, in turn with other messages of the link."""
        generation = self.generation
        held = False
        try:
            while parts:
                held = held or outbox.hold()
                sent = outbox.link.send(parts) if held else 0
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
                    continue
                if not parts:
                    break
                generation.transport.wait((), (outbox.link,), generation.alarm, 0.25)
                self._check_peer(dst, operation)
                if time.monotonic() >= deadline:
                    # Half a payload is on its way: the link cannot be used for anything else any more.
                    reason = f"{operation} to rank {dst} did not finish in {timeout:g} s: it stopped reading"
                    finding = Finding("timeout", reason, self.members[dst], timeout, operation)
                    generation.control.report(finding, time.monotonic())
                    raise generation.error(operation)
        except LinkClosed:
            raise self._gone(dst, operation) from None
        finally:
            if held:
                outbox.release()
                generation.wake()

    def post_request(self, target: memoryview, src: int | None, tag: int) -> Request:
        """Ask for a message without waiting for it."""
        self.generation.check("recv")
        request = Request(self.group, src, tag, target)
        self.generation.mailbox.ask(request)
        return request

    def cancel_request(self, request: Request) -> None:
        """Stop asking; what may have arrived keeps its place."""
        self.generation.mailbox.give_up(request, self.generation.redirect)

    def finish_request(self, request: Request, timeout: float, operation: str = "recv") -> int:
        """Wait for a message that was asked for; the sender's rank. On time-out everything keeps its place."""
        generation, mailbox = self.generation, self.generation.mailbox
        deadline = time.monotonic() + timeout
        try:
            with mailbox.changed:
                while not request.done:
                    left = deadline - time.monotonic()
                    if left <= 0 or generation.closed or not generation.control.sound or self._nobody(request):
                        break
                    mailbox.changed.wait(min(0.25, left))
        finally:
            gave_up = mailbox.give_up(request, generation.redirect)
        if request.error is not None:
            raise request.error
        if not gave_up:
            assert request.sender is not None
            return request.sender
        generation.check(operation)
        if self._nobody(request):
            peers = [request.source] if request.source is not None else self._others()
            raise self._gone(min(peers), operation)
        whom = "any rank" if request.source is None else f"rank {request.source}"
        raise Timeout(
            f"no message from {whom} with tag {request.tag} came in {timeout:g} s; the recv can be repeated",
            peer=request.source,
            operation=operation,
            seconds=timeout,
        )

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.members)) if rank != self.rank]

    def _nobody(self, request: Request) -> bool:
        """Whether those who could send this message have all left."""
        peers = [request.source] if request.source is not None else self._others()
        return all(self._absent(peer) for peer in peers)

    def _absent(self, rank: int) -> bool:
        return self.generation.departed(self.members[rank])

    def _check_peer(self, dst: int, operation: str) -> None:
        self.generation.check(operation)
        if self._absent(dst):
            raise self._gone(dst, operation)

    def _gone(self, rank: int, operation: str) -> GradwireError:
        error = self.generation.lost(self.members[rank], operation, f" during {operation}")
        if isinstance(error, PeerLost):
            error.peer = rank
        return error

    def _frame(self, kind: Kind, payload: bytes, tag: int, **fields: int) -> bytes:
        return self.generation.frame(
            kind, payload, group=self.group, source=self.rank, fingerprint=tag & _TAG_MASK, **fields
        )
