"""What a worker needs to start: its environment variables, the coordinator, and the hooks a supervisor calls for it."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradwire.errors import TransportError, UnsupportedOp
from gradwire.host import malloc
from gradwire.job import config
from gradwire.job.environments import torchrun
from gradwire.launch.rendezvous import Rendezvous
from gradwire.launch.restart_policy import Restarts, Verdict
from gradwire.launch.worker_process import Task, Worker
from gradwire.membership.client.news_pipe import NEWS
from gradwire.security.secret import TOKEN

LOCAL_SIZE = "LOCAL_WORLD_SIZE"
# Below the range that Linux takes its own ports from, so that no listener on "any free port" can snatch it.
_PORTS = range(20000, 30000)
# A worker that starts a job of its own must not pass on who it is itself. What is not named here (GRADWIRE_TIMEOUT,
# GRADWIRE_TRANSPORT …) is a setting, which the user gave for all jobs below.
_IDENTITY = {config.RANK, config.SIZE, config.LOCAL_RANK, config.ADDRESS, config.COORDINATOR, config.JOB, TOKEN}
_IDENTITY |= {config.ELASTIC, config.MEMBER, NEWS}
_IDENTITY |= {torchrun.RANK, torchrun.SIZE, torchrun.LOCAL_RANK, torchrun.HOST, torchrun.PORT, LOCAL_SIZE}
_IDENTITY |= {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
_ELASTIC = "TORCHELASTIC_"


def without_identity(environ: Mapping[str, str]) -> dict[str, str]:
    """What of our own environment others may inherit."""
    return {name: value for name, value in environ.items() if name not in _IDENTITY and not name.startswith(_ELASTIC)}


def shared_by_workers(
    environ: Mapping[str, str], size: int, *, coordinator: str, job: str, token: str, port: int
) -> dict[str, str]:
    """What all workers of the job have in common. `port` is for whatever the script itself serves at MASTER_PORT."""
    return {
        **_neighbour_settings(environ, size),
        config.SIZE: str(size),
        config.COORDINATOR: coordinator,
        config.JOB: job,
        TOKEN: token,
        torchrun.SIZE: str(size),
        LOCAL_SIZE: str(size),
        torchrun.HOST: "127.0.0.1",
        torchrun.PORT: str(port),
    }


def of_worker(shared: Mapping[str, str], rank: int) -> dict[str, str]:
    mine = dict.fromkeys((config.RANK, config.LOCAL_RANK, torchrun.RANK, torchrun.LOCAL_RANK), str(rank))
    return {**shared, **mine}


def shared_by_members(
    environ: Mapping[str, str], size: int, *, coordinator: str, job: str | None, token: str | None
) -> dict[str, str]:
    """What all workers of an elastic job have in common. Nothing of torchrun's: rank and size would soon be wrong."""
    return {
        **_neighbour_settings(environ, size),
        config.ELASTIC: "1",
        config.COORDINATOR: coordinator,
        **_named(config.JOB, job),
        **_named(TOKEN, token),
    }


def of_coordinator(environ: Mapping[str, str], *, job: str, token: str | None) -> dict[str, str]:
    return {**without_identity(environ), config.JOB: job, **_named(TOKEN, token)}


def of_member(
    shared: Mapping[str, str], member: str, local_rank: int, *, news: str, wish: tuple[int, int] | None
) -> dict[str, str]:
    """`wish` is the rank and size that it is to have in the first generation."""
    mine = {config.MEMBER: member, config.LOCAL_RANK: str(local_rank), NEWS: news}
    if wish is not None:
        mine |= {config.RANK: str(wish[0]), config.SIZE: str(wish[1])}
    return {**shared, **mine}


def _named(name: str, value: str | None) -> dict[str, str]:
    return {} if value is None else {name: value}


def _neighbour_settings(environ: Mapping[str, str], size: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    return {
        # Each worker's libraries would start a thread per core, and n workers together n times too many.
        "OMP_NUM_THREADS": str(max(1, cores // size)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **malloc.variables(environ, size),
        **without_identity(environ),
    }


def free_port() -> int:
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise TransportError(f"found no free port between {_PORTS.start} and {_PORTS.stop - 1} on 127.0.0.1")


class SupervisorAccess(Protocol):
    """What a setup needs of its supervisor. To be used in the supervisor's own thread, except for `wake`."""

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
class WorkerEnvironment:
    environ: Mapping[str, str]
    inherited: tuple[int, ...] = ()


class WorkerSetup(Protocol):
    """All of it happens in the supervisor's thread, `start` before that thread runs."""

    noun: str  # what a worker is called: a rank, where its number is its rank

    @property
    def formed(self) -> bool:
        """Whether members have come together, here or elsewhere, as far as is known."""

    def start(self, supervisor: SupervisorAccess) -> None: ...

    def equip(self, number: int, local_rank: int) -> WorkerEnvironment:
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
        """Carry out a cut, its healing or a restart of the coordinator for `fault_injection`; returns what was done."""

    def stop(self) -> None:
        """The workers are gone; what else was started is told to end."""

    def close(self) -> None:
        """Whatever happened, nothing is left."""


class StaticSetup:
    """Ranks that stay as they are from the start to the end."""

    noun = "rank"
    next_due = None
    formed = True

    def __init__(self, size: int, rendezvous: Rendezvous, environ: Mapping[str, str] | None = None) -> None:
        self._size = size
        self._rendezvous = rendezvous
        self._environ = os.environ if environ is None else environ
        self._shared: Mapping[str, str] = {}

    def start(self, supervisor: SupervisorAccess) -> None:
        self._rendezvous.coordinator.start()
        self._shared = shared_by_workers(
            self._environ,
            self._size,
            coordinator=self._rendezvous.coordinator.address,
            job=self._rendezvous.job,
            token=self._rendezvous.token,
            port=free_port(),
        )

    def equip(self, number: int, local_rank: int) -> WorkerEnvironment:
        return WorkerEnvironment(of_worker(self._shared, number))

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
