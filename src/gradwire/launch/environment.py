"""The environment of a worker: who it is, in gradwire's words and in torchrun's, and manners among neighbours."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping

from gradwire import config, malloc
from gradwire.environments import torchrun
from gradwire.errors import TransportError
from gradwire.membership.news import NEWS
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
        **_manners(environ, size),
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
        **_manners(environ, size),
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


def _manners(environ: Mapping[str, str], size: int) -> dict[str, str]:
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
