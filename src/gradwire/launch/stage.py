"""What the workers of a job find around them: a coordinator, an environment, in elastic jobs also news.

The supervisor asks its stage for what a worker needs, and tells it who came and went; a stage asks the supervisor (its
`Hands`) for processes and words. Here is the plain one, of jobs whose members are fixed; the other is in `elastic.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradwire.errors import UnsupportedOp
from gradwire.launch import environment
from gradwire.launch.rendezvous import Rendezvous
from gradwire.launch.restarts import Restarts, Verdict
from gradwire.launch.worker import Task, Worker


class Hands(Protocol):
    """What a stage needs of its supervisor. To be used in the supervisor's own thread, except for `wake`."""

    restarts: Restarts

    @property
    def workers(self) -> Sequence[Worker]:
        """All that were ever started, by number."""

    def start_process(self, label: str, log: str, task: Task, environ: Mapping[str, str]) -> Worker:
        """A process beside the workers that is watched, guarded and logged as they are, but not one of them."""

    def last_words(self, label: str) -> list[str]:
        """What such a process printed last, of one that has ended."""

    def say(self, line: str) -> None: ...

    def wake(self) -> None:
        """Make the supervisor attend soon."""


@dataclass(frozen=True)
class Equipment:
    environ: Mapping[str, str]
    inherited: tuple[int, ...] = ()


class Stage(Protocol):
    """All of it happens in the supervisor's thread, `start` before that thread runs."""

    noun: str  # what a worker is called: a rank, where its number is its rank

    @property
    def formed(self) -> bool:
        """Whether members have come together, here or elsewhere, as far as is known."""

    def start(self, hands: Hands) -> None: ...

    def equip(self, number: int, local_rank: int) -> Equipment:
        """What the worker that is about to be started gets."""

    def started(self, worker: Worker) -> None: ...

    def ended(self, worker: Worker) -> None:
        """Its process is gone."""

    def judged(self, worker: Worker, verdict: Verdict, successor: Worker | None, delay: float) -> None:
        """It failed, or is about to: what became of that. Its successor may start only after a delay."""

    def attend(self, now: float) -> None:
        """Whatever there is to do by now."""

    @property
    def next_due(self) -> float | None:
        """When there will be, if nobody wakes the supervisor before."""

    def disturb(self, action: str, workers: Sequence[Worker]) -> str:
        """Do on purpose what `chaos.py` calls a cut, its healing or a restart of the coordinator; say what was done."""

    def stop(self) -> None:
        """The workers are gone; what else was started is told to end."""

    def close(self) -> None:
        """Whatever happened, nothing is left."""


class StaticStage:
    """Ranks that stay as they are from the start to the end."""

    noun = "rank"
    next_due = None
    formed = True

    def __init__(self, size: int, rendezvous: Rendezvous, environ: Mapping[str, str] | None = None) -> None:
        self._size = size
        self._rendezvous = rendezvous
        self._environ = os.environ if environ is None else environ
        self._shared: Mapping[str, str] = {}

    def start(self, hands: Hands) -> None:
        self._rendezvous.coordinator.start()
        self._shared = environment.shared_by_workers(
            self._environ,
            self._size,
            coordinator=self._rendezvous.coordinator.address,
            job=self._rendezvous.job,
            token=self._rendezvous.token,
            port=environment.free_port(),
        )

    def equip(self, number: int, local_rank: int) -> Equipment:
        return Equipment(environment.of_worker(self._shared, number))

    def started(self, worker: Worker) -> None:
        pass

    def ended(self, worker: Worker) -> None:
        pass

    def judged(self, worker: Worker, verdict: Verdict, successor: Worker | None, delay: float) -> None:
        pass

    def attend(self, now: float) -> None:
        pass

    def disturb(self, action: str, workers: Sequence[Worker]) -> str:
        raise UnsupportedOp(f"the members of this job are fixed: chaos cannot {action} here")

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self._rendezvous.coordinator.stop()
