"""Starts the workers of a job, watches over them, and ends them together.

When one fails, `restart_policy` decides: the job goes on without it, or replaces it, or has failed. Then the others get
a grace period in which they notice by themselves (their collectives raise) and can save what they want; then SIGTERM,
and later SIGKILL. Whatever a worker has started ends with it. If the supervisor's own process is killed, its guard ends
the workers.

The watching is done by one thread, the printing by another (see `output.py`); the caller only starts, waits and stops.
"""

from __future__ import annotations

import collections
import contextlib
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from gradwire.errors import ConfigError, InvalidSize, TransportError
from gradwire.launch import root_cause
from gradwire.launch.defer_signals import deferred_signals
from gradwire.launch.fault_injection import Chaos, FaultInjector
from gradwire.launch.output import Output
from gradwire.launch.process_tree import Guard
from gradwire.launch.restart_policy import EndKind, Restarts, Verdict
from gradwire.launch.root_cause import Ending
from gradwire.launch.stop_escalation import GRACE, KILL_AFTER, StopEscalation
from gradwire.launch.worker_process import Task, Worker
from gradwire.launch.worker_setup import WorkerSetup

_ASK_EVERY = 0.02  # seconds, for news that no descriptor tells
_LAST_WORDS = 3.0  # seconds for what ran beside the workers to end, when they are gone


@dataclass(frozen=True)
class Outcome:
    """How the job ended."""

    endings: tuple[Ending, ...]
    root: Ending | None  # the failure that explains the others; None if the job ended well all the same
    last_lines: tuple[str, ...]  # that the failed worker printed
    stopped_by: int | None  # the signal that `stop` was given, if the job did not end before

    @property
    def exit_code(self) -> int:
        if self.root is not None:
            return self.root.exit_code or 1
        return 0 if self.stopped_by is None else root_cause.EXIT_BY_SIGNAL + self.stopped_by


@dataclass(frozen=True)
class _Succession:
    """A worker that is to be replaced, and when."""

    lost: Worker
    due: float


