"""The works of `isend` and `irecv`: messages that are sent or received while the program continues."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from gradwire.arrays import View, raw
from gradwire.errors import Timeout
from gradwire.generation.message_format import OutgoingMessage
from gradwire.generation.waiting import POLL_SECONDS, SlowWait
from gradwire.group.delivery import DeliveryThread
from gradwire.group.point_to_point import PointToPoint
from gradwire.group.receiving import sender_text
from gradwire.group.work import Work, bounded


class MessageWork(Work):
    """A message in progress. It stays pending, after a `wait` that timed out too, until it ends or the group does."""

    def __init__(self, operation: str, messages: PointToPoint, timeout: float) -> None:
        """`timeout` is the number of seconds that `wait()` waits, and that a transfer may take once it has begun."""
        super().__init__(operation)
        self._messages = messages
        self._timeout = timeout
        self._completing = threading.Lock()

    @property
    def ended(self) -> bool:
        return self._done.is_set()

    @property
    def due(self) -> bool:
        """Whether the message has ended, or can be completed and no thread does it."""
        return self._done.is_set() or (not self._completing.locked() and self._can_finish())

    @property
    def _inherited(self) -> bool:
        """Whether this process was forked from the rank. The holders of the locks may not exist here."""
        return self._messages.generation.failure.inherited

    def deliver(self) -> None:
        """Complete the message, unless that is done. Its callbacks run on a thread of their own.

        They may wait for other messages, which the thread that calls this may have to complete.
        """
        with self._completing:
            if self._done.is_set():
                return
            self.run(self._finish, first_error=self._messages.usable())
        if self._callbacks:
            threading.Thread(target=self.call_back, name="gradwire-callbacks", daemon=True).start()

    def wait(self, timeout: float | None = None) -> Any:
        if self._inherited and not self._done.is_set():
            self._messages.check(self.operation)
        seconds = bounded(timeout) or self._timeout
        began = time.monotonic()
        slow_wait = SlowWait(began)
        while not self._done.is_set():
            now = time.monotonic()
            if now >= began + seconds:
                peer, which = self._which()
                raise Timeout(
                    f"{self.operation} {which} was not done in {seconds:g} s; it stays pending",
                    peer=peer,
                    operation=self.operation,
                    seconds=seconds,
                )
            self._pause(min(began + seconds, slow_wait.due) - now)
            if not self._done.is_set():
                self._log_if_slow(slow_wait)
        return super().wait()

    def _which(self) -> tuple[int | None, str]:
        """Return the other rank, or None, and which message this is, for error messages."""
        raise NotImplementedError

    def _can_finish(self) -> bool:
        """Whether `_finish` would not wait."""
        raise NotImplementedError

    def _finish(self) -> Any:
        """Complete the message and return the result; raise if that is not possible."""
        raise NotImplementedError

    def _pause(self, seconds: float) -> None:
        """Wait until the message is done, or may have changed, for at most this many seconds."""
        raise NotImplementedError

    def _log_if_slow(self, slow_wait: SlowWait) -> None:
        raise NotImplementedError


class SendWork(MessageWork):
    """An array that is sent to a rank. Its order among the messages to that rank is fixed by the constructor."""

    def __init__(self, messages: PointToPoint, x: View, dst: int, tag: int, timeout: float) -> None:
        super().__init__("isend", messages, timeout)
        self._dst, self._tag = dst, tag
        message = OutgoingMessage.of(x)
        offered = messages.begin_send(message, dst, tag, timeout, "isend", waits=False)
        self._offered = offered
        if offered is None:
            self._done.set()
        else:
            self._offered = offered.until(math.inf)

    def _can_finish(self) -> bool:
        offered = self._offered
        return offered is None or self._messages.due(offered)

    def _finish(self) -> None:
        offered, self._offered = self._offered, None  # the work may outlive x
        assert offered is not None
        self._messages.finish_send(offered.until(time.monotonic() + self._timeout))

    def _which(self) -> tuple[int | None, str]:
        return self._dst, f"to rank {self._dst} with tag {self._tag}"

    def _pause(self, seconds: float) -> None:
        self._done.wait(seconds)  # the delivery thread sends the message, because that may take longer than a timeout

    def _log_if_slow(self, slow_wait: SlowWait) -> None:
        waits = f"for isend to rank {self._dst}, which has not called recv"
        self._messages.log_if_slow(slow_wait, waits, lambda: self._messages.explain_slow_send(self._dst))


class ReceiveWork(MessageWork):
    """An array that receives a message. A thread that waits completes it, or one that asks whether it is done."""

    def __init__(
        self, messages: PointToPoint, x: View, src: int | None, tag: int, timeout: float, delivery: DeliveryThread
    ) -> None:
        """`delivery` completes the message if it has callbacks, which no thread may wait for."""
        super().__init__("irecv", messages, timeout)
        self._target = x
        self._delivery: DeliveryThread | None = delivery
        self._request = messages.post_request(raw(x.flat), src, tag)

    @property
    def done(self) -> bool:
        if not self._inherited and self.due:
            self.deliver()
        return self._done.is_set()

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        super().add_done_callback(callback)
        delivery, self._delivery = self._delivery, None
        if delivery is not None and not self.done:
            delivery.add(self)

    def _can_finish(self) -> bool:
        return self._messages.is_due(self._request)

    def _finish(self) -> int:
        sender = self._messages.finish_request(self._request, self._timeout, "irecv")
        self._target.store()
        return sender

    def _which(self) -> tuple[int | None, str]:
        return self._request.source, f"from {sender_text(self._request)} with tag {self._request.tag}"

    def _pause(self, seconds: float) -> None:
        with self._messages.changed:
            if not self._completing.locked() and not self._can_finish():
                self._messages.changed.wait(min(seconds, POLL_SECONDS))
        if self._completing.locked() or self._can_finish():
            self.deliver()

    def _log_if_slow(self, slow_wait: SlowWait) -> None:
        self._messages.log_slow_receive(self._request, slow_wait)


class MessageWorks:
    """Makes the works of one group. For each rank that long messages are sent to, a thread sends them."""

    def __init__(self, messages: PointToPoint) -> None:
        self._messages = messages
        self._senders: dict[int, DeliveryThread] = {}
        self._receiver = DeliveryThread(messages.changed)
        self._lock = threading.Lock()

    def send(self, x: View, dst: int, tag: int, timeout: float) -> Work:
        """Begin to send an array."""
        work = SendWork(self._messages, x, dst, tag, timeout)
        if not work.ended:
            with self._lock:
                sender = self._senders.setdefault(dst, DeliveryThread(self._messages.changed))
            sender.add(work)
        return work

    def receive(self, x: View, src: int | None, tag: int, timeout: float) -> Work:
        """Begin to receive an array."""
        return ReceiveWork(self._messages, x, src, tag, timeout, self._receiver)
