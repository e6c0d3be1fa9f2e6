"""`Receiver`: receives a group's point-to-point messages, and looks for messages that have arrived."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gradwire.arrays import DType
from gradwire.errors import GradwireError, Timeout
from gradwire.generation.messages import IncomingMessage, Request
from gradwire.generation.waiting import SlowWait
from gradwire.group.message_endpoint import MessageEndpoint, pause


class Message(NamedTuple):
    """A message that waits to be received. `Group.probe` returns it.

    >>> import gradwire as gw, numpy as np
    >>> one, two = gw.loopback_pair()
    >>> one.send(np.ones((2, 3)), dst=1, tag=7)
    >>> two.probe(tag=7)
    Message(source=0, tag=7, nbytes=48, dtype=dtype('float64'), shape=(2, 3))
    >>> one.close(); two.close()
    """

    source: int
    """The rank of the sender."""
    tag: int
    """The tag of the message."""
    nbytes: int
    """The number of bytes."""
    dtype: np.dtype[Any]
    """The dtype of the array that was sent."""
    shape: tuple[int, ...]
    """The shape of the array that was sent."""


class Receiver(MessageEndpoint):
    """Receives messages from the other ranks of a group."""

    __slots__ = ()

    def post_request(
        self, target: memoryview | None, src: int | None, tag: int, copied: DType | None = None
    ) -> Request:
        """Request a message, without waiting for it. `copied` is the dtype that a copy must have."""
        self.check("recv")
        request = self._request(target, src, tag, copied)
        self.generation.mailbox.post_request(request)
        return request

    def _request(self, target: memoryview | None, src: int | None, tag: int, copied: DType | None = None) -> Request:
        return Request(self.group, src, tag, target, dtype=copied, members=self.members)

    def cancel_request(self, request: Request) -> bool:
        """Cancel a request; False if it was done. A message that has arrived for it stays for the next request."""
        return self.generation.mailbox.cancel_request(request, self.generation.service.redirect)

    def is_due(self, request: Request) -> bool:
        """Whether `finish_request` would not wait: the message has arrived, or cannot arrive any more."""
        return request.done or not self.usable() or self._senders_departed(request)

    def finish_request(
        self, request: Request, timeout: float, operation: str = "recv", deadline: float | None = None
    ) -> int:
        """Wait for a requested message and return the sender's rank. After a timeout the request can be repeated."""
        if deadline is None:
            deadline = time.monotonic() + timeout
        try:
            self._wait(request, lambda: request.done, deadline)
        finally:
            cancelled = self.cancel_request(request)
        if request.error is not None:
            raise request.error
        if not cancelled:
            assert request.sender is not None
            return request.sender
        raise self._unanswered(request, timeout, operation)

    def probe(self, src: int | None, tag: int, timeout: float) -> Message:
        """Wait until a message can be received, and describe it. The message stays for the next receive."""
        self.check("probe")
        request, mailbox = self._request(None, src, tag), self.generation.mailbox
        found: IncomingMessage | None = None

        def arrived() -> bool:
            nonlocal found
            found = mailbox.peek(request)
            return found is not None

        self._wait(request, arrived, time.monotonic() + timeout)
        if found is None:
            raise self._unanswered(request, timeout, "probe")
        dtype, shape, _ = found.description
        return Message(found.source, found.tag, found.nbytes, dtype.storage, shape)

    def _wait(self, request: Request, arrived: Callable[[], bool], deadline: float) -> None:
        """Return when the message of a request has arrived, cannot arrive any more, or is late."""
        changed = self.generation.mailbox.changed
        slow_wait = SlowWait(time.monotonic())
        while True:
            with changed:
                now = time.monotonic()
                if arrived() or now >= deadline or not self.usable() or self._senders_departed(request):
                    return
                changed.wait(pause(now, deadline, slow_wait))
            self.log_slow_receive(request, slow_wait)

    def log_slow_receive(self, request: Request, slow_wait: SlowWait) -> None:
        """Log when a thread has waited long for a requested message."""
        waits = f"for a message from {sender_text(request)} with tag {request.tag}"
        self.log_if_slow(slow_wait, waits, lambda: self.last_calls(self._peers(request)))

    def _unanswered(self, request: Request, timeout: float, operation: str) -> GradwireError:
        """Return the error of a call whose message did not arrive."""
        self.check(operation, self.generation.failure.during(operation))
        if self._senders_departed(request):
            return self.gone(min(self._peers(request)), operation)
        return Timeout(
            f"no message from {sender_text(request)} with tag {request.tag} arrived in {timeout:g} s; "
            f"the {operation} can be repeated",
            peer=request.source,
            operation=operation,
            seconds=timeout,
        )

    def _peers(self, request: Request) -> list[int]:
        """Return the ranks that could send the requested message."""
        if request.source is not None:
            return [request.source]
        return [rank for rank in range(len(self.members)) if rank != self.rank]

    def _senders_departed(self, request: Request) -> bool:
        return all(self.departed(peer) for peer in self._peers(request))


def sender_text(request: Request) -> str:
    """Return the text for the sender of a requested message."""
    return "any rank" if request.source is None else f"rank {request.source}"
