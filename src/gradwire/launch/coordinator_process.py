"""Runs the coordinator of an elastic job in its own process, and restarts it from its journal when it dies.

It does not run in the supervisor's process, so that fault injection can kill it, and so that gRPC's threads do not
share a process with the supervision. It restarts at the same port, which the members know.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from gradwire.errors import WorkerFailed
from gradwire.launch.restart_policy import Backoff
from gradwire.launch.root_cause import Ending, how_it_ended
from gradwire.launch.worker_process import Task, Worker
from gradwire.launch.worker_setup import SupervisorAccess

LABEL = "coordinator"
LOG = "coordinator.log"
_TRIES = 5  # early exits in a row, after which another restart would not help
_FIRST, _LONGEST = 0.2, 5.0  # seconds between two restarts


class RestartSchedule:
    """When to restart the coordinator. Pure."""

    def __init__(self) -> None:
        self._backoff = Backoff(first=_FIRST, longest=_LONGEST)
        self._failures = 0  # early exits in a row that no signal caused

    def delay(self, lived: float, *, killed: bool, answered: bool) -> float | None:
        """Return the seconds until the next start; None if the coordinator cannot start, or fails again and again.

        `answered`: the coordinator has answered a request, in this process or an earlier one.
        """
        delay = self._backoff.delay(lived, killed=killed)
        self._failures = (self._failures if delay else 0) + (not killed)
        if not killed and (not answered or self._failures > _TRIES):
            return None
        return delay


class CoordinatorProcess:
    """The coordinator's process and its restarts."""

    def __init__(self, task: Task, environ: Mapping[str, str]) -> None:
        self._task = task
        self._environ = environ
        self.answered = False  # the coordinator has answered a request
        self._restart_schedule = RestartSchedule()
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

    def update(self, now: float) -> None:
        """Restart the coordinator if that is due; raise WorkerFailed if it ended before its first answer."""
        if self._due is not None and now >= self._due:
            self._launch(now)
        elif self._process is not None and self._process.ending is not None and not self._stopped:
            self._lost(self._process.ending, now)

    def kill(self, kill_reason: str) -> Worker | None:
        process = self._process
        if process is not None and process.ending is None:
            process.kill(kill_reason)
            return process
        return None

    def stop(self, now: float) -> None:
        """End the coordinator with SIGTERM, so that it can inform members that wait."""
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
        delay = self._restart_schedule.delay(now - self._began, killed=ending.status < 0, answered=self.answered)
        what = f"the coordinator (pid {ending.pid}) {how_it_ended(ending)}"
        if delay is not None:
            self._due = now + delay
            self._supervisor.print_line(f"gradwire: {what}; it is restarted{f' in {delay:g} s' if delay else ''}")
        elif not self.answered:
            raise WorkerFailed("\n".join([f"{what} before the job began", *self._supervisor.last_output(LABEL)]))
        else:
            self._supervisor.restarts.recoverable = False
            self._supervisor.print_line(
                f"gradwire: {what} again and again; the job continues without it until a worker is lost"
            )
            for line in self._supervisor.last_output(LABEL)[-1:]:
                self._supervisor.print_line(f"gradwire: its last output: {line}")
