"""Provides the rendezvous of an elastic job: a coordinator that this launcher starts, or one that runs elsewhere."""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gradwire.errors import ConfigError
from gradwire.job import config, config_file
from gradwire.job.address import Address, check_encrypted
from gradwire.job.config import JobConfig
from gradwire.launch import worker_setup
from gradwire.launch.coordinator_process import CoordinatorProcess
from gradwire.launch.coordinator_wait import JOIN_SECONDS, await_coordinator
from gradwire.launch.elastic_setup import ElasticRendezvous, ElasticSetup, Heartbeats, WorkerNumbers
from gradwire.launch.rendezvous import job_name
from gradwire.launch.worker_process import Task
from gradwire.membership.types import News
from gradwire.security import tokens
from gradwire.security.credentials import Credentials
from gradwire.security.secret import TOKEN, with_token
from gradwire.security.tokens import Token

HERE = "127.0.0.1"
PORT_SECONDS = 5.0  # to wait until the port of --listen is free


@dataclass(frozen=True)
class ElasticJob:
    """A new elastic job: the workers of its first generation, the fewest, the most, and those that start here."""

    size: int
    minimum: int
    maximum: int
    workers: int
    name: str | None = None  # None: from `GRADWIRE_JOB` or the certificate, otherwise a random one
    numbers: WorkerNumbers = WorkerNumbers()  # noqa: RUF009


def hosted(job: ElasticJob, listen: str | None, journal: Path, script: str, environ: Mapping[str, str]) -> ElasticSetup:
    """Return the setup of a new job, with a coordinator that listens here."""
    own = config_file.with_variables(environ)  # the workers read the configuration file themselves
    credentials = Credentials.from_environ(own)
    name = job_name(job.name or own.get(config.JOB), credentials)
    address = _listen_address(listen)
    check_encrypted(address, insecure=settings(own).insecure, credentials=credentials)
    # No warnings while the coordinator starts or restarts: `CoordinatorProcess` reports what happens.
    logging.getLogger("gradwire.membership").setLevel(logging.ERROR)
    secret = tokens.whole_secret(own, address.is_loopback())
    rendezvous = _rendezvous(address, secret, own.get(TOKEN), name, credentials, job.size, job.numbers)
    limits = ("--size", str(job.size), "--min", str(job.minimum), "--max", str(job.maximum))
    # A crash of this machine ends the launcher too, so the journal need not be flushed to disk.
    where = ("--listen", str(address), "--journal", str(journal), "--no-fsync")
    task = Task.module("gradwire", "coordinator", *where, *limits)
    coordinator_process = CoordinatorProcess(task, worker_setup.of_coordinator(own, job=name, token=rendezvous.token))
    welcome = (
        f"{job.workers} workers, {job.minimum} to {job.maximum} allowed; "
        f"to add workers: gradwire join {address} {script} … (job {name})"
    )
    return ElasticSetup(job.workers, rendezvous, coordinator_process, welcome=welcome, environ=environ)


def elsewhere(
    count: int,
    address: str,
    token_file: Path | None,
    environ: Mapping[str, str],
    report: Callable[[str], None],
    *,
    seconds: float | None = None,
    first: tuple[int, WorkerNumbers] | None = None,
) -> ElasticSetup:
    """Return the setup of workers for a job whose coordinator runs elsewhere, when that coordinator answers.

    `report` gets lines that say how long this still waits: `seconds` at most, by default `JOIN_SECONDS`. With `first`
    the workers may be in the first generation: it has this number of members, and the workers are numbered like this.
    """
    place = Address.parse(address)
    own = config_file.with_variables(environ)
    credentials = Credentials.from_environ(own)
    check_encrypted(place, insecure=settings(own).insecure, credentials=credentials)
    given = with_token(own, token_file)
    secret = tokens.secret_or_token(given, place.is_loopback())
    limit = min(JOIN_SECONDS, settings(own).timeout) if seconds is None else seconds
    await_coordinator(str(place), secret, credentials, limit, report)
    size, numbers = first or (None, WorkerNumbers(workers=count))
    rendezvous = _rendezvous(place, secret, given.get(TOKEN), own.get(config.JOB), credentials, size, numbers)
    return ElasticSetup(count, rendezvous, environ=environ)


def settings(environ: Mapping[str, str]) -> JobConfig:
    """Return the settings in variables that a launcher shares with its workers: the timeout, and plaintext links."""
    names = (config.INSECURE, config.TIMEOUT)
    return config.resolve(environ={name: environ[name] for name in names if name in environ})


def is_free_here(address: Address) -> bool:
    """Return whether the address is one of this machine, and no program listens there."""
    host = address.resolve()[0]
    return _listen_error(host, address.port) == 0


def _rendezvous(
    address: Address,
    secret: bytes | Token,
    token: str | None,
    job: str | None,
    credentials: Credentials | None,
    size: int | None,
    numbers: WorkerNumbers,
) -> ElasticRendezvous:
    """Return the rendezvous; the workers get `token`, or read this user's secret file if it is None."""

    def heartbeats(on_news: Callable[[News], None]) -> Heartbeats:
        from gradwire.membership.client.launcher_heartbeats import Heartbeats as Stream

        return Stream(str(address), secret=secret, on_news=on_news, credentials=credentials)

    return ElasticRendezvous(str(address), token, _name(credentials), job, size, numbers, heartbeats=heartbeats)


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

    Raise `ConfigError` if it stays in use. The workers would otherwise register at the other program there, which may
    be the coordinator of another job with the same certificates.
    """
    host = address.resolve()[0]
    deadline = time.monotonic() + PORT_SECONDS
    while _listen_error(host, address.port) == errno.EADDRINUSE:
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"another program already listens at {address}, perhaps the coordinator of another job: wait for its "
                "end, or choose another port"
            )
        time.sleep(0.02)


def _listen_error(host: str, port: int) -> int:
    """Return 0 if a program could listen there now, otherwise the number of the error."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0
