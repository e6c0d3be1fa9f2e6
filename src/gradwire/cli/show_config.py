"""What `gradwire run` takes from the configuration: the number of workers, and the table of `--show-config`."""

from __future__ import annotations

import os
from collections.abc import Mapping

import click

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


def describe(count: int, *, elastic: bool, listen: str | None, size_from: str) -> str:
    """Return the table of the settings that `count` workers would get. `size_from` is the origin of `count`."""
    environ = os.environ
    try:
        own = config_file.with_variables(environ)
        credentials = Credentials.from_environ(own)
        job = own.get(JOB) if elastic else None
        job = job or (credentials.job if credentials is not None else None)
        config = resolve(environ=_worker_environ(environ, count, elastic, job or "a-new-name"))
    except GradwireError as error:
        raise click.ClickException(str(error)) from error
    everyone = rank_ranges(range(count))
    decided = {
        "rank": everyone,
        "size": str(count),
        "local_rank": everyone,
        "role": "worker",
        "address": listen or "127.0.0.1, a free port",
        "served": "true",
        "job": job or "a new name",
        "elastic": shown(elastic),
    }
    if elastic:
        decided["member"] = "a new id for each worker"
    origins = {"size": size_from, "address": "--listen" if listen else LAUNCHER, "role": "derived"}
    rows = [
        (name, decided[name], origins.get(name, LAUNCHER)) if name in decided else (name, value, origin)
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
