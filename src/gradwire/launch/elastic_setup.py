"""Worker setup of an elastic job: a coordinator in its own process, leases for the workers of this host, and news."""

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
from gradwire.launch.root_cause import fate
from gradwire.launch.worker_process import Worker
from gradwire.launch.worker_setup import SupervisorAccess, WorkerEnvironment
from gradwire.membership.client.news_pipe import NewsWriter
from gradwire.membership.types import News

RESUME_SECONDS = 5.0  # seconds for a frozen worker to thaw; it may then join again


class StoppedWorkers:
    """Tell it again and again who stands still; it tells who is not worth waiting for.

    >>> stopped = StoppedWorkers()
    >>> stopped.lost(1, paused=True, generation=3, alone=False, now=10.0)
    False
    >>> stopped.lost(1, paused=True, generation=4, alone=False, now=15.0)
    True
    """

    def __init__(self) -> None:
        self._since: dict[int, tuple[float, int]] = {}  # by number: when it froze, and in which generation

    def lost(self, number: int, *, paused: bool, generation: int, alone: bool, now: float) -> bool:
        """`alone`: nobody else is left, and somebody has finished the job: there is nothing to come back for."""
        if not paused:
            self._since.pop(number, None)
            return False
        since, before = self._since.setdefault(number, (now, generation))
        return now >= since + RESUME_SECONDS and (generation > before or alone)


_HEARSAY = 3.0  # seconds in which the coordinator has heard of the end of a worker, or will never
_LOOK_EVERY = 0.5  # seconds between two looks for frozen workers and full pipes


