"""Prepares workers: their environment variables, the coordinator, and the hooks that a supervisor calls."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gradwire.errors import GradwireError, TransportError, UnsupportedOp
from gradwire.host import malloc
from gradwire.job import config
from gradwire.job.environments import torchrun
from gradwire.job.stop_notices import NOTICES
from gradwire.launch.rendezvous import Rendezvous
from gradwire.launch.restart_policy import Restarts, Verdict
from gradwire.launch.root_cause import Ending
from gradwire.launch.worker_process import Task, Worker
from gradwire.membership.client.news_pipe import NEWS
from gradwire.security.secret import TOKEN

LOCAL_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK, GROUP_SIZE = "GROUP_RANK", "GROUP_WORLD_SIZE"  # torchrun's names of the node rank and the number of nodes
# Below the range of ephemeral ports, so that no other listener on "any free port" gets it first.
_PORTS = range(20000, 30000)
# A worker that starts another job must not pass on its own identity. Other variables (GRADWIRE_TIMEOUT,
# GRADWIRE_TRANSPORT …) are settings, which hold for that job too.
_IDENTITY = {config.RANK, config.SIZE, config.LOCAL_RANK, config.ADDRESS, config.COORDINATOR, config.JOB, TOKEN}
_IDENTITY |= {config.ELASTIC, config.MEMBER, NEWS, NOTICES}
_IDENTITY |= {torchrun.RANK, torchrun.SIZE, torchrun.LOCAL_RANK, torchrun.HOST, torchrun.PORT, LOCAL_SIZE}
_IDENTITY |= {GROUP_RANK, GROUP_SIZE, "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
_PREFIXES = ("TORCHELASTIC_", "PET_")  # variables of torchrun; PET_* set its options, and those of `gradwire run`


def without_identity(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that say which rank of which job this process is."""
    return {name: value for name, value in environ.items() if name not in _IDENTITY and not name.startswith(_PREFIXES)}


def shared_by_workers(
    environ: Mapping[str, str],
    size: int,
    *,
    coordinator: str,
    job: str,
    token: str | None,
    port: int,
    host: str = "127.0.0.1",
    local_size: int | None = None,
) -> dict[str, str]:
    """Return the variables that the workers of a job share on this host.

    `host` and `port` are for a server that rank 0 of the script starts itself. `local_size` is the number of ranks on
    this host; None: all of them.
    """
    local_size = size if local_size is None else local_size
    return {
        **_neighbour_settings(environ, local_size),
        config.SIZE: str(size),
        config.COORDINATOR: coordinator,
        config.JOB: job,
        **_named(TOKEN, token),
        torchrun.SIZE: str(size),
        LOCAL_SIZE: str(local_size),
        torchrun.HOST: host,
        torchrun.PORT: str(port),
    }


def of_worker(shared: Mapping[str, str], rank: int, local_rank: int | None = None) -> dict[str, str]:
    """Return the variables of one rank; `local_rank` None: the job runs on one host, and it is the rank."""
    mine = dict.fromkeys((config.RANK, torchrun.RANK), str(rank))
    mine |= dict.fromkeys((config.LOCAL_RANK, torchrun.LOCAL_RANK), str(rank if local_rank is None else local_rank))
    return {**shared, **mine}


def shared_by_members(
    environ: Mapping[str, str], size: int, *, coordinator: str, job: str | None, token: str | None
) -> dict[str, str]:
    """Return the variables that all workers of an elastic job share, without torchrun's: rank and size change."""
    return {
        **_neighbour_settings(environ, size),
        config.ELASTIC: "1",
        config.COORDINATOR: coordinator,
        **_named(config.JOB, job),
        **_named(TOKEN, token),
    }


def of_coordinator(environ: Mapping[str, str], *, job: str, token: str | None) -> dict[str, str]:
    """Return the variables of the coordinator's process."""
    return {**without_identity(environ), config.JOB: job, **_named(TOKEN, token)}


def of_member(
    shared: Mapping[str, str], member: str, local_rank: int, *, news: str, start_rank: tuple[int, int] | None
) -> dict[str, str]:
    """Return the variables of one worker; `start_rank` is its rank and the size in the first generation."""
    mine = {config.MEMBER: member, config.LOCAL_RANK: str(local_rank), NEWS: news}
    if start_rank is not None:
        mine |= {config.RANK: str(start_rank[0]), config.SIZE: str(start_rank[1])}
    return {**shared, **mine}


def _named(name: str, value: str | None) -> dict[str, str]:
    return {} if value is None else {name: value}


