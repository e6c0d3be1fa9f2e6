"""Sets up the workers of an elastic job: starts the coordinator, renews leases, and passes on its news."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gradwire.launch import process_tree, worker_setup
from gradwire.launch.coordinator_process import CoordinatorProcess
from gradwire.launch.fault_injection import BY_CHAOS
from gradwire.launch.restart_policy import Restarts, Verdict
from gradwire.launch.root_cause import how_it_ended
from gradwire.launch.worker_process import Worker
from gradwire.launch.worker_setup import OneLauncher, SupervisorAccess, WorkerEnvironment
from gradwire.membership.client.news_pipe import NewsWriter
from gradwire.membership.types import News

RESUME_SECONDS = 5.0  # seconds for a stopped worker to continue; it may then join again


class StoppedWorkers:
    """Decides which workers that a signal has stopped (SIGSTOP, Ctrl-Z) are lost.

    >>> stopped = StoppedWorkers()
    >>> stopped.lost(1, paused=True, generation=3, all_paused=False, now=10.0)
    False
    >>> stopped.lost(1, paused=True, generation=4, all_paused=False, now=15.0)
    True
    """

    def __init__(self) -> None:
        self._since: dict[int, tuple[float, int]] = {}  # by number: when the worker stopped, and in which generation

    def lost(self, number: int, *, paused: bool, generation: int, all_paused: bool, now: float) -> bool:
        """Return whether to give up a worker; `all_paused`: only stopped workers are left, and others have finished."""
        if not paused:
            self._since.pop(number, None)
            return False
        since, before = self._since.setdefault(number, (now, generation))
        return now >= since + RESUME_SECONDS and (generation > before or all_paused)


_REPORT_SECONDS = 3.0  # in which the coordinator learns that a worker has ended
_CHECK_SECONDS = 0.5  # between two checks for stopped workers and full pipes


class Heartbeats(Protocol):
    """See `gradwire.membership.client.launcher_heartbeats`."""

    def start(self) -> None: ...

    def watch(self, ids: Iterable[str]) -> None: ...

    def frozen(self, ids: Iterable[str]) -> None: ...

    def gone(self, ids: Iterable[str]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class WorkerNumbers:
    """Numbers the workers of one of several launchers, so that no two workers of the job have the same number.

    >>> numbers = WorkerNumbers(node=1, nodes=3, workers=2)
    >>> [numbers.of(index) for index in range(4)]
    [2, 3, 7, 10]
    """

    node: int = 0
    nodes: int = 1
    workers: int = 1  # that each launcher starts at first

    def of(self, index: int) -> int:
        """Return the number of the worker that the launcher starts after `index` others."""
        if index < self.workers:
            return self.node * self.workers + index
        return self.nodes * self.workers + (index - self.workers) * self.nodes + self.node


@dataclass(frozen=True)
class ElasticRendezvous:
    """Where the members of an elastic job meet, and the names of this host's workers there."""

    address: str
    token: str | None  # for the workers' environment; None: they read the secret from this user's file
    name: str  # the workers' ids are this name, a slash and their number
    job: str | None = None  # None: the job that the coordinator serves
    size: int | None = None  # number of workers of the first generation: those with lower numbers; None: it has formed
    numbers: WorkerNumbers = WorkerNumbers()
    heartbeats: Callable[[Callable[[News], None]], Heartbeats] = field(kw_only=True)


