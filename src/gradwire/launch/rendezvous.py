"""Provides the rendezvous of a job of fixed size: a coordinator in the supervisor's process, and a secret."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import Protocol

from gradwire.job import config_file
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
    token: str


def on_this_machine(size: int) -> Rendezvous:
    """Return a rendezvous whose coordinator will listen on a free loopback port; the coordinator is not started yet.

    The coordinator uses TLS if the workers do: if the environment or the configuration file gives certificates.
    """
    from gradwire.membership.coordinator.service import Coordinator  # loads grpc
    from gradwire.security.secret import TOKEN, job_secret, new_token

    credentials = Credentials.from_environ(config_file.with_variables(os.environ))
    job, token = credentials.job if credentials is not None else uuid.uuid4().hex, new_token()
    secret = job_secret({TOKEN: token}, loopback=True)
    coordinator = Coordinator("127.0.0.1", 0, size=size, secret=secret, job=job, credentials=credentials)
    return Rendezvous(coordinator, job, token)
