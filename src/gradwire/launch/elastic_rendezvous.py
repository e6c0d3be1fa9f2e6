"""Provides the rendezvous of an elastic job: a coordinator that this launcher starts, or one that runs elsewhere."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from gradwire.errors import ConfigError
from gradwire.job import config, config_file
from gradwire.job.address import Address
from gradwire.launch import worker_setup
from gradwire.launch.coordinator_process import CoordinatorProcess
from gradwire.launch.elastic_setup import ElasticRendezvous, ElasticSetup, Heartbeats
from gradwire.launch.worker_process import Task
from gradwire.membership.types import News
from gradwire.security import tokens
from gradwire.security.credentials import Credentials
from gradwire.security.secret import TOKEN, with_token
from gradwire.security.tokens import Token

HERE = "127.0.0.1"
PORT_SECONDS = 5.0  # to wait until the port of --listen is free


def hosted(size: int, minimum: int, maximum: int, listen: str | None, journal: Path, script: str) -> ElasticSetup:
    """Return the setup of a new job, with a coordinator that listens here."""
    environ = config_file.with_variables(os.environ)
    address = _listen_address(listen)
    # No warnings while the coordinator starts or restarts: `CoordinatorProcess` reports what happens.
    logging.getLogger("gradwire.membership").setLevel(logging.ERROR)
    credentials = Credentials.from_environ(environ)
    secret = tokens.whole_secret(environ, address.is_loopback())
    job = environ.get(config.JOB) or (credentials.job if credentials is not None else uuid.uuid4().hex)
    rendezvous = _rendezvous(address, secret, environ.get(TOKEN), job, size, credentials)
    limits = ("--size", str(size), "--min", str(minimum), "--max", str(maximum))
    # A crash of this machine ends the launcher too, so the journal need not be flushed to disk.
    where = ("--listen", str(address), "--journal", str(journal), "--no-fsync")
    task = Task.module("gradwire", "coordinator", *where, *limits)
    coordinator_process = CoordinatorProcess(
        task, worker_setup.of_coordinator(environ, job=job, token=rendezvous.token)
    )
    welcome = f"{size} workers, {minimum} to {maximum} allowed; to add workers: gradwire join {address} {script} …"
    return ElasticSetup(size, rendezvous, coordinator_process, welcome=welcome)


def elsewhere(count: int, address: str, token_file: Path | None) -> ElasticSetup:
    """Return the setup of workers for a job whose coordinator runs elsewhere."""
    environ = config_file.with_variables(os.environ)
    place = Address.parse(address)
    credentials = Credentials.from_environ(environ)
    given = with_token(environ, token_file)
    secret = tokens.secret_or_token(given, place.is_loopback())
    return ElasticSetup(count, _rendezvous(place, secret, given.get(TOKEN), environ.get(config.JOB), None, credentials))


def _rendezvous(
    address: Address,
    secret: bytes | Token,
    token: str | None,
    job: str | None,
    size: int | None,
    credentials: Credentials | None,
) -> ElasticRendezvous:
    """Return the rendezvous; the workers get `token`, or read this user's secret file if it is None."""

    def heartbeats(on_news: Callable[[News], None]) -> Heartbeats:
        from gradwire.membership.client.launcher_heartbeats import Heartbeats as Stream

        return Stream(str(address), secret=secret, on_news=on_news, credentials=credentials)

    return ElasticRendezvous(str(address), token, _name(credentials), job, size, heartbeats=heartbeats)


def _name(credentials: Credentials | None) -> str:
    """Return a name that no other launcher has; under TLS it begins with the certificate's name."""
    own = secrets.token_hex(2)
    return f"{credentials.member}/{own}" if credentials is not None else f"{socket.gethostname()}-{own}"


def _listen_address(listen: str | None) -> Address:
    """Return the address to listen on. The port is fixed here, so that a restarted coordinator has the same one."""
    if listen is None:
        return Address(HERE, worker_setup.free_port())
    try:
        address = Address.parse(listen, "--listen")
    except ConfigError:
        address = Address.parse(f"{listen}:0", "--listen")
    if address.host in ("0.0.0.0", "::"):
        raise ConfigError(f"--listen {listen}: name an address of this machine that the other machines can reach")
    if address.port:
        _wait_until_free(address)
    return Address(address.host, address.port or worker_setup.free_port())


def _wait_until_free(address: Address) -> None:
    """Wait until the port is free: the guard of a killed launcher needs a moment to end its coordinator.

    If the port stays in use, the coordinator reports it.
    """
    host = address.resolve()[0]
    deadline = time.monotonic() + PORT_SECONDS
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, address.port))
                probe.listen(1)
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return
        time.sleep(0.02)
