"""A simulated launcher: sends heartbeats for the workers of its host, reports deaths, and starts replacements."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from gradwire.membership.client.heartbeat_rules import HeartbeatRules
from gradwire.membership.types import News
from gradwire.simulate.coordinator_calls import Caller, CallTarget
from gradwire.simulate.network import Network
from gradwire.simulate.process import Process
from gradwire.simulate.simulated_worker import Worker
from gradwire.simulate.time import Clock

INTERVAL = 1.0  # seconds from one heartbeat to the next
NOTICE_SECONDS = 0.01  # from a worker's death to the launcher's knowing of it


class Launcher(Process):
    """The launcher of one host."""

    def __init__(
        self,
        coordinator: CallTarget,
        network: Network,
        host: str,
        clock: Clock,
        random: Random,
        start: Callable[[str], None],
        *,
        restarts: int = 0,
        ticket: bytes = b"",
    ) -> None:
        """`start` starts a worker on a host. `ticket` proves a join token, for a launcher without the job's secret."""
        super().__init__(f"launcher of {host}", host, network.timeline, clock)
        self._start = start
        self._random = random
        self._workers: dict[str, Worker] = {}
        self._rules = HeartbeatRules()
        self._restarts = restarts
        self._coordinator = Caller(self, coordinator, network, ticket)
        self._beat()

    def watch(self, worker: Worker) -> None:
        self._workers[worker.name] = worker
        self._rules.watch([worker.name])

    def lost(self, worker: Worker) -> None:
        """The system tells of a worker's end."""
        self.later(NOTICE_SECONDS, lambda: self._bury(worker))

    def _bury(self, worker: Worker) -> None:
        self._workers.pop(worker.name, None)
        self._rules.end([worker.name])
        self._say()
        if self._restarts and not worker.leaving:
            self._restarts -= 1
            self.later(self._random.uniform(0.2, 2.0), lambda: self._start(self.host))

    def _beat(self) -> None:
        self._say()
        self.later(INTERVAL, self._beat)

    def _say(self) -> None:
        stopped = [name for name, worker in self._workers.items() if worker.stopped]  # the system tells that, too
        heartbeat = self._rules.next(stopped)

        def answered(news: object) -> None:
            if isinstance(news, News):
                self._rules.answered(heartbeat, news)
                for worker in self._workers.values():
                    worker.news = news

        self._coordinator.send("beat", (heartbeat.ids, heartbeat.gone, heartbeat.run), answered)