class Supervisor:
    """One job on this machine: `start`, `wait`, `stop`, and `workers` with their pids in between.

    As a context manager it starts the job, and leaves nothing of it behind.
    """

    def __init__(
        self,
        task: Task,
        size: int,
        setup: WorkerSetup,
        *,
        restarts: Restarts | None = None,
        chaos: Chaos | None = None,
        output: Output | None = None,
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
        self.restarts = restarts or Restarts(minimum=size, fixed=True)
        self._task = task
        self._setup = setup
        self._chaos = chaos
        self._injector: FaultInjector | None = None
        self._output = output or Output()
        self._escalation = StopEscalation(grace, kill_after)
        self._local_ranks: dict[int, int] = {}
        self._beside: list[Worker] = []  # processes that are no workers
        self._judged: set[int] = set()
        self._successions: list[_Succession] = []  # to come
        self._unanswered: list[Worker] = []  # that failed and were not replaced
        self._given_up_at: int | None = None  # how many of these there were when the job failed
        self._requests: collections.deque[int] = collections.deque()
        self._stopped_by: int | None = None
        self._selector = selectors.DefaultSelector()
        self._news: socket.socket | None = None
        self._wake: socket.socket | None = None
        self._guard: Guard | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._problem: BaseException | None = None

    def start(self) -> None:
        try:
            with deferred_signals():
                self._start()
        except BaseException as error:
            if self._thread is not None and self._thread.ident is not None:  # an interrupt that came meanwhile
                self.stop(signal.SIGKILL)
                self._thread.join()
            else:
                self._release()
            if isinstance(error, OSError) and not isinstance(error, TransportError):
                raise TransportError(f"cannot start worker {len(self.workers)} of {self.size}: {error}") from error
            raise

    def _start(self) -> None:
        self._news, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._news, selectors.EVENT_READ)
        self._guard = Guard()
        self._setup.start(self)
        for local_rank in range(self.size):
            self._start_worker(local_rank)
        self._output.start()
        self._thread = threading.Thread(target=self._run, name="gradwire-supervisor", daemon=True)
        self._thread.start()

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
        self.wake()

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

    # -- for the setup, and for trouble -------------------------------------------------------------------------------

    def wake(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(OSError):  # the job has ended; or it is about to wake anyway
                self._wake.send(b".")

    def say(self, line: str) -> None:
        self._output.say(line)

    def start_process(self, label: str, log: str, task: Task, environ: Mapping[str, str]) -> Worker:
        process = self._launch(len(self._beside), label, log, task, environ, noun=label, shown=False)
        self._beside.append(process)
        return process

    def last_words(self, label: str) -> list[str]:
        return self._output.tail(label, timeout=1.0)

    def add_worker(self) -> Worker | None:
        """One more, in the place of nobody; None if there is nothing left to do."""
        if self.restarts.done:
            return None
        taken = {self._local_ranks[number] for number in self.restarts.living}
        taken |= {self._local_ranks[one.lost.number] for one in self._successions}
        return self._start_worker(min(set(range(len(taken) + 1)) - taken))

    def disturb(self, action: str, workers: Sequence[Worker]) -> str:
        return self._setup.disturb(action, workers)

    # -- the supervisor's thread --------------------------------------------------------------------------------------

    def _start_worker(self, local_rank: int) -> Worker:
        number, noun = len(self.workers), self._setup.noun
        equipment = self._setup.equip(number, local_rank)
        task = replace(self._task, inherited=self._task.inherited + equipment.inherited)
        worker = self._launch(number, str(number), f"{noun}-{number}.log", task, equipment.environ, noun)
        self.workers += (worker,)
        self._local_ranks[number] = local_rank
        self.restarts.started(number)
        self._setup.started(worker)
        return worker

    def _launch(
        self,
        number: int,
        label: str,
        log: str,
        task: Task,
        environ: Mapping[str, str],
        noun: str,
        *,
        shown: bool = True,
    ) -> Worker:
        assert self._guard is not None
        with self._output.pipes(label, log, shown=shown) as pipes:
            worker = Worker(number, task, environ, pipes, noun)
        self._guard.watch(worker.pid)  # before it may run, so that nothing can ever escape
        worker.release()
        for fd in worker.descriptors():
            self._selector.register(fd, selectors.EVENT_READ, worker)
        return worker

    def _run(self) -> None:
        try:
            if self._chaos is not None:
                self._injector = FaultInjector(self._chaos, self, time.monotonic())
            self._watch_until_gone()
            self._see_output_through()
            root = self._root()
            last_lines = tuple(self._output.tail(str(root.number))) if root is not None else ()
            self.outcome = Outcome(self._endings(), root, last_lines, self._stopped_by)
        except BaseException as error:
            self._problem = error
        finally:
            self._release()
            self._ended.set()

    def _watch_until_gone(self) -> None:
        while self._successions or not all(worker.gone for worker in self.workers):
            self._watch(self._pause())
            self._act(time.monotonic())
        self._setup.stop()
        deadline = time.monotonic() + _LAST_WORDS
        while not all(process.gone for process in self._beside) and time.monotonic() < deadline:
            self._watch(_ASK_EVERY)

    def _watch(self, pause: float | None) -> None:
        assert self._news is not None
        for key, _ in self._selector.select(pause):
            if key.data is None:
                self._news.recv(4096)
            elif key.fd in self._selector.get_map():  # its other descriptor may have told already
                self._update(key.data)
        for process in (*self.workers, *self._beside):
            if process.must_be_asked:
                self._update(process)

    def _pause(self) -> float | None:
        """How long nothing needs to be done if no descriptor tells."""
        pauses = [_ASK_EVERY] if any(process.must_be_asked for process in (*self.workers, *self._beside)) else []
        dues = [self._escalation.next_due, self._setup.next_due, self._injector.next_due if self._injector else None]
        for due in dues + [one.due for one in self._successions]:
            if due is not None:
                pauses.append(max(0.0, due - time.monotonic()))
        return 0.0 if self._requests else min(pauses, default=None)

    def _update(self, process: Worker) -> None:
        before, alive = set(process.descriptors()), process.ending is None
        process.update(time.monotonic())
        for fd in before.difference(process.descriptors()):
            self._selector.unregister(fd)
        if alive and process.ending is not None:
            self._setup.ended(process)
        if process.gone:
            if self._guard is not None:
                self._guard.forget(process.pid)
            process.close()

    def _act(self, now: float) -> None:
        while self._requests:
            number = self._requests.popleft()
            self._stopped_by = self._stopped_by or number
            self._escalation.asked(number, now)
            self._end_begins()
        for worker in self.workers:
            if worker.number not in self._judged and (worker.ending is not None or worker.has_failed(now)):
                self._judge(worker, now)
        self._setup.attend(now)
        self._replace(now)
        if self._injector is not None:
            self._injector.make(now)
        for number in self._escalation.due(now):
            for worker in self.workers:
                worker.signal(number, now)

    def _judge(self, worker: Worker, now: float) -> None:
        self._judged.add(worker.number)
        if worker.ending is not None and worker.ending.stopped:
            self.restarts.living.discard(worker.number)
            return
        end = worker.fate
        verdict = self.restarts.ended(worker.number, end, worker.failure_time(now))
        if end is EndKind.WELL:
            return
        if verdict is Verdict.REPLACE:
            verdict = self._replaced(worker, now)
        else:
            self._unanswered.append(worker)
            self._tell(worker, verdict)
        if verdict is Verdict.GIVE_UP:
            self._give_up(now)
        elif worker.ending is None:  # it has raised, but a thread holds it
            worker.signal(signal.SIGKILL, now)

    def _replaced(self, worker: Worker, now: float) -> Verdict:
        """Replace it at once; or later, if one after the other has died young in its place."""
        lived = worker.failure_time(now) - worker.began
        delay = self.restarts.delay(self._local_ranks[worker.number], lived, killed=worker.was_killed)
        if not delay:
            return self._succeed(worker)
        self._successions.append(_Succession(worker, now + delay))
        self.restarts.coming += 1
        self._tell(worker, Verdict.REPLACE, delay=delay)
        return Verdict.REPLACE

    def _replace(self, now: float) -> None:
        """Start the replacements for which it is time; none if there is nothing left for them to do."""
        over = self.restarts.over
        for one in [one for one in self._successions if over or one.due <= now]:
            self._successions.remove(one)
            self.restarts.coming -= 1
            if over:
                self._unanswered.append(one.lost)
            elif self._succeed(one.lost) is Verdict.GIVE_UP:
                self._give_up(now)

    def _succeed(self, worker: Worker) -> Verdict:
        """Start the successor of a worker; what becomes of the job if that cannot be done."""
        successor = self._successor(worker)
        verdict = Verdict.REPLACE if successor is not None else self.restarts.without_it()
        if successor is None:
            self._unanswered.append(worker)
        self._tell(worker, verdict, successor)
        return verdict

    def _tell(self, worker: Worker, verdict: Verdict, successor: Worker | None = None, delay: float = 0.0) -> None:
        if self._given_up_at is None:
            self._setup.judged(worker, verdict, successor, delay)

    def _give_up(self, now: float) -> None:
        if self._given_up_at is None:
            self._given_up_at = len(self._unanswered) - 1
        self._escalation.failed(now)
        self._end_begins()

    def _successor(self, worker: Worker) -> Worker | None:
        try:
            return self._start_worker(self._local_ranks[worker.number])
        except OSError as error:
            self.say(f"gradwire: {worker.name} cannot be replaced: {error}")
            return None

    def _end_begins(self) -> None:
        self.restarts.stopping = True
        if self._injector is not None:
            self._injector.stop()

    def _root(self) -> Ending | None:
        if self._given_up_at is not None:
            endings = [worker.ending for worker in self._unanswered if worker.ending is not None]
            root = root_cause.of_failure(endings, self._given_up_at)
        elif self._stopped_by is not None:
            return None
        else:
            root = root_cause.of_end(self._endings(), self.restarts.errors, formed=self._setup.formed)
        return root_cause.or_early_exit(root, self._endings())

    def _see_output_through(self) -> None:
        """A reader of our output may be slow or paused, and then has all the time unless we are told to stop."""
        while not self._output.close(timeout=0.2):
            if self._requests or self._stopped_by:
                return

    def _endings(self) -> tuple[Ending, ...]:
        return tuple(worker.ending for worker in self.workers if worker.ending is not None)

    def _release(self) -> None:
        """Whatever happened, nothing of the job is left."""
        for process in (*self.workers, *self._beside):
            if not process.gone:
                process.kill()
            process.close()
        if self._guard is not None:
            self._guard.close()
        self._setup.close()
        self._output.close(timeout=1.0)
        self._selector.close()
        for end in (self._news, self._wake):
            if end is not None:
                end.close()