class ElasticSetup(OneLauncher):
    """The setup of a job whose members change; `coordinator_process` is None if the coordinator runs elsewhere."""

    noun = "worker"

    def __init__(
        self,
        count: int,
        rendezvous: ElasticRendezvous,
        coordinator_process: CoordinatorProcess | None = None,
        *,
        welcome: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._welcome = welcome
        self._rendezvous = rendezvous
        self._coordinator = coordinator_process
        self._shared = worker_setup.shared_by_members(
            os.environ if environ is None else environ,
            count,
            coordinator=rendezvous.address,
            job=rendezvous.job,
            token=rendezvous.token,
        )
        self._pipes: dict[int, NewsWriter] = {}
        self._inbox: collections.deque[News] = collections.deque()
        self._news: News | None = None
        self._frozen = StoppedWorkers()
        self._supervisor: SupervisorAccess | None = None
        self._heartbeats: Heartbeats | None = None
        self._formed = False
        self._next_check = 0.0

    # -- starts and ends of workers -----------------------------------------------------------------------------------

    def number_of(self, index: int) -> int:
        return self._rendezvous.numbers.of(index)

    def start(self, supervisor: SupervisorAccess) -> None:
        self._supervisor = supervisor
        if self._welcome:
            supervisor.print_line(f"gradwire: {self._welcome}")
        if self._coordinator is not None:
            self._coordinator.start(supervisor, time.monotonic())
        self._heartbeats = self._rendezvous.heartbeats(self._receive)
        self._heartbeats.start()

    def environment_of(self, number: int, local_rank: int) -> WorkerEnvironment:
        if number in self._pipes:  # of a worker that could not be started
            self._pipes.pop(number).close()
        member, size = self._member(number), self._rendezvous.size
        pipe = self._pipes[number] = NewsWriter(member)
        start_rank = (number, size) if size is not None and number < size else None
        environ = worker_setup.of_member(self._shared, member, local_rank, news=pipe.variable, start_rank=start_rank)
        return WorkerEnvironment(environ, (pipe.read_end,))

    def started(self, worker: Worker) -> None:
        pipe = self._pipes[worker.number]
        pipe.close_read_end()
        if self._news is not None:
            pipe.send(self._news)
        if self._heartbeats is not None:
            self._heartbeats.watch([self._member(worker.number)])

    def ended(self, worker: Worker) -> None:
        if worker.noun != self.noun:  # the coordinator
            return
        self._pipes.pop(worker.number).close()
        if self._heartbeats is not None:
            self._heartbeats.gone([self._member(worker.number)])

    def judged(self, worker: Worker, verdict: Verdict, successor: Worker | None, delay: float) -> None:
        supervisor = self._supervisor_access
        what = worker.report.summary() if worker.ending is None and worker.report else ""
        what = what or (how_it_ended(worker.ending) if worker.ending else "has failed")
        supervisor.print_line(
            f"gradwire: {worker} {what}; {_consequence(supervisor.restarts, verdict, successor, delay)}"
        )
        report = worker.report
        if verdict is not Verdict.GIVE_UP and report is not None and report.explains_itself:
            supervisor.print_line(report.traceback.rstrip("\n"))

    # -- news of the coordinator, and periodic checks -----------------------------------------------------------------

    @property
    def next_due(self) -> float | None:
        due = self._coordinator.next_due if self._coordinator is not None else None
        return self._next_check if due is None else min(due, self._next_check)

    @property
    def formed(self) -> bool:
        return self._formed

    def update(self, now: float) -> None:
        self._take_news()
        if self._coordinator is not None:
            self._coordinator.update(now)
        if now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            for pipe in self._pipes.values():
                pipe.flush()
            self._end_frozen(now)

    def _receive(self, news: News) -> None:
        """Queue news; the heartbeat thread calls this."""
        self._inbox.append(news)
        self._supervisor_access.wake()

    def _take_news(self) -> None:
        while self._inbox:
            news, before = self._inbox.popleft(), self._news
            if self._coordinator is not None:
                self._coordinator.answered = True
            if before is not None and before.generation < news.generation:
                self._supervisor_access.restarts.regrouped(time.monotonic())
            self._report_joins(before, news)
            self._news = news
            # The launcher's own coordinator starts with the run: if it reports finished work, this run did not do it.
            self._formed |= news.generation > 0 and not (news.finished and self._coordinator is not None)
            self._supervisor_access.restarts.done |= news.finished
            self._count_others(news)
            for pipe in self._pipes.values():
                pipe.send(news)

    def _report_joins(self, before: News | None, news: News) -> None:
        """Print one line if members have joined after the first generation, here or elsewhere."""
        if before is None or not before.generation:  # the first generation has come and gone between two heartbeats
            known = self._rendezvous.size if news.generation > 1 else None
        else:
            known = before.size if before.generation < news.generation else None
        joined = news.size - known if known is not None else 0
        if joined > 0:
            count = "1 worker has" if joined == 1 else f"{joined} workers have"
            line = f"gradwire: {count} joined; generation {news.generation} has {news.size} workers"
            self._supervisor_access.print_line(line)

    def _count_others(self, news: News) -> None:
        """Count the members of other launchers. The coordinator may still count workers here that have just ended."""
        recent = time.monotonic() - _REPORT_SECONDS
        ours = sum(worker.ending is None or worker.ending.time > recent for worker in self._supervisor_access.workers)
        self._supervisor_access.restarts.remote = max(0, news.size - ours)

    def _end_frozen(self, now: float) -> None:
        supervisor = self._supervisor_access
        living = [worker for worker in supervisor.workers if worker.ending is None]
        paused = {worker.number for worker in living if process_tree.is_paused(worker.pid)}
        if self._heartbeats is not None:
            self._heartbeats.frozen(map(self._member, paused))
        all_paused = len(paused) == len(living) and supervisor.restarts.finished > 0
        generation = self._news.generation if self._news is not None else 0
        for worker in living:
            is_paused = worker.number in paused
            if self._frozen.lost(
                worker.number, paused=is_paused, generation=generation, all_paused=all_paused, now=now
            ):
                worker.kill(f"was frozen for more than {RESUME_SECONDS:g} s while the others continued, and was killed")

    # -- fault injection ----------------------------------------------------------------------------------------------

    def inject(self, action: str, workers: Sequence[Worker]) -> str:
        if action == "restart coordinator":
            killed = self._coordinator.kill(BY_CHAOS) if self._coordinator is not None else None
            return f"killed the coordinator (pid {killed.pid})" if killed else "found no coordinator to kill"
        one, other = workers
        for here, there in ((one, other), (other, one)):
            pipe = self._pipes[here.number]
            (pipe.cut if action == "cut" else pipe.heal)(self._member(there.number))
        link = f"{one.name} and {other.name}"
        return f"cut the links between {link}" if action == "cut" else f"healed the links between {link}"

    # -- the end ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.close()  # reports the ended workers; its reply may show a new generation
            self._take_news()
        if self._coordinator is not None:
            self._coordinator.stop(time.monotonic())

    def close(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.close()
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes = {}

    @property
    def _supervisor_access(self) -> SupervisorAccess:
        assert self._supervisor is not None, "not started"
        return self._supervisor

    def _member(self, number: int) -> str:
        return f"{self._rendezvous.name}/{number}"


def _consequence(restarts: Restarts, verdict: Verdict, successor: Worker | None, delay: float) -> str:
    left = len(restarts.living)
    if delay:
        count = f"restart {restarts.used} of {restarts.restarts}"
        return f"it is replaced in {delay:g} s, because it ran only for a short time ({count})"
    if verdict is Verdict.REPLACE and successor is not None:
        return f"{successor} takes its place (restart {restarts.used} of {restarts.restarts})"
    if verdict is Verdict.CONTINUE:
        return {0: "the others have finished", 1: "1 worker continues"}.get(left, f"{left} workers continue")
    if restarts.repeats_failure:
        return "another worker failed in the same way before the first step, so a restart would not help"
    if not restarts.recoverable:
        return "the others cannot continue without a coordinator"
    if restarts.restarts:
        return f"{left} of at least {restarts.minimum} are left, and all {restarts.restarts} restarts are used"
    return f"{left} of at least {restarts.minimum} are left"
