"""`JobConfig` holds rank, size, address and other settings of this process; `resolve` finds all of them for `gw.init`.

Each setting comes from the first of these sources that has it: the arguments of `gw.init`, its `config`, the
`GRADWIRE_*` variables, the variables of the launcher that started this process (see `environments/`), the file that
`GRADWIRE_CONFIG` names. Every error names the source that the bad value came from.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, Self, SupportsIndex

from gradwire.errors import ConfigError, InvalidRank, InvalidSize, UnsupportedOp
from gradwire.job import config_file
from gradwire.job.address import Address
from gradwire.job.config_sources import assumed, collect
from gradwire.job.settings import (
    ADDRESS,
    ARGUMENT,
    CONFIG,
    COORDINATOR,
    DEFAULT,
    DERIVED,
    ELASTIC,
    INSECURE,
    JOB,
    LOCAL_RANK,
    MEMBER,
    PEER_TIMEOUT,
    RANK,
    SIZE,
    TIMEOUT,
    TRANSPORT,
    Layer,
    Setting,
    checked,
    source,
)
from gradwire.liveness.detector import PEER_SECONDS
from gradwire.liveness.lifeline import LEAST_TIMEOUT, MOST_TIMEOUT
from gradwire.security.credentials import Credentials

__all__ = [
    "ADDRESS",
    "COORDINATOR",
    "DEFAULT_TIMEOUT",
    "ELASTIC",
    "INSECURE",
    "JOB",
    "LOCAL_RANK",
    "MEMBER",
    "PEER_TIMEOUT",
    "RANK",
    "SIZE",
    "TIMEOUT",
    "TRANSPORT",
    "TRANSPORTS",
    "JobConfig",
    "resolve",
    "shown",
    "table",
]

TRANSPORTS = ("auto", "shm", "tcp", "grpc")
NOT_BUILT = ("mpi",)  # reserved for future transports; an error until they exist

Role = Literal["coordinator", "worker"]
ROLES = ("coordinator", "worker")


class _DefaultValue(float):
    """A default that variables may override. The same number passed as an argument is a plain float: it is kept."""

    __slots__ = ()


DEFAULT_TIMEOUT: Final[float] = _DefaultValue(300.0)

_JOB_NAME = re.compile(r"[!-~]{1,128}")
_DEFAULTS: dict[str, Any] = {
    "transport": "auto",
    "timeout": float(DEFAULT_TIMEOUT),
    "peer_timeout": PEER_SECONDS,
    "insecure": False,
    "served": False,
    "address_taken": False,
    "elastic": False,
}


@dataclass(frozen=True, slots=True, init=False, repr=False)
class JobConfig:
    """The settings with which a process joins its job: pass it to `gw.init(config=...)`.

    All arguments are optional. One that is None is not set here: `gw.init` takes it from the environment, or uses the
    default. The object cannot be changed; `replace` returns a changed copy. Settings that contradict each other raise
    `ConfigError`.

    - `rank`, `size`: this process's rank, from 0, and the number of ranks. Without both, the job has one rank. In an
      elastic job both may be None, and they apply to the first generation only.
    - `local_rank`: this process's number among the ranks of its host, or None if it is unknown.
    - `role`: "coordinator" for the process that serves the rendezvous, otherwise "worker". It follows from the rank:
      rank 0 serves, unless `served` is true. Another role raises `ConfigError`. None if the rank is unknown.
    - `address`: "host:port" where the ranks meet, or None for a job of one rank. It is a string with the attributes
      `host` and `port`.
    - `served`: a coordinator already runs at `address`, for example `gradwire coordinator`.
    - `transport`: "auto", "shm", "tcp" or "grpc", as in `gw.init`.
    - `timeout`: seconds for joining, and for each call that has no timeout of its own.
    - `peer_timeout`: seconds without a heartbeat after which a rank on another host counts as lost. The largest value
      of all ranks applies.
    - `insecure`: allows plaintext links to other machines.
    - `job`: the name of the job. A coordinator refuses processes that name another job.
    - `tls`: the certificates of this process, as `gw.Credentials`.
    - `token_file`: a file with the job's secret or a join token. It takes precedence over `GRADWIRE_TOKEN`.
    - `elastic`: members may join and leave while the job runs. Needs `served`.
    - `member`: the id of this process in an elastic job.
    - `address_taken`: a launcher listens at `address` for its own purposes, so the ranks agree on another port.
    - `origins`: for `dataclasses.replace`, which copies it. Do not pass it.

    >>> import gradwire as gw
    >>> config = gw.JobConfig(rank=1, size=4, address="10.0.0.1:29500")
    >>> config.role, config.address.port, config.timeout
    ('worker', 29500, 300.0)
    >>> config.origin("rank"), config.origin("timeout")
    ('argument', 'default')
    >>> config.replace(rank=0).role
    'coordinator'
    """

    rank: int | None
    size: int | None
    local_rank: int | None
    role: Role | None
    address: Address | None
    served: bool
    transport: str
    timeout: float
    peer_timeout: float
    insecure: bool
    job: str | None
    tls: Credentials | None
    token_file: Path | None
    elastic: bool
    member: str | None
    address_taken: bool
    origins: Mapping[str, Setting] = field(compare=False)

    def __init__(
        self,
        *,
        rank: SupportsIndex | None = None,
        size: SupportsIndex | None = None,
        local_rank: SupportsIndex | None = None,
        role: Role | None = None,
        address: str | None = None,
        served: bool | None = None,
        transport: str | None = None,
        timeout: float | None = None,
        peer_timeout: float | None = None,
        insecure: bool | None = None,
        job: str | None = None,
        tls: Credentials | None = None,
        token_file: str | os.PathLike[str] | None = None,
        elastic: bool | None = None,
        member: str | None = None,
        address_taken: bool | None = None,
        origins: Mapping[str, Setting] | None = None,
    ) -> None:
        values = dict(locals())
        given = {name: setting for name in SETTINGS if (setting := _argument(name, values[name], origins or {}))}
        settings = given | _defaults(given)
        for name in SETTINGS:
            object.__setattr__(self, name, settings[name].value)
        object.__setattr__(self, "origins", settings)
        self._check()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Return what the environment gives: `GRADWIRE_*`, the launcher's variables, the file of `GRADWIRE_CONFIG`.

        It need not be complete: an address, for example, can be added with `replace`.
        """
        return cls._of(collect((), os.environ if environ is None else environ).settings)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Return the settings in a TOML file. Its keys are the names of the settings; `tls` is a table.

        Paths in the file are relative to its folder. `ConfigError` names the file and the key that is wrong.
        """
        return cls._of(config_file.read(path))

    @classmethod
    def _of(cls, settings: Layer) -> Self:
        return cls(**{name: setting.value for name, setting in settings.items()}, origins=settings)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values. None removes a value. A new address is served by rank 0 unless `served`."""
        if "address" in changes:
            changes = {"served": None, "address_taken": None} | changes
        kept = {name: setting for name, setting in self._given().items() if name not in changes}
        return type(self)(**{name: setting.value for name, setting in kept.items()} | changes, origins=kept)

    def _given(self) -> dict[str, Setting]:
        """Return the settings that have a value other than by default, with their origins."""
        return {name: one for name, one in self.origins.items() if one.origin not in (DEFAULT, DERIVED)}

    def origin(self, name: str) -> str:
        """Return where the value of a setting came from.

        "argument", "config" (of `gw.init`), a variable such as "GRADWIRE_RANK" or "RANK (torchrun)", "file job.toml",
        "derived" (from other settings), or "default".
        """
        if name not in self.origins:
            raise ConfigError(f"{name!r} is not a setting: the settings are {', '.join(SETTINGS)}")
        return self.origins[name].origin

    def describe(self) -> str:
        """Return a table of all settings, with the origin of each. It contains no secrets."""
        return table(self.rows())

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the name, the value as text and the origin of each setting. `address_taken` is in it only if true."""
        names = [name for name in SETTINGS if name != "address_taken" or self.address_taken]
        return [(name, shown(self.origins[name].value), self.origin(name)) for name in names]

    __str__ = describe

    def __repr__(self) -> str:
        return f"JobConfig({', '.join(f'{name}={_plain(one.value)!r}' for name, one in self._given().items())})"

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise if the given values are wrong or contradict each other. Defaults may still be replaced."""
        given = self._given()
        self._check_numbers(*(self.origins[name].value if name in given else None for name in ("rank", "size")))
        if self.role is not None and self.role not in ROLES:
            raise ConfigError(f"{self._named('role')} is unknown: use 'coordinator' or 'worker'")
        if "rank" in given:
            self._check_role()
        if self.address is not None and self.address.port == 0:
            raise ConfigError(f"{self._named('address')}: with port 0 the other ranks cannot know where to connect")
        if self.served and self.address is None:
            raise ConfigError("a job with a separate coordinator needs the coordinator's address")
        self._check_transport()
        if not 0 < self.timeout <= threading.TIMEOUT_MAX:
            raise ConfigError(f"{self._named('timeout')} is not a positive number of seconds")
        if not LEAST_TIMEOUT <= self.peer_timeout <= MOST_TIMEOUT:
            bounds = f"{LEAST_TIMEOUT:g} to {MOST_TIMEOUT:g} seconds"
            raise ConfigError(f"{self._named('peer_timeout')} is out of range: choose {bounds}")
        if self.job is not None and not _JOB_NAME.fullmatch(self.job):
            raise ConfigError(f"{self._named('job')} is not 1 to 128 visible ASCII characters without spaces")

    def _check_complete(self, hint: str = "") -> None:
        """Raise if a process cannot join its job with these settings. `hint` explains a missing address."""
        if self.elastic:
            if not self.served:
                raise ConfigError(
                    f"an elastic job needs a coordinator that outlives its members, and {COORDINATOR} is not set: "
                    "start with `gradwire run --min … --max …`, or run `gradwire coordinator`"
                )
        else:
            self._check_rank_and_size()
        self._check_numbers(self.rank, self.size)
        self._check_role()
        if self.size is not None and self.size > 1 and self.address is None:
            raise ConfigError(
                f"a job of {self._named('size')} needs an address where its ranks meet{hint and f' ({hint})'}: pass "
                f'address="host:port", set {ADDRESS}, set MASTER_ADDR and MASTER_PORT, or start all ranks with '
                f"`gradwire run -n {self.size} …`"
            )

    def _check_rank_and_size(self) -> None:
        if self.size is None:
            raise ConfigError(
                f"rank {self.rank} is given (by {source('rank', self.origin('rank'))}) but no size: pass size=, or set "
                f"{SIZE} or WORLD_SIZE",
                rank=self.rank,
            )
        if self.rank is None:
            raise ConfigError(
                f"size {self.size} is given (by {source('size', self.origin('size'))}) but no rank: pass rank=, set "
                f"{RANK} or RANK, or start all ranks with `gradwire run -n {self.size} …`"
            )

    def _check_numbers(self, rank: int | None, size: int | None) -> None:
        if size is not None and size < 1:
            raise InvalidSize(f"a job has at least one rank, but {self._named('size')}")
        for name, number in (("rank", rank), ("local_rank", self.local_rank)):
            if number is None or (name == "local_rank" and self.elastic and number >= 0):
                continue
            if number < 0:
                raise InvalidRank(f"{self._named(name)} does not exist: ranks count from 0", rank=number, size=size)
            if size is not None and number >= size:
                raise InvalidRank(
                    f"{self._named(name)} does not exist in a job of {self._named('size')}: ranks count from 0",
                    rank=number,
                    size=size,
                )

    def _check_role(self) -> None:
        expected = _role(self.rank, self.served)
        if self.role is not None and expected is not None and self.role != expected:
            reason = "a coordinator already runs at the address" if self.served else "rank 0 serves the rendezvous"
            raise ConfigError(f"{self._named('role')} does not fit {self._named('rank')}: {reason}", rank=self.rank)

    def _check_transport(self) -> None:
        known = ", ".join(map(repr, TRANSPORTS))
        if self.transport in NOT_BUILT:
            raise UnsupportedOp(f"{self._named('transport')} is not available yet: use {known}", operation="init")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"{self._named('transport')} is unknown: use {known}")

    def _named(self, name: str) -> str:
        """Return a setting with its value and its origin, for error messages."""
        setting = self.origins[name]
        value = setting.value if isinstance(setting.value, Address) else _plain(setting.value)
        text = f"{name} {value if isinstance(value, int | float | Address) else repr(value)}"
        return text if setting.origin in (DEFAULT, DERIVED) else f"{text} (from {source(name, setting.origin)})"