def _neighbour_settings(environ: Mapping[str, str], size: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    return {
        # Without this, the libraries of each worker would start one thread per core.
        "OMP_NUM_THREADS": str(max(1, cores // size)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **malloc.variables(environ, size),
        **without_identity(environ),
    }


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now on an IP address of this machine."""
    for port in random.sample(_PORTS, 100):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise TransportError(f"found no free port between {_PORTS.start} and {_PORTS.stop - 1} on {host}")


class SupervisorAccess(Protocol):
    """What a setup may use of its supervisor, in the supervisor's own thread; `wake` in any thread."""

    restarts: Restarts

    @property
    def workers(self) -> Sequence[Worker]:
        """All workers that were ever started, by number."""

    def start_process(self, label: str, log: str, task: Task, environ: Mapping[str, str]) -> Worker:
        """Start a process that is supervised and logged like a worker, but is none."""

    def last_output(self, label: str) -> list[str]:
        """Return the last lines that such a process printed, after it has ended."""

    def print_line(self, line: str) -> None: ...

    def wake(self) -> None:
        """Make the supervisor call `update` soon."""

    def stop(self, number: int) -> None:
        """Ask for the stop of all workers, with this signal first. Any thread may call it."""

    def end_after_failure(self) -> None:
        """Stop the workers as after a failure of one of them: the job has failed elsewhere."""


@dataclass(frozen=True)
class WorkerEnvironment:
    """What a worker's process gets: variables, and inherited file descriptors."""

    environ: Mapping[str, str]
    inherited: tuple[int, ...] = ()


class WorkerSetup(Protocol):
    """The hooks of a supervisor, called in its thread; `start` before that thread runs."""

    noun: str  # "rank" if the number of a worker is its rank, otherwise "worker"

    def number_of(self, index: int) -> int:
        """Return the number of the worker that this launcher starts after `index` others."""

    @property
    def formed(self) -> bool:
        """Whether members have formed a generation, here or elsewhere, as far as is known."""

    def start(self, supervisor: SupervisorAccess) -> None: ...

    def environment_of(self, number: int, local_rank: int) -> WorkerEnvironment:
        """Return the environment of a worker that is about to be started."""

    def started(self, worker: Worker) -> None: ...

    def ended(self, worker: Worker) -> None:
        """Note that a worker's process has ended."""

    def judged(self, worker: Worker, verdict: Verdict, successor: Worker | None, delay: float) -> None:
        """Report what the supervisor decided about a failed worker; `delay`: its successor starts later."""

    def update(self, now: float) -> None:
        """Do what is due."""

    @property
    def next_due(self) -> float | None:
        """When `update` is due next, unless the supervisor is woken earlier."""

    def inject(self, action: str, workers: Sequence[Worker]) -> str:
        """Cut or heal a link or restart the coordinator for `fault_injection`; return what was done."""

    def failing(self) -> None:
        """Note that the job has failed because of a worker here."""

    def stopping(self, number: int) -> None:
        """Note that the job was asked to stop with this signal."""

    def workers_gone(self, endings: Sequence[Ending], last_lines: Callable[[Ending | None], Sequence[str]]) -> None:
        """Note that all workers here are gone; `last_lines` returns the last lines that one of them printed."""

    @property
    def concluded(self) -> bool:
        """Whether nothing more is to be learnt from other launchers."""

    @property
    def elsewhere(self) -> Elsewhere:
        """How the workers of other launchers ended, as far as they reported it."""

    def stop(self) -> None:
        """Stop other processes that this setup has started; the workers are gone."""

    def close(self) -> None:
        """Release everything, also after an error."""


@dataclass(frozen=True)
class Elsewhere:
    """How the workers of other launchers ended."""

    endings: tuple[Ending, ...] = ()
    last_lines: Mapping[int, Sequence[str]] = field(default_factory=dict)  # by the number of the worker
    problem: GradwireError | None = None  # another launcher was lost


class OneLauncher:
    """The hooks of a setup whose supervisor does not depend on other launchers."""

    @property
    def concluded(self) -> bool:
        return True

    @property
    def elsewhere(self) -> Elsewhere:
        return Elsewhere()

    def number_of(self, index: int) -> int:
        return index

    def failing(self) -> None:
        pass

    def stopping(self, number: int) -> None:
        pass

    def workers_gone(self, endings: Sequence[Ending], last_lines: Callable[[Ending | None], Sequence[str]]) -> None:
        pass


class StaticSetup(OneLauncher):
    """The setup of a job of fixed size: each worker keeps its rank."""

    noun = "rank"
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

    def environment_of(self, number: int, local_rank: int) -> WorkerEnvironment:
        return WorkerEnvironment(of_worker(self._shared, number))

    def started(self, worker: Worker) -> None:
        pass

    def ended(self, worker: Worker) -> None:
        pass

    def judged(self, worker: Worker, verdict: Verdict, successor: Worker | None, delay: float) -> None:
        pass

    def update(self, now: float) -> None:
        pass

    @property
    def next_due(self) -> float | None:
        return None

    def inject(self, action: str, workers: Sequence[Worker]) -> str:
        raise UnsupportedOp(f"the members of this job are fixed: chaos cannot {action} here")

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self._rendezvous.coordinator.stop()
