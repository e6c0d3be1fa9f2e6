"""Starts the workers of a job, watches over them, and ends them together.

When one fails, the others get a grace in which they notice by themselves (their collectives raise) and can save what
they want; then SIGTERM, and later SIGKILL. Whatever a worker has started ends with it. If the supervisor's own process
is killed, its guard ends the workers.

The watching is done by one thread, the printing by another (see `output.py`); the caller only starts, waits and stops.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from gradwire.errors import ConfigError, InvalidSize, TransportError
from gradwire.launch import environment, rootcause
from gradwire.launch.ladder import GRACE, KILL_AFTER, Ladder
from gradwire.launch.output import Output
from gradwire.launch.rendezvous import Rendezvous
from gradwire.launch.rootcause import Ending
from gradwire.launch.sessions import Guard
from gradwire.launch.worker import Task, Worker

_ASK_EVERY = 0.02  # seconds, for news that no descriptor tells


@dataclass(frozen=True)
class Outcome:
    """How the job ended."""

    endings: tuple[Ending, ...]
    root: Ending | None  # the failure that explains the others
    last_lines: tuple[str, ...]  # that the failed rank printed
    stopped_by: int | None  # the signal that `stop` was given, if the job did not end before

    @property
    def exit_code(self) -> int:
        if self.root is not None:
            return self.root.exit_code or 1
        return 0 if self.stopped_by is None else rootcause.EXIT_BY_SIGNAL + self.stopped_by


class Supervisor:
    """One job on this machine: `start`, `wait`, `stop`, and `workers` with their pids in between.

    As a context manager it starts the job, and leaves nothing of it behind.
    """

    def __init__(
        self,
        task: Task,
        size: int,
        rendezvous: Rendezvous,
        *,
        output: Output | None = None,
        environ: Mapping[str, str] | None = None,
        grace: float = GRACE,
        kill_after: float = KILL_AFTER,
    ) -> None:
        if size < 1:
            raise InvalidSize(f"a job needs at least 1 worker, not {size}")
        if not sys.executable:
            raise ConfigError("cannot start workers: this Python does not know its own program (sys.executable)")
        self.size = size
        self.workers: tuple[Worker, ...] = ()
        self.outcome: Outcome | None = None
        self._task = task
        self._rendezvous = rendezvous
        self._output = output or Output(size)
        self._environ = os.environ if environ is None else environ
        self._ladder = Ladder(grace, kill_after)
        self._requests: collections.deque[int] = collections.deque()
        self._stopped_by: int | None = None
        self._news: socket.socket | None = None
        self._wake: socket.socket | None = None
        self._guard: Guard | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._problem: BaseException | None = None

    def start(self) -> None:
        try:
            self._news, self._wake = socket.socketpair()
            self._rendezvous.coordinator.start()
            self._guard = Guard()
            self._start_workers(self._guard)
            self._output.start()
            self._thread = threading.Thread(target=self._run, name="gradwire-supervisor", daemon=True)
            self._thread.start()
        except BaseException as error:
            if self._thread is not None and self._thread.is_alive():  # an interrupt at the last moment
                self.stop(signal.SIGKILL)
                self._thread.join()
            else:
                self._release()
            if isinstance(error, OSError) and not isinstance(error, TransportError):
                raise TransportError(f"cannot start worker {len(self.workers)} of {self.size}: {error}") from error
            raise

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the job has ended; `outcome` then says how."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended.is_set():
            # In short waits: a signal that another thread receives does not interrupt a long one.
            left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
            if left <= 0:
                return False
            self._ended.wait(left)
        if self._problem is not None:
            raise self._problem
        return True

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Tell all workers to stop, by this signal first. Returns at once, and may be called from a signal handler."""
        self._requests.append(number)
        if self._wake is not None:
            with contextlib.suppress(OSError):  # the job has ended
                self._wake.send(b".")

    def __enter__(self) -> Supervisor:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended.is_set():
            self.stop(signal.SIGINT if kind is KeyboardInterrupt else signal.SIGTERM)
        try:
            self.wait()
        except KeyboardInterrupt:  # an impatient one
            self.stop(signal.SIGKILL)
            self.wait()
            raise

    def _start_workers(self, guard: Guard) -> None:
        shared = environment.shared_by_workers(
            self._environ,
            self.size,
            coordinator=self._rendezvous.coordinator.address,
            job=self._rendezvous.job,
            token=self._rendezvous.token,
            port=environment.free_port(),
        )
        for rank in range(self.size):
            with self._output.pipes(rank) as (out, err):
                worker = Worker(rank, self._task, environment.of_worker(shared, rank), out, err)
            self.workers += (worker,)
            guard.watch(worker.pid)  # before it may run, so that nothing can ever escape
            worker.release()

    def _run(self) -> None:
        try:
            self._watch()
            self._see_output_through()
            root = rootcause.find(self._endings())
            last_lines = tuple(self._output.tail(root.rank)) if root is not None else ()
            self.outcome = Outcome(self._endings(), root, last_lines, self._stopped_by)
        except BaseException as error:
            self._problem = error
        finally:
            self._release()
            self._ended.set()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            assert self._news is not None
            selector.register(self._news, selectors.EVENT_READ)
            for worker in self.workers:
                for fd in worker.descriptors():
                    selector.register(fd, selectors.EVENT_READ, worker)
            while not all(worker.gone for worker in self.workers):
                for key, _ in selector.select(self._pause()):
                    if key.data is None:
                        self._news.recv(4096)
                    elif key.fd in selector.get_map():  # its other descriptor may have told already
                        self._update(key.data, selector)
                for worker in self.workers:
                    if worker.must_be_asked:
                        self._update(worker, selector)
                self._act(time.monotonic())

    def _pause(self) -> float | None:
        """How long nothing needs to be done if no descriptor tells."""
        pauses = [_ASK_EVERY] if any(worker.must_be_asked for worker in self.workers) else []
        if self._ladder.next_due is not None:
            pauses.append(max(0.0, self._ladder.next_due - time.monotonic()))
        return 0.0 if self._requests else min(pauses, default=None)

    def _update(self, worker: Worker, selector: selectors.BaseSelector) -> None:
        before = set(worker.descriptors())
        worker.update(time.monotonic())
        for fd in before.difference(worker.descriptors()):
            selector.unregister(fd)
        if worker.gone:
            if self._guard is not None:
                self._guard.forget(worker.pid)
            worker.close()

    def _act(self, now: float) -> None:
        while self._requests:
            number = self._requests.popleft()
            self._stopped_by = self._stopped_by or number
            self._ladder.asked(number, now)
        if any(worker.has_failed(now) for worker in self.workers):
            self._ladder.failed(now)
        for number in self._ladder.due(now):
            for worker in self.workers:
                worker.signal(number, now)

    def _see_output_through(self) -> None:
        """A reader of our output may be slow or paused, and then has all the time unless we are told to stop."""
        while not self._output.close(timeout=0.2):
            if self._requests or self._stopped_by:
                return

    def _endings(self) -> tuple[Ending, ...]:
        return tuple(worker.ending for worker in self.workers if worker.ending is not None)

    def _release(self) -> None:
        """Whatever happened, nothing of the job is left."""
        for worker in self.workers:
            if not worker.gone:
                worker.kill()
            worker.close()
        if self._guard is not None:
            self._guard.close()
        self._rendezvous.coordinator.stop()
        self._output.close(timeout=1.0)
        for end in (self._news, self._wake):
            if end is not None:
                end.close()