SETTINGS = tuple(one.name for one in fields(JobConfig) if one.name != "origins")


def resolve(
    rank: SupportsIndex | None = None,
    size: SupportsIndex | None = None,
    address: str | None = None,
    *,
    transport: str = "auto",
    timeout: float = DEFAULT_TIMEOUT,
    insecure: bool = False,
    config: JobConfig | None = None,
    environ: Mapping[str, str] | None = None,
) -> JobConfig:
    """Return the complete configuration of this process, or raise `ConfigError`.

    An argument that is None counts as not given, and so do transport "auto", the default timeout and insecure=False.
    """
    if config is not None and not isinstance(config, JobConfig):
        raise ConfigError(f"the argument config is {config!r}: pass a gw.JobConfig")
    arguments = {"rank": rank, "size": size, "address": address, "insecure": bool(insecure) or None}
    arguments["transport"] = None if transport == "auto" else transport
    given: dict[str, Setting] = {}
    for name, value in arguments.items():
        if value is not None:
            given[name] = Setting(checked(name, value, source(name, ARGUMENT)), ARGUMENT)
    if not isinstance(timeout, _DefaultValue):
        given["timeout"] = Setting(checked("timeout", timeout, source("timeout", ARGUMENT)), ARGUMENT)
    collected = collect((given, _layer(config)), os.environ if environ is None else environ)
    found = JobConfig._of(collected.settings)
    found._check_complete(collected.hint)
    return found


