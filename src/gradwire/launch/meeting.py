"""Where the members of an elastic job meet: here, at a coordinator that we keep, or at somebody else's."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from gradwire import config
from gradwire.address import Address
from gradwire.errors import ConfigError
from gradwire.launch import environment
from gradwire.launch.elastic import ElasticStage, Heartbeats, Meeting
from gradwire.launch.keeper import Keeper
from gradwire.launch.worker import Task
from gradwire.membership.answers import News
from gradwire.security.secret import TOKEN, job_secret
from gradwire.security.tls import Credentials

HERE = "127.0.0.1"


def hosted(size: int, minimum: int, maximum: int, listen: str | None, journal: Path, script: str) -> ElasticStage:
    """The stage of a job of our own, with a coordinator that listens here."""
    environ = os.environ
    address = _listening(listen)
    # That it is not there, when it starts and when it starts anew, is nothing to warn of: its keeper says what happens.
    logging.getLogger("gradwire.membership").setLevel(logging.ERROR)
    credentials = Credentials.from_environ(environ)
    token = _token(environ, address)
    job = environ.get(config.JOB) or (credentials.job if credentials is not None else uuid.uuid4().hex)
    meeting = _meeting(address, token, job, size, credentials)
    limits = ("--size", str(size), "--min", str(minimum), "--max", str(maximum))
    # The job's launcher ends with this machine, so nobody needs to wait for the disk.
    where = ("--listen", str(address), "--journal", str(journal), "--no-fsync")
    task = Task.module("gradwire", "coordinator", *where, *limits)
    keeper = Keeper(task, {**environment.without_identity(environ), TOKEN: token, config.JOB: job})
    welcome = f"{size} workers, of {minimum} to {maximum}; others can come: gradwire join {address} {script} …"
    return ElasticStage(size, meeting, keeper, welcome=welcome)


def elsewhere(count: int, address: str, token_file: Path | None) -> ElasticStage:
    """The stage of workers for a job whose coordinator others run."""
    environ = os.environ
    place = Address.parse(address)
    credentials = Credentials.from_environ(environ)
    token = _token(_with_token(environ, token_file), place)
    return ElasticStage(count, _meeting(place, token, environ.get(config.JOB), None, credentials))


def _meeting(
    address: Address, token: str, job: str | None, size: int | None, credentials: Credentials | None
) -> Meeting:
    def heartbeats(on_news: Callable[[News], None]) -> Heartbeats:
        from gradwire.membership.heartbeats import Heartbeats as Stream  # loads grpc

        secret = token.encode("utf-8", "surrogateescape")
        return Stream(str(address), secret=secret, on_news=on_news, credentials=credentials)

    return Meeting(str(address), token, _name(credentials), job, size, heartbeats=heartbeats)


def _name(credentials: Credentials | None) -> str:
    """Unlike that of any other launcher; under TLS it begins with the name that our certificate is for."""
    own = secrets.token_hex(2)
    return f"{credentials.member}/{own}" if credentials is not None else f"{socket.gethostname()}-{own}"


def _listening(listen: str | None) -> Address:
    """A port is chosen here and not by the system, so that it is the same after a restart of the coordinator."""
    if listen is None:
        return Address(HERE, environment.free_port())
    try:
        address = Address.parse(listen, "--listen")
    except ConfigError:
        address = Address.parse(f"{listen}:0", "--listen")
    if address.host in ("0.0.0.0", "::"):
        raise ConfigError(f"--listen {listen}: name an address of this machine by which the others reach it")
    return Address(address.host, address.port or environment.free_port())


def _token(environ: Mapping[str, str], address: Address) -> str:
    return job_secret(environ, address.is_loopback()).decode("utf-8", "surrogateescape")


def _with_token(environ: Mapping[str, str], file: Path | None) -> Mapping[str, str]:
    if file is None:
        return environ
    try:
        return {**environ, TOKEN: file.read_text("utf-8").strip()}
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read the token in {file}: {error}") from error
