"""Starts the workers of a job, supervises them, and ends them together.

When a worker fails, `restart_policy` decides: the job continues without it, replaces it, or has failed. If the job has
failed, the other workers get a grace period in which their collectives raise and they can save their state; then
SIGTERM, and later SIGKILL. Workers that leave after a whole step because of a signal (see `graceful_stop`) have not
failed, and get more time. Processes that a worker has started end with it. If the supervisor's own process is killed,
its guard kills the workers.

One thread supervises and another prints (see `output.py`); the caller starts, waits and stops.
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
from gradwire.job.stop_notices import NoticeKind, StopNotice
from gradwire.launch import root_cause
from gradwire.launch.defer_signals import deferred_signals
from gradwire.launch.fault_injection import Chaos, FaultInjector
from gradwire.launch.graceful_stop import GracefulStop
from gradwire.launch.output import Output
from gradwire.launch.process_tree import Guard
from gradwire.launch.restart_policy import EndKind, Restarts, Verdict
from gradwire.launch.root_cause import Ending
from gradwire.launch.stop_escalation import GRACE, KILL_AFTER, STOP_TIMEOUT, StopEscalation
from gradwire.launch.worker_process import Task, Worker
from gradwire.launch.worker_setup import WorkerSetup

_POLL_SECONDS = 0.02  # between checks for changes that no descriptor shows
_TAIL_SECONDS = 1.0  # for the last output of a worker that has ended
_AUXILIARY_SECONDS = 3.0  # for the auxiliary processes to end when the workers are gone


@dataclass(frozen=True)
class Outcome:
    """How the job ended."""

    endings: tuple[Ending, ...]
    root: Ending | None  # the failure that explains the others; None if the job ended well
    last_lines: tuple[str, ...]  # printed by the worker that is the root cause
    stopped_by: int | None  # the signal given to `stop` or to a worker, if the job had not ended before
    stop_origin: str = ""  # where that signal arrived, in words that follow its name

    @property
    def exit_code(self) -> int:
        if self.root is not None:
            return self.root.exit_code or 1
        return 0 if self.stopped_by is None else root_cause.EXIT_BY_SIGNAL + self.stopped_by


@dataclass(frozen=True)
class _Succession:
    """A worker to be replaced, and when."""

    lost: Worker
    due: float


class Supervisor:
    """One job on this machine: `start`, `wait`, `stop`, and its `workers`.

    As a context manager it starts the job and ends all of its processes.
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
        stop_timeout: float = STOP_TIMEOUT,
        stdin: int | None = None,
    ) -> None:
        """`stdin` is the descriptor that worker 0 reads as its standard input. That of all others is empty."""
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
        self._stdin = stdin
        self._escalation = StopEscalation(grace, kill_after, stop_timeout)
        self._graceful = GracefulStop(setup.noun, stop_timeout)
        self._local_ranks: dict[int, int] = {}
        self._auxiliary: list[Worker] = []  # processes that are not workers
        self._judged: set[int] = set()
        self._successions: list[_Succession] = []  # pending
        self._unanswered: list[Worker] = []  # workers that failed and were not replaced
        self._given_up_at: int | None = None  # index in it of the failure that ended the job
        self._requests: collections.deque[int] = collections.deque()
        self._asked: set[int] = set()  # the signals of all requests to stop
        self._selector = selectors.DefaultSelector()
        self._wake_receiver: socket.socket | None = None
        self._wake_sender: socket.socket | None = None
        self._guard: Guard | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._problem: BaseException | None = None

    def start(self) -> None:
        try:
            with deferred_signals():
                self._start()
        except BaseException as error:
            if self._thread is not None and self._thread.ident is not None:  # an interrupt arrived meanwhile
                self.stop(signal.SIGKILL)
                self._thread.join()
            else:
                self._release()
            if isinstance(error, OSError) and not isinstance(error, TransportError):
                raise TransportError(f"cannot start worker {len(self.workers)} of {self.size}: {error}") from error
            raise

    def _start(self) -> None:
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._guard = Guard()
        self._setup.start(self)
        for local_rank in range(self.size):
            self._start_worker(local_rank)
        self._output.start()
        self._thread = threading.Thread(target=self._run, name="gradwire-supervisor", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the job has ended, and return whether it has; then `outcome` is set."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended.is_set():
            # Short waits, because a signal that another thread receives does not interrupt a long one.
            left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
            if left <= 0:
                return False
            self._ended.wait(left)
        if self._problem is not None:
            raise self._problem
        return True

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask for the stop of all workers, with this signal first. Returns at once; signal handlers may call it."""
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
        except KeyboardInterrupt:  # a second Ctrl-C
            self.stop(signal.SIGKILL)
            self.wait()
            raise

    # -- for the setup and fault injection ----------------------------------------------------------------------------

    def wake(self) -> None:
        if self._wake_sender is not None:
            with contextlib.suppress(OSError):  # the job has ended, or the thread will wake anyway
                self._wake_sender.send(b".")

    def print_line(self, line: str) -> None:
        self._output.print_line(line)

    def start_process(self, label: str, log: str, task: Task, environ: Mapping[str, str]) -> Worker:
        process = self._launch(len(self._auxiliary), label, log, task, environ, noun=label, shown=False)
        self._auxiliary.append(process)
        return process

    def end_after_failure(self) -> None:
        self._escalation.failed(time.monotonic())
        self._prepare_end()

    def last_output(self, label: str) -> list[str]:
        return self._output.tail(label, timeout=1.0)

    def add_worker(self) -> Worker | None:
        """Start one more worker, without replacing one; None if the work of the job is done."""
        if self.restarts.done:
            return None
        taken = {self._local_ranks[number] for number in self.restarts.living}
        taken |= {self._local_ranks[one.lost.number] for one in self._successions}
        return self._start_worker(min(set(range(len(taken) + 1)) - taken))

    def inject(self, action: str, workers: Sequence[Worker]) -> str:
        return self._setup.inject(action, workers)

    # -- the supervisor's thread --------------------------------------------------------------------------------------

    def _start_worker(self, local_rank: int) -> Worker:
        number, noun = self._setup.number_of(len(self.workers)), self._setup.noun
        surroundings = self._setup.environment_of(number, local_rank)
        task = replace(self._task, inherited=self._task.inherited + surroundings.inherited)
        stdin = self._stdin if number == 0 else None
        log = f"{noun}-{number}.log"
        worker = self._launch(number, str(number), log, task, surroundings.environ, noun, stdin=stdin)
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
        stdin: int | None = None,
    ) -> Worker:
        assert self._guard is not None
        with self._output.pipes(label, log, shown=shown) as pipes:
            worker = Worker(number, task, environ, pipes, noun, stdin=stdin)
        self._guard.watch(worker.pid)  # before it may run, so that the guard knows every process
        worker.release()
        for fd in worker.descriptors():
            self._selector.register(fd, selectors.EVENT_READ, worker)
        return worker

    def _run(self) -> None:
        try:
            if self._chaos is not None:
                self._injector = FaultInjector(self._chaos, self, time.monotonic())
            self._watch_until_gone()
            self._finish_output()
            root, elsewhere = self._root(), self._setup.elsewhere
            stopped_by = self._graceful.stopped_by
            if root is None and stopped_by is None and elsewhere.problem is not None:
                raise elsewhere.problem
            endings = (*self._endings(), *elsewhere.endings)
            self.outcome = Outcome(endings, root, self._last_lines(root), stopped_by, self._graceful.origin)
        except BaseException as error:
            self._problem = error
        finally:
            self._release()
            self._ended.set()

    def _watch_until_gone(self) -> None:
        while self._successions or not all(worker.gone for worker in self.workers):
            self._watch(self._pause())
            self._act(time.monotonic())
        self._setup.workers_gone(self._endings(), self._last_lines)
        while not self._setup.concluded and signal.SIGKILL not in self._asked:
            self._watch(self._pause())
            self._act(time.monotonic())
        self._setup.stop()
        deadline = time.monotonic() + _AUXILIARY_SECONDS
        while not all(process.gone for process in self._auxiliary) and time.monotonic() < deadline:
            self._watch(_POLL_SECONDS)

    def _watch(self, pause: float | None) -> None:
        assert self._wake_receiver is not None
        for key, _ in self._selector.select(pause):
            if key.data is None:
                self._wake_receiver.recv(4096)
            elif key.fd in self._selector.get_map():  # an event on its other descriptor may have unregistered it
                self._update(key.data)
        for process in (*self.workers, *self._auxiliary):
            if process.needs_polling:
                self._update(process)

    def _pause(self) -> float | None:
        """Return how long the thread may wait for descriptors; None: without limit."""
        pauses = [_POLL_SECONDS] if any(process.needs_polling for process in (*self.workers, *self._auxiliary)) else []
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
        self._handle_requests(now)
        self._handle_notices(now)
        for worker in self.workers:
            if worker.number not in self._judged and (worker.ending is not None or worker.has_failed(now)):
                self._judge(worker, now)
        self._setup.update(now)
        self._replace(now)
        if self._injector is not None:
            self._injector.make(now)
        for number in self._escalation.due(now):
            if number == signal.SIGKILL and self._escalation.graceful and number not in self._asked:
                self.print_line(f"gradwire: {self._graceful.overdue}")
            for worker in self.workers:
                worker.signal(number, now)

    def _handle_requests(self, now: float) -> None:
        while self._requests:
            number = self._requests.popleft()
            self._asked.add(number)
            watching = any(worker.watches and worker.ending is None for worker in self.workers)
            self._escalation.asked(number, now, watching=watching)
            self._report_stop(self._graceful.asked(number, watching=watching))
            self._setup.stopping(number)
            self._prepare_end()

    def _handle_notices(self, now: float) -> None:
        """Note what workers have reported about signals that stop the job."""
        for worker, notice in self._new_notices():
            if notice.kind is NoticeKind.NOT_WATCHING and (again := self._graceful.default_signal):
                worker.signal(again, now)  # it arrived after the last step, so it had no effect on the script
            if notice.kind not in (NoticeKind.RECEIVED, NoticeKind.AGREED):
                continue
            self._report_stop(self._graceful.noticed(worker.number, notice, forwarded=worker.was_signalled))
            self._escalation.leaving(now, agreed=notice.kind is NoticeKind.AGREED)
            if notice.kind is NoticeKind.AGREED:
                self._prepare_end()

    def _new_notices(self) -> list[tuple[Worker, StopNotice]]:
        """Return the notices that have arrived. A received signal comes before the agreement that follows from it."""
        found = [(worker, notice) for worker in self.workers for notice in worker.take_notices()]
        if any(notice.kind is NoticeKind.AGREED for _, notice in found):
            for worker in self.workers:
                if not worker.gone:  # the one with the signal has reported it before any rank could agree
                    self._update(worker)
            found += [(worker, notice) for worker in self.workers for notice in worker.take_notices()]
        return sorted(found, key=lambda one: one[1].kind is not NoticeKind.RECEIVED)

    def _report_stop(self, line: str) -> None:
        if line:
            self.print_line(f"gradwire: {line}")

    def _judge(self, worker: Worker, now: float) -> None:
        self._judged.add(worker.number)
        if worker.ending is not None and worker.ending.stopped:
            self.restarts.living.discard(worker.number)
            return
        end = worker.end_kind
        if worker.report is not None and worker.report.explains_itself and not self._setup.formed:
            self.restarts.failed_early(worker.report.traceback)
        verdict = self.restarts.ended(worker.number, end, worker.failure_time(now))
        if end is EndKind.WELL:
            return
        if verdict is Verdict.REPLACE:
            verdict = self._replaced(worker, now)
        else:
            self._unanswered.append(worker)
            self._report(worker, verdict)
        if verdict is Verdict.GIVE_UP:
            self._give_up(now)
        elif worker.ending is None:  # an exception ended the script, but a thread keeps the process alive
            worker.signal(signal.SIGKILL, now)

    def _replaced(self, worker: Worker, now: float) -> Verdict:
        """Replace a worker at once, or later after several early failures in its place."""
        lived = worker.failure_time(now) - worker.began
        delay = self.restarts.delay(self._local_ranks[worker.number], lived, killed=worker.was_killed)
        if not delay:
            return self._succeed(worker)
        self._successions.append(_Succession(worker, now + delay))
        self.restarts.pending += 1
        self._report(worker, Verdict.REPLACE, delay=delay)
        return Verdict.REPLACE

    def _replace(self, now: float) -> None:
        """Start the replacements that are due; drop all of them if they would find no work."""
        over = self.restarts.over
        for one in [one for one in self._successions if over or one.due <= now]:
            self._successions.remove(one)
            self.restarts.pending -= 1
            if over:
                self._unanswered.append(one.lost)
            elif self._succeed(one.lost) is Verdict.GIVE_UP:
                self._give_up(now)

    def _succeed(self, worker: Worker) -> Verdict:
        """Start the successor of a worker; return what happens to the job, also if the start fails."""
        successor = self._successor(worker)
        verdict = Verdict.REPLACE if successor is not None else self.restarts.without_it()
        if successor is None:
            self._unanswered.append(worker)
        self._report(worker, verdict, successor)
        return verdict

    def _report(self, worker: Worker, verdict: Verdict, successor: Worker | None = None, delay: float = 0.0) -> None:
        if self._given_up_at is None:
            self._setup.judged(worker, verdict, successor, delay)

    def _give_up(self, now: float) -> None:
        if self._given_up_at is None:
            self._given_up_at = len(self._unanswered) - 1
            self._setup.failing()
        self._escalation.failed(now)
        self._prepare_end()

    def _successor(self, worker: Worker) -> Worker | None:
        try:
            return self._start_worker(self._local_ranks[worker.number])
        except OSError as error:
            self.print_line(f"gradwire: {worker.name} cannot be replaced: {error}")
            return None

    def _prepare_end(self) -> None:
        self.restarts.stopping = True
        if self._injector is not None:
            self._injector.stop()

    def _root(self) -> Ending | None:
        others = self._setup.elsewhere.endings
        everything = (*self._endings(), *others)
        if self._given_up_at is not None:
            endings = [worker.ending for worker in self._unanswered if worker.ending is not None]
            root = root_cause.of_failure([*endings, *others], self._given_up_at)
        elif self._graceful.stopped_by is not None:
            return None
        elif others:
            root = root_cause.find(everything)
        else:
            root = root_cause.of_end(everything, self.restarts.errors, formed=self._setup.formed)
        return root_cause.or_early_exit(root, everything)

    def _last_lines(self, root: Ending | None) -> tuple[str, ...]:
        """Return the last lines that a worker has printed, here or elsewhere."""
        if root is None:
            return ()
        if root.host:
            return tuple(self._setup.elsewhere.last_lines.get(root.number, ()))
        return tuple(self._output.tail(str(root.number), timeout=_TAIL_SECONDS))

    def _finish_output(self) -> None:
        """Wait until all output is shown. A slow or paused reader may take any time, unless `stop` is called."""
        while not self._output.close(timeout=0.2):
            if self._requests or self._asked:
                return

    def _endings(self) -> tuple[Ending, ...]:
        return tuple(worker.ending for worker in self.workers if worker.ending is not None)

    def _release(self) -> None:
        """End all processes and release everything, also after an error."""
        for process in (*self.workers, *self._auxiliary):
            if not process.gone:
                process.kill()
            process.close()
        if self._guard is not None:
            self._guard.close()
        self._setup.close()
        self._output.close(timeout=1.0)
        self._selector.close()
        for end in (self._wake_receiver, self._wake_sender):
            if end is not None:
                end.close()
