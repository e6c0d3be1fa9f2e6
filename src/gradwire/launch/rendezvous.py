"""Provides the rendezvous of a job of fixed size: a coordinator in the supervisor's process, and a secret."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gradwire.errors import ConfigError
from gradwire.job import config_file
from gradwire.job.config import JobConfig
from gradwire.security.credentials import Credentials


class Coordinating(Protocol):
    """What the supervisor needs of a coordinator."""

    @property
    def address(self) -> str:
        """host:port, known after `start`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a job meet, and the secret that admits them."""

    coordinator: Coordinating
    job: str
    token: str | None  # None: the workers read the secret from this user's file


def job_name(name: str | None, credentials: Credentials | None) -> str:
    """Return the name of a new job; raise `ConfigError` if it is no valid name or not the certificate's."""
    if credentials is not None and name not in (None, credentials.job):
        raise ConfigError(f"the certificate is for job {credentials.job}, and this is job {name}")
    name = name or (credentials.job if credentials is not None else secrets.token_hex(8))
    JobConfig(job=name)  # raises for an invalid name
    return name


def on_this_machine(size: int, job: str | None = None, environ: Mapping[str, str] | None = None) -> Rendezvous:
    """Return a rendezvous whose coordinator will listen on a free loopback port; the coordinator is not started yet.

    The coordinator uses TLS if the workers do: if the environment or the configuration file gives certificates.
    """
    from gradwire.membership.coordinator.service import Coordinator  # loads grpc
    from gradwire.security.secret import TOKEN, job_secret, new_token

    credentials = Credentials.from_environ(config_file.with_variables(os.environ if environ is None else environ))
    job, token = job_name(job, credentials), new_token()
    secret = job_secret({TOKEN: token}, loopback=True)
    coordinator = Coordinator("127.0.0.1", 0, size=size, secret=secret, job=job, credentials=credentials)
    return Rendezvous(coordinator, job, token)
