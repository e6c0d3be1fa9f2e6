"""torch's `Work` objects for collectives: `async_op=True` returns them, and DDP and FSDP wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd import Variable
from torch.distributed import Work as TorchWork
from torch.futures import Future

from gradwire.group import work
from gradwire.torch.backend.no_dynamo import no_dynamo

NO_BACKWARD = -1  # torch's id of the current graph task outside of a backward pass


class Handle(TorchWork):  # type: ignore[misc]
    """A collective that runs on the group's progress thread."""

    def __init__(self, running: work.Work, tensors: Any, check: Callable[[], None]) -> None:
        """Wrap a running operation. `check` raises if the group is broken."""
        super().__init__()
        self._running = running
        self._tensors = tensors
        self._check = check
        self._future: Future | None = None

    @no_dynamo
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._running.wait(seconds(timeout))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._running.done

    def is_success(self) -> bool:
        return self._running.done and self._running.acknowledge_error() is None

    def exception(self) -> BaseException | None:
        return self._running.acknowledge_error() if self._running.done else None

    def result(self) -> Any:
        self.wait()
        return self._tensors

    @no_dynamo
    def get_future(self) -> Future:
        if self._future is None:
            self._future = future = _Awaited(self._begin)
            tensors, future_set = self._tensors, threading.Event()

            def complete(running: work.Work) -> None:
                try:
                    set_future(future, tensors, running.acknowledge_error())
                finally:
                    future_set.set()

            self._running.add_done_callback(complete)
            if torch._C._current_graph_task_id() != NO_BACKWARD:
                Variable._execution_engine.queue_callback(partial(self._wait_in_backward, future_set))
            else:
                self._begin()
        return self._future

    def _begin(self) -> None:
        """Start the operation now: a thread waits for the future, or has added a callback."""
        self._running.expedite(on_this_thread=False)

    def _wait_in_backward(self, future_set: threading.Event) -> None:
        """Wait at the end of the backward pass, before DDP does.

        DDP waits for the future in C++, and turns an error from Python into a RuntimeError with its text. Waiting here
        first raises the original error. This also waits for callbacks of the future, which may call more collectives.
        """
        self._running.wait()
        future_set.wait()
        self._check()

    def source_rank(self) -> int:
        return -1

    _source_rank = source_rank


class _Awaited(Future):  # type: ignore[misc]
    """A future that calls `begin` when Python code waits for it or adds a callback.

    DDP's reducer waits in C++ and does not call these methods; `Handle._wait_in_backward` covers that case.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__()
        self._begin = begin

    def wait(self) -> Any:
        self._begin()
        return super().wait()

    def then(self, callback: Callable[[Future], Any]) -> Future:
        self._begin()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Future], None]) -> None:
        self._begin()
        super().add_done_callback(callback)


class Done(TorchWork):  # type: ignore[misc]
    """A collective that was complete when its `Work` object was made."""

    def __init__(self, tensors: Any = None) -> None:
        super().__init__()
        self._tensors = [] if tensors is None else tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self._tensors

    def get_future(self) -> Future:
        future: Future = Future()
        future.set_result(self._tensors)
        return future

    def source_rank(self) -> int:
        return -1

    _source_rank = source_rank


class Failed:
    """The value of a future that failed.

    Python can give a C++ future only a value, not an error. DDP extracts the tensors of a future's value by pickling
    it. Pickling this object raises the original error, so DDP reports its text instead of a missing tensor.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        raise self.error


def set_future(future: Future, tensors: Any, error: BaseException | None) -> None:
    """Complete a future with the tensors, or so that reading its value raises the error."""
    if error is None:
        future.set_result(tensors)
        return
    future._set_unwrap_func(_value_or_error)
    future.set_result(Failed(error))


def _value_or_error(value: Any) -> Any:
    if isinstance(value, Failed):
        raise value.error
    return value


def seconds(timeout: timedelta | None) -> float | None:
    """Convert torch's timeout to seconds; None, zero and negative values mean that no timeout was given."""
    if timeout is None:
        return None
    amount = timeout.total_seconds()
    return amount if amount > 0 else None
