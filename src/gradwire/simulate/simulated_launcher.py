"""Simulate a launcher: it sends heartbeats for the workers of its host, reports their ends and starts replacements."""

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
NOTICE_SECONDS = 0.01  # until the launcher notices the end of a worker


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
        """`start` starts a worker on a host. `ticket` belongs to the join token of a launcher without the secret."""
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

    def worker_ended(self, worker: Worker) -> None:
        """Notice the end of a worker, which the operating system reports."""
        self.later(NOTICE_SECONDS, lambda: self._remove(worker))

    def _remove(self, worker: Worker) -> None:
        self._workers.pop(worker.name, None)
        self._rules.end([worker.name])
        self._send_heartbeat()
        if self._restarts and not worker.leaving:
            self._restarts -= 1
            self.later(self._random.uniform(0.2, 2.0), lambda: self._start(self.host))

    def _beat(self) -> None:
        self._send_heartbeat()
        self.later(INTERVAL, self._beat)

    def _send_heartbeat(self) -> None:
        # The operating system also reports which workers a signal has stopped.
        stopped = [name for name, worker in self._workers.items() if worker.stopped]
        heartbeat = self._rules.next(stopped)

        def answered(news: object) -> None:
            if isinstance(news, News):
                self._rules.answered(heartbeat, news)
                for worker in self._workers.values():
                    worker.news = news

        self._coordinator.send("beat", (heartbeat.ids, heartbeat.gone, heartbeat.run), answered)
