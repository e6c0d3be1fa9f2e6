"""send and recv of torch.distributed: handles of messages that are on their way."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any

from torch.distributed import Work as TorchWork
from torch.futures import Future

from gradwire.arrays import raw, view
from gradwire.errors import Timeout
from gradwire.generation.waiting import POLL_SECONDS
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.group.point_to_point import PointToPoint, checked_tag
from gradwire.torch.backend.tensors import array_of
from gradwire.torch.backend.work import seconds, settle


class Message(TorchWork):  # type: ignore[misc]
    """A message that somebody has to see through: whoever waits for it first, or a thread."""

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
        self._unsettled: Future | None = None

    def _finish(self, timeout: float | None) -> int:
        """See it through; who sent it, or -1."""
        raise NotImplementedError

    def _end(self, timeout: float | None = None) -> None:
        future = self._see_through(timeout)
        if future is not None:  # without the lock: its callbacks may wait for this message
            settle(future, self._tensors, self._error)

    def _see_through(self, timeout: float | None = None) -> Future | None:
        """Do what is left to do; the future that has to be told."""
        if not self._lock.acquire(timeout=timeout or -1):  # somebody else sees it through
            raise Timeout(f"a message was not through in {timeout:g} s", operation="wait", seconds=timeout)
        try:
            if not self._ended:
                try:
                    self._source = self._finish(timeout)
                except BaseException as error:
                    self._error = error
                self._ended = True
            future, self._unsettled = self._unsettled, None
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
            self._future = self._unsettled = Future()
            if self._ended:
                self._end()
            else:
                self._begin_thread()
        return self._future

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank


class SendWorker:
    """A thread for all messages of a group that wait for their receivers; there is none while there are none."""

    def __init__(self, messages: PointToPoint) -> None:
        self._changed = messages.changed
        self._waiting: list[Sending] = []
        self._lock = threading.Lock()

    def see_through(self, sending: Sending) -> None:
        """Have a message delivered when its receiver is ready, whether or not somebody here waits for that."""
        with self._lock:
            self._waiting.append(sending)
            first = len(self._waiting) == 1
        if first:
            threading.Thread(target=self._run, name="gradwire-messages", daemon=True).start()
        else:  # its receiver may have been quicker
            with self._changed:
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                due = [one for one in list(self._waiting) if one.due]
                if not due:
                    self._changed.wait(POLL_SECONDS)
            for one in due:
                one.deliver()
            with self._lock:
                self._waiting = [one for one in self._waiting if not one.is_completed()]
                if not self._waiting:
                    return


_SEND_WORKERS: weakref.WeakKeyDictionary[Group, SendWorker] = weakref.WeakKeyDictionary()


class Sending(Message):
    """A tensor on its way to a rank. It has its place among the messages to that rank from the beginning."""

    def __init__(self, group: Group, tensor: Any, dst: int, tag: int) -> None:
        super().__init__(group, [tensor])
        self._flat = view(array_of(tensor), writable=False).load()
        messages, number = self._messages, checked_tag(tag)
        peer, timeout = messages.check_peer(dst), self._internals.timeout
        self._promised = messages.begin_send(raw(self._flat), peer, number, timeout, waits=False)
        if self._promised is None:
            self._ended = True
        else:  # the receiver must not wait for this rank to wait
            _SEND_WORKERS.setdefault(group, SendWorker(messages)).see_through(self)

    @property
    def due(self) -> bool:
        """Whether there is something to do for it that nobody does; or nothing any more."""
        assert self._promised is not None
        return self._ended or (not self._lock.locked() and self._messages.due(self._promised))

    def deliver(self) -> None:
        """For the send worker, who has other messages: callbacks of a future may wait for one of those."""
        future = self._see_through()
        if future is not None:
            threading.Thread(target=settle, args=(future, self._tensors, self._error), daemon=True).start()

    def _begin_thread(self) -> None:
        """There is one already."""

    def _finish(self, timeout: float | None) -> int:
        assert self._promised is not None
        self._messages.finish_send(self._promised, timeout)
        return -1


class Receiving(Message):
    """A tensor that waits for a message from a rank, or from anybody."""

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
