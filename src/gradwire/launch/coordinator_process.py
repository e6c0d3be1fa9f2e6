"""Runs the coordinator of an elastic job in a process of its own, and restarts it on its journal when it dies.

It stands beside the workers and not in the supervisor, so that it can be killed on purpose, and so that the threads of
gRPC do not share a process with the supervision. It comes back at the same port, where everybody looks for it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from gradwire.errors import WorkerFailed
from gradwire.launch.restart_policy import Backoff
from gradwire.launch.root_cause import Ending, fate
from gradwire.launch.worker_process import Task, Worker
from gradwire.launch.worker_setup import SupervisorAccess

LABEL = "coordinator"
LOG = "coordinator.log"
_TRIES = 5  # in a row that it may end by itself, for which it has a reason that will not go away
_FIRST, _LONGEST = 0.2, 5.0  # seconds between two tries


class RestartSchedule:
    """When to start it anew. Pure."""

    def __init__(self) -> None:
        self._backoff = Backoff(first=_FIRST, longest=_LONGEST)
        self._failures = 0  # in a row, by itself and after a short life

    def delay(self, lived: float, *, killed: bool, heard: bool) -> float | None:
        """Seconds until the next try, None if there is no use in one: it cannot even begin, or fails all the time.

        `heard`: it has answered somebody, in this life or an earlier one.
        """
        delay = self._backoff.delay(lived, killed=killed)
        self._failures = (self._failures if delay else 0) + (not killed)
        if not killed and (not heard or self._failures > _TRIES):
            return None
        return delay


class CoordinatorProcess:
    """The coordinator's process, in all its lives."""

    def __init__(self, task: Task, environ: Mapping[str, str]) -> None:
        self._task = task
        self._environ = environ
        self.heard = False  # it has answered
        self._revival = RestartSchedule()
        self._supervisor: SupervisorAccess | None = None
        self._process: Worker | None = None
        self._began = 0.0
        self._due: float | None = None
        self._stopped = False

    @property
    def next_due(self) -> float | None:
        return self._due

    def start(self, supervisor: SupervisorAccess, now: float) -> None:
        self._supervisor = supervisor
        self._launch(now)

    def attend(self, now: float) -> None:
        """Start it again if it is time. Raises if it could not even begin."""
        if self._due is not None and now >= self._due:
            self._launch(now)
        elif self._process is not None and self._process.ending is not None and not self._stopped:
            self._lost(self._process.ending, now)

    def kill(self, doom: str) -> Worker | None:
        process = self._process
        if process is not None and process.ending is None:
            process.kill(doom)
            return process
        return None

    def stop(self, now: float) -> None:
        """Let it tell those who still wait that it ends."""
        self._stopped, self._due = True, None
        if self._process is not None:
            self._process.signal(signal.SIGTERM, now)

    def _launch(self, now: float) -> None:
        assert self._supervisor is not None
        self._due, self._began = None, now
        self._process = self._supervisor.start_process(LABEL, LOG, self._task, self._environ)

    def _lost(self, ending: Ending, now: float) -> None:
        assert self._supervisor is not None
        self._process = None
        delay = self._revival.delay(now - self._began, killed=ending.status < 0, heard=self.heard)
        what = f"the coordinator (pid {ending.pid}) {fate(ending)}"
        if delay is not None:
            self._due = now + delay
            self._supervisor.say(f"gradwire: {what}; it is started anew{f' in {delay:g} s' if delay else ''}")
        elif not self.heard:
            raise WorkerFailed("\n".join([f"{what} before the job began", *self._supervisor.last_words(LABEL)]))
        else:
            self._supervisor.restarts.recoverable = False
            self._supervisor.say(f"gradwire: {what} again and again; the job goes on without it until a worker is lost")
            for line in self._supervisor.last_words(LABEL)[-1:]:
                self._supervisor.say(f"gradwire: its last words: {line}")
