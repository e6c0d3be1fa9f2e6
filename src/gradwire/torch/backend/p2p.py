"""send and recv of torch.distributed: `Work` objects for messages that are not complete yet."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any

from torch.distributed import Work as TorchWork
from torch.futures import Future

from gradwire.arrays import raw, view
from gradwire.errors import Timeout
from gradwire.generation.message_format import OutgoingMessage
from gradwire.group import Group
from gradwire.group.delivery import DeliveryThread
from gradwire.group.internals import GroupInternals
from gradwire.group.point_to_point import checked_tag
from gradwire.torch.backend.tensors import array_of
from gradwire.torch.backend.work import seconds, set_future


class Message(TorchWork):  # type: ignore[misc]
    """A message in progress. The first thread that waits for it completes it, or else a background thread."""

    def __init__(self, group: Group, tensors: Any) -> None:
        super().__init__()
        self._internals = GroupInternals(group)
        self._messages = self._internals.point_to_point
        self._tensors = tensors
        self._lock = threading.Lock()
        self._ended = False
        self._error: BaseException | None = None
        self._source = -1
        self._future: Future | None = None
        self._unset_future: Future | None = None

    def _finish(self, timeout: float | None) -> int:
        """Complete the message. Return the rank of the sender; for a sent message, -1."""
        raise NotImplementedError

    def _end(self, timeout: float | None = None) -> None:
        future = self._complete(timeout)
        if future is not None:  # without the lock, because callbacks of the future may wait for this message
            set_future(future, self._tensors, self._error)

    def _complete(self, timeout: float | None = None) -> Future | None:
        """Complete the message unless that is done, and return the future whose result the caller must set."""
        if not self._lock.acquire(timeout=timeout or -1):  # another thread completes the message
            raise Timeout(f"a message was not complete after {timeout:g} s", operation="wait", seconds=timeout)
        try:
            if not self._ended:
                try:
                    self._source = self._finish(timeout)
                except BaseException as error:
                    self._error = error
                self._ended = True
            future, self._unset_future = self._unset_future, None
            return future
        finally:
            self._lock.release()

    def _begin_thread(self) -> None:
        threading.Thread(target=self._end, name="gradwire-message", daemon=True).start()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._end(seconds(timeout))
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._tensors

    def get_future(self) -> Future:
        if self._future is None:
            self._future = self._unset_future = Future()
            if self._ended:
                self._end()
            else:
                self._begin_thread()
        return self._future

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank


_DELIVERY: weakref.WeakKeyDictionary[Group, DeliveryThread] = weakref.WeakKeyDictionary()


class Sending(Message):
    """A tensor being sent to a rank. Its order among the messages to that rank is fixed by the constructor."""

    def __init__(self, group: Group, tensor: Any, dst: int, tag: int) -> None:
        super().__init__(group, [tensor])
        message = OutgoingMessage.of(view(array_of(tensor), writable=False))
        messages, number = self._messages, checked_tag(tag)
        peer, timeout = messages.check_peer(dst), self._internals.timeout
        self._offered = messages.begin_send(message, peer, number, timeout, waits=False)
        if self._offered is None:
            self._ended = True
        else:  # the delivery thread sends it, even if this rank never waits
            _DELIVERY.setdefault(group, DeliveryThread(messages.changed)).add(self)

    @property
    def ended(self) -> bool:
        """Whether the message is complete, or has failed."""
        return self._ended

    @property
    def due(self) -> bool:
        """Whether the delivery thread must act: the message has ended, or can be completed and no thread does it."""
        assert self._offered is not None
        return self._ended or (not self._lock.locked() and self._messages.due(self._offered))

    def deliver(self) -> None:
        """Complete the message on the delivery thread.

        The future gets its result on another thread: its callbacks may wait for other messages of that thread.
        """
        future = self._complete()
        if future is not None:
            threading.Thread(target=set_future, args=(future, self._tensors, self._error), daemon=True).start()

    def _begin_thread(self) -> None:
        """Do nothing: the delivery thread does it."""

    def _finish(self, timeout: float | None) -> int:
        assert self._offered is not None
        self._messages.finish_send(self._offered, timeout)
        return -1


class Receiving(Message):
    """A tensor that receives a message from a given rank, or from any rank."""

    def __init__(self, group: Group, tensor: Any, src: int | None, tag: int) -> None:
        super().__init__(group, [tensor])
        self._target = view(array_of(tensor), writable=True)
        source = None if src is None else self._messages.check_peer(src)
        self._request = self._messages.post_request(raw(self._target.flat), source, checked_tag(tag))

    def _finish(self, timeout: float | None) -> int:
        sender = self._messages.finish_request(self._request, timeout or self._internals.timeout)
        self._target.store()
        return sender

    def is_completed(self) -> bool:
        if not self._ended and self._request.done:
            self._end()
        return self._ended