class Heartbeats(Protocol):
    """See `gradwire.membership.client.launcher_heartbeats`."""

    def start(self) -> None: ...

    def watch(self, ids: Iterable[str]) -> None: ...

    def frozen(self, ids: Iterable[str]) -> None: ...

    def gone(self, ids: Iterable[str]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ElasticRendezvous:
    """Where the members of an elastic job meet, and what the workers of this host are called there."""

    address: str
    token: str | None  # for the workers' environment; None: they find the secret themselves, in this user's file
    name: str  # the workers' ids are this, a slash and their number
    job: str | None = None  # None: whichever job the coordinator serves
    size: int | None = None  # with how many the job starts, all of them here; None: it goes on already
    heartbeats: Callable[[Callable[[News], None]], Heartbeats] = field(kw_only=True)


class ElasticSetup:
    """Members that come and go. `coordinator_process` is None where the coordinator is somebody else's."""

    noun = "worker"

    def __init__(
        self,
        count: int,
        meeting: ElasticRendezvous,
        coordinator_process: CoordinatorProcess | None = None,
        *,
        welcome: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._welcome = welcome
        self._meeting = meeting
        self._coordinator = coordinator_process
        self._shared = worker_setup.shared_by_members(
            os.environ if environ is None else environ,
            count,
            coordinator=meeting.address,
            job=meeting.job,
            token=meeting.token,
        )
        self._pipes: dict[int, NewsWriter] = {}
        self._inbox: collections.deque[News] = collections.deque()
        self._news: News | None = None
        self._frozen = StoppedWorkers()
        self._supervisor: SupervisorAccess | None = None
        self._heartbeats: Heartbeats | None = None
        self._formed = False
        self._next_look = 0.0

    # -- workers come and go ------------------------------------------------------------------------------------------

    def start(self, supervisor: SupervisorAccess) -> None:
        self._supervisor = supervisor
        if self._welcome:
            supervisor.say(f"gradwire: {self._welcome}")
        if self._coordinator is not None:
            self._coordinator.start(supervisor, time.monotonic())
        self._heartbeats = self._meeting.heartbeats(self._hear)
        self._heartbeats.start()

    def equip(self, number: int, local_rank: int) -> WorkerEnvironment:
        if number in self._pipes:  # of one that could not be started
            self._pipes.pop(number).close()
        member, size = self._member(number), self._meeting.size
        pipe = self._pipes[number] = NewsWriter(member)
        wish = (number, size) if size is not None and number < size else None
        environ = worker_setup.of_member(self._shared, member, local_rank, news=pipe.variable, wish=wish)
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
        supervisor = self._the_hands
        what = worker.report.summary() if worker.ending is None and worker.report else ""
        what = what or (fate(worker.ending) if worker.ending else "has failed")
        supervisor.say(f"gradwire: {worker} {what}; {_consequence(supervisor.restarts, verdict, successor, delay)}")

    # -- news, and what is to be done by now --------------------------------------------------------------------------

    @property
    def next_due(self) -> float | None:
        due = self._coordinator.next_due if self._coordinator is not None else None
        return self._next_look if due is None else min(due, self._next_look)

    @property
    def formed(self) -> bool:
        return self._formed

    def attend(self, now: float) -> None:
        self._take_news()
        if self._coordinator is not None:
            self._coordinator.attend(now)
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY
            for pipe in self._pipes.values():
                pipe.flush()
            self._end_frozen(now)

    def _hear(self, news: News) -> None:
        """Called by the thread of the heartbeats."""
        self._inbox.append(news)
        self._the_hands.wake()

    def _take_news(self) -> None:
        while self._inbox:
            news, before = self._inbox.popleft(), self._news
            if self._coordinator is not None:
                self._coordinator.heard = True
            if before is not None and before.generation < news.generation:
                self._the_hands.restarts.regrouped(time.monotonic())
            self._news = news
            # At our own coordinator, which began with this run, work that was done before it began is none.
            self._formed |= news.generation > 0 and not (news.finished and self._coordinator is not None)
            self._the_hands.restarts.done |= news.finished
            self._count_others(news)
            for pipe in self._pipes.values():
                pipe.send(news)

    def _count_others(self, news: News) -> None:
        """Members that are not ours. Of those that have just ended the coordinator may not have heard."""
        recent = time.monotonic() - _HEARSAY
        ours = sum(worker.ending is None or worker.ending.time > recent for worker in self._the_hands.workers)
        self._the_hands.restarts.elsewhere = max(0, news.size - ours)

    def _end_frozen(self, now: float) -> None:
        supervisor = self._the_hands
        living = [worker for worker in supervisor.workers if worker.ending is None]
        paused = {worker.number for worker in living if process_tree.is_paused(worker.pid)}
        if self._heartbeats is not None:
            self._heartbeats.frozen(map(self._member, paused))
        alone = len(paused) == len(living) and supervisor.restarts.finished > 0
        generation = self._news.generation if self._news is not None else 0
        for worker in living:
            at_rest = worker.number in paused
            if self._frozen.lost(worker.number, paused=at_rest, generation=generation, alone=alone, now=now):
                worker.kill(f"was frozen for more than {RESUME_SECONDS:g} s while the others went on, and was killed")

    # -- on purpose ---------------------------------------------------------------------------------------------------

    def disturb(self, action: str, workers: Sequence[Worker]) -> str:
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
            self._heartbeats.close()  # says who is gone, and hears whether the others had regrouped before
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
    def _the_hands(self) -> SupervisorAccess:
        assert self._supervisor is not None, "not started"
        return self._supervisor

    def _member(self, number: int) -> str:
        return f"{self._meeting.name}/{number}"


def _consequence(restarts: Restarts, verdict: Verdict, successor: Worker | None, delay: float) -> str:
    left = len(restarts.living)
    if delay:
        count = f"restart {restarts.used} of {restarts.restarts}"
        return f"another one takes its place in {delay:g} s, because it lived for a short time only ({count})"
    if verdict is Verdict.REPLACE and successor is not None:
        return f"{successor} takes its place (restart {restarts.used} of {restarts.restarts})"
    if verdict is Verdict.GO_ON:
        return {0: "the others are done", 1: "1 goes on"}.get(left, f"{left} go on")
    if not restarts.recoverable:
        return "there is no coordinator by which the others could go on"
    if restarts.restarts:
        return f"{left} of at least {restarts.minimum} are left, and no restart of {restarts.restarts}"
    return f"{left} of at least {restarts.minimum} are left"
