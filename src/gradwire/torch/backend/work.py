"""torch's handles of collectives: what `async_op=True` returns, and what DDP and FSDP wait for."""

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

NO_BACKWARD = -1  # torch's number of the backward pass, where there is none


class Handle(TorchWork):  # type: ignore[misc]
    """A collective that runs beside the program."""

    def __init__(self, running: work.Work, tensors: Any, check: Callable[[], None]) -> None:
        """`check` raises if the group is broken."""
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
            tensors, told = self._tensors, threading.Event()

            def tell(running: work.Work) -> None:
                try:
                    settle(future, tensors, running.acknowledge_error())
                finally:
                    told.set()

            self._running.add_done_callback(tell)
            if torch._C._current_graph_task_id() != NO_BACKWARD:
                Variable._execution_engine.queue_callback(partial(self._see_through, told))
            else:
                self._begin()
        return self._future

    def _begin(self) -> None:
        """Somebody waits who does not tell for how long, or wants to go on when it is done."""
        self._running.expedite(on_this_thread=False)

    def _see_through(self, told: threading.Event) -> None:
        """DDP waits for a future at the end of the backward pass, but cannot pass on what Python raises: it becomes a
        RuntimeError with that text. So wait here first, also for callbacks of the future, which may make more calls."""
        self._running.wait()
        told.wait()
        self._check()

    def source_rank(self) -> int:
        return -1

    _source_rank = source_rank


class _Awaited(Future):  # type: ignore[misc]
    """A future that tells us when Python wants it. DDP's reducer waits without a word, and is seen through."""

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
    """A collective that has ended well before anybody got a handle of it."""

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

    A future of C++ cannot be given an error from Python, only a value. DDP takes the tensors out of the values that it
    waits for by pickling them, and so meets the error's text, and not a complaint about a missing tensor.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        raise self.error


def settle(future: Future, tensors: Any, error: BaseException | None) -> None:
    """End a future with the tensors, or with an error for whoever takes its value."""
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
    """A timeout of torch as ours: none, zero and below mean that nobody gave one."""
    if timeout is None:
        return None
    amount = timeout.total_seconds()
    return amount if amount > 0 else None
