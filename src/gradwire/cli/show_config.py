"""What `gradwire run` takes from the configuration: the number of workers, and the table of `--show-config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import click

from gradwire.cli.node_options import Nodes
from gradwire.errors import GradwireError
from gradwire.job import config_file
from gradwire.job.config import JobConfig, resolve, shown, table
from gradwire.job.environments.launcher_settings import find
from gradwire.job.settings import JOB
from gradwire.launch import worker_setup
from gradwire.security.credentials import Credentials
from gradwire.topology import rank_ranges

LAUNCHER = "gradwire run"  # the origin of what the launcher decides
_PLACEHOLDER = "127.0.0.1:1"  # where the coordinator will listen: the port is not known before it starts
_NEWS = "0"


def configured_size() -> int | None:
    """Check the file that `GRADWIRE_CONFIG` names, if it is set, and return the size in it, or None."""
    path = find(os.environ, config_file.FILE)
    try:
        config = JobConfig.from_file(path.text) if path else None
    except GradwireError as error:
        raise click.ClickException(str(error)) from error
    return config.size if config is not None and config.origin("size").startswith("file ") else None


@dataclass(frozen=True)
class Decided:
    """What the options of the command decide. `size_from` is the origin of the number of workers."""

    nodes: Nodes
    elastic: bool
    listen: str | None
    job: str | None
    size_from: str

    @property
    def size(self) -> int:
        """The number of ranks, if all hosts start as many as this one."""
        return self.nodes.fewest * self.nodes.workers

    @property
    def ranks(self) -> str:
        """The ranks of this host's workers."""
        first = (self.nodes.rank or 0) * self.nodes.workers
        return rank_ranges(range(first, first + self.nodes.workers))

    @property
    def address(self) -> tuple[str, str]:
        """Where the workers meet, and the origin of this address."""
        if self.nodes.several:
            return str(self.nodes.address), "--address"
        return (self.listen, "--listen") if self.listen else ("127.0.0.1, a free port", LAUNCHER)


def describe(decided: Decided, environ: Mapping[str, str]) -> str:
    """Return the table of the settings that the workers of this host would get."""
    elastic = decided.elastic
    try:
        own = config_file.with_variables(environ)
        credentials = Credentials.from_environ(own)
        job = decided.job or own.get(JOB) or (credentials.job if credentials is not None else None)
        config = resolve(environ=_worker_environ(environ, decided.size, elastic, job or "a-new-name"))
    except GradwireError as error:
        raise click.ClickException(str(error)) from error
    address, address_from = decided.address
    values = {
        "rank": decided.ranks,
        "size": str(decided.size),
        "local_rank": rank_ranges(range(decided.nodes.workers)),
        "role": "worker",
        "address": address,
        "served": "true",
        "job": job or "a new name",
        "elastic": shown(elastic),
    }
    if elastic:
        values["member"] = "a new id for each worker"
    origins = {"size": decided.size_from, "address": address_from, "role": "derived"}
    rows = [
        (name, values[name], origins.get(name, LAUNCHER)) if name in values else (name, value, origin)
        for name, value, origin in config.rows()
    ]
    return table(rows)


def _worker_environ(environ: Mapping[str, str], count: int, elastic: bool, job: str) -> dict[str, str]:
    """Return the variables of the first worker, as the launcher would set them."""
    token = "0" * 32  # any token: it is not shown
    if elastic:
        members = worker_setup.shared_by_members(environ, count, coordinator=_PLACEHOLDER, job=job, token=token)
        return worker_setup.of_member(members, "member", 0, news=_NEWS, start_rank=(0, count))
    ranks = worker_setup.shared_by_workers(environ, count, coordinator=_PLACEHOLDER, job=job, token=token, port=1)
    return worker_setup.of_worker(ranks, 0)