def table(rows: list[tuple[str, str, str]]) -> str:
    """Return rows of a name, a value and an origin as a table with a headline."""
    rows = [("setting", "value", "origin"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}" for name, value, origin in rows)


def shown(value: object) -> str:
    """Return a value as `describe` shows it; "-" if there is none."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(_plain(value))


def _layer(config: JobConfig | None) -> Layer:
    """Return what a config sets. A value that was an argument of the config now has the origin "config"."""
    given = config._given() if config is not None else {}
    return {name: Setting(one.value, CONFIG if one.origin == ARGUMENT else one.origin) for name, one in given.items()}


def _argument(name: str, value: object, origins: Layer) -> Setting | None:
    """Return an argument of `JobConfig` with its origin; None if it is not given."""
    before = origins.get(name)
    if before is not None and (before.value is value or before.value == value):  # a copied value keeps its origin
        return None if before.origin in (DEFAULT, DERIVED) else before
    return None if value is None else Setting(checked(name, value, source(name, ARGUMENT)), ARGUMENT)


def _defaults(given: Layer) -> dict[str, Setting]:
    """Return the settings that are not given, with the values that they have by default."""
    values = {name: given[name].value if name in given else _DEFAULTS.get(name) for name in SETTINGS}
    if not values["elastic"]:
        values["rank"], values["size"] = assumed(values["rank"], values["size"])
        if values["local_rank"] is None and values["size"] == 1:
            values["local_rank"] = 0
    if values["role"] is None:
        values["role"] = _role(values["rank"], bool(values["served"]))
    derived = ("role",) if values["role"] is not None else ()
    return {
        name: Setting(value, DERIVED if name in derived else DEFAULT)
        for name, value in values.items()
        if name not in given
    }


def _role(rank: int | None, served: bool) -> Role | None:
    if served:
        return "worker"
    return None if rank is None else "coordinator" if rank == 0 else "worker"


def _plain(value: object) -> object:
    """Return an address and a path as plain strings."""
    return str(value) if isinstance(value, Address | Path) else value
