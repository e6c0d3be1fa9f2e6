"""`JobConfig` holds rank, size, address and other settings of this process; `resolve` finds them.

`resolve` reads each setting from the first of three sources that has it: the arguments, the `GRADWIRE_*` variables, the
variables of the launcher that started this process (see `environments/`). An argument always takes precedence over a
variable. Every error names the argument or variable that the bad value came from.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Final, Literal, SupportsIndex

from gradwire.errors import ConfigError, InvalidRank, InvalidSize, UnsupportedOp
from gradwire.job import environments
from gradwire.job.address import Address
from gradwire.job.environments import Found, Partial
from gradwire.job.environments.launcher_settings import find
from gradwire.liveness.detector import PEER_SECONDS
from gradwire.liveness.lifeline import LEAST_TIMEOUT, MOST_TIMEOUT

RANK = "GRADWIRE_RANK"
SIZE = "GRADWIRE_SIZE"
LOCAL_RANK = "GRADWIRE_LOCAL_RANK"
ADDRESS = "GRADWIRE_ADDRESS"
COORDINATOR = "GRADWIRE_COORDINATOR"
TRANSPORT = "GRADWIRE_TRANSPORT"
TIMEOUT = "GRADWIRE_TIMEOUT"
PEER_TIMEOUT = "GRADWIRE_PEER_TIMEOUT"
INSECURE = "GRADWIRE_INSECURE"
JOB = "GRADWIRE_JOB"
ELASTIC = "GRADWIRE_ELASTIC"
MEMBER = "GRADWIRE_MEMBER"

TRANSPORTS = ("auto", "shm", "tcp", "grpc")
NOT_BUILT = ("mpi",)  # reserved for future transports; an error until they exist
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class _DefaultValue(float):
    """A default that variables may override. The same number passed as an argument is a plain float: it is kept."""

    __slots__ = ()


DEFAULT_TIMEOUT: Final[float] = _DefaultValue(300.0)

_JOB_NAME = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """The settings with which this process joins its job. The constructor raises `ConfigError` if they conflict.

    - `rank`, `size`: this process's rank and the number of ranks. In an elastic job both may be None, and they apply to
      the first generation only.
    - `local_rank`: this process's number among the ranks of its host, or None if it is unknown.
    - `address`: where the ranks meet, or None for a job of one rank.
    - `transport`: "auto", "shm", "tcp" or "grpc".
    - `timeout`: seconds for joining, and for each call that has no timeout of its own.
    - `peer_timeout`: seconds without a heartbeat after which a rank on another host counts as lost. The largest value
      of all ranks applies.
    - `insecure`: allows plaintext links to other machines.
    - `job`: the name of the job, or None. A coordinator refuses processes that name another job.
    - `served`: a launcher runs the coordinator at `address`. Otherwise rank 0 does.
    - `address_taken`: a launcher listens at `address` for its own purposes, so the ranks must agree on another port.
    - `elastic`: members may join and leave while the job runs.
    - `member`: the id that a launcher gave this process, or None.
    - `sources`: for each setting, the argument or variable that it came from.
    """

    size: int | None = 1
    rank: int | None = 0
    local_rank: int | None = None
    address: Address | None = None
    transport: str = "auto"
    timeout: float = 300.0
    peer_timeout: float = PEER_SECONDS
    insecure: bool = False
    job: str | None = None
    served: bool = False
    address_taken: bool = False
    elastic: bool = False
    member: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.elastic:
            if not self.served:
                raise ConfigError(
                    f"an elastic job needs a coordinator that outlives its members, and {COORDINATOR} is not set: "
                    "start with `gradwire run --min … --max …`, or run `gradwire coordinator`"
                )
        elif self.size is None or self.rank is None:
            raise ConfigError("rank and size may be left out only in an elastic job")
        self._check_numbers()
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

    def _check_transport(self) -> None:
        known = ", ".join(map(repr, TRANSPORTS))
        if self.transport in NOT_BUILT:
            raise UnsupportedOp(f"{self._named('transport')} is not available yet: use {known}", operation="init")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"{self._named('transport')} is unknown: use {known}")

    def _check_numbers(self) -> None:
        size = self.size
        if size is None:
            return
        if size < 1:
            raise InvalidSize(f"a job has at least one rank, but {self._named('size')}")
        if self.rank is not None and not 0 <= self.rank < size:
            raise InvalidRank(
                f"{self._named('rank')} does not exist in a job of {self._named('size')}: ranks count from 0",
                rank=self.rank,
            )
        if self.local_rank is not None and not 0 <= self.local_rank < size and not self.elastic:
            raise InvalidRank(
                f"{self._named('local_rank')} does not exist in a job of {self._named('size')}", rank=self.rank
            )

    @property
    def role(self) -> Literal["coordinator", "worker"]:
        """Return "coordinator" if this process serves the rendezvous, otherwise "worker".

        Rank 0 serves the rendezvous, unless a launcher already does.
        """
        return "coordinator" if self.rank == 0 and not self.served else "worker"

    def _named(self, name: str) -> str:
        value = getattr(self, name)
        shown = value if isinstance(value, int | float | Address) else repr(value)
        source = self.sources.get(name)
        return f"{name} {shown}" + (f" (from {source})" if source else "")


def resolve(
    rank: SupportsIndex | None = None,
    size: SupportsIndex | None = None,
    address: Address | str | None = None,
    *,
    transport: str = "auto",
    timeout: float = DEFAULT_TIMEOUT,
    insecure: bool = False,
    environ: Mapping[str, str] | None = None,
) -> JobConfig:
    """Return the job's configuration from arguments, `GRADWIRE_*` and the launcher's variables, in this order.

    An argument that is None counts as not given, and so do transport "auto" and the default timeout. Plaintext links
    are allowed if `insecure` is true or `GRADWIRE_INSECURE` is set to a true value. If neither rank nor size is found,
    the job has one rank.
    """
    environ = os.environ if environ is None else environ
    launchers = environments.detect(environ)
    numbering = _numbering(launchers)
    sources: dict[str, str] = {}
    chosen_rank = _whole_number("rank", rank, find(environ, RANK) or numbering.rank, sources)
    chosen_size = _whole_number("size", size, find(environ, SIZE) or numbering.size, sources)
    elastic = _flag(find(environ, ELASTIC))
    if not elastic:
        chosen_rank, chosen_size = _complete(chosen_rank, chosen_size, sources)
    agreeing = [partial for partial in launchers if _agrees(partial, chosen_rank, chosen_size)]
    usable = [partial for partial in launchers if partial in agreeing or not partial.address_derived]
    rendezvous = _rendezvous(address, environ, usable, sources)
    config = JobConfig(
        size=chosen_size,
        rank=chosen_rank,
        local_rank=_local_rank(environ, agreeing, chosen_rank, chosen_size, sources),
        address=rendezvous.address,
        transport=_transport(transport, environ, sources),
        timeout=_timeout(timeout, environ, sources),
        peer_timeout=_peer_timeout(environ, sources),
        insecure=bool(insecure) or _flag(find(environ, INSECURE)),
        job=_job(environ, agreeing, rendezvous.served, sources),
        served=rendezvous.served,
        address_taken=rendezvous.taken,
        elastic=elastic,
        member=_text(find(environ, MEMBER)),
        sources=sources,
    )
    if config.size is not None and config.size > 1 and config.address is None:
        raise ConfigError(_missing_address(config, agreeing))
    return config


# --- helpers of `resolve`, in the order of their use


def _numbering(launchers: tuple[Partial, ...]) -> Partial:
    """Return the launcher that gives rank and size: the first that gives both, else the first that gives either."""
    gives_both = (partial for partial in launchers if partial.rank and partial.size)
    gives_one = (partial for partial in launchers if partial.rank or partial.size)
    return next(gives_both, None) or next(gives_one, None) or Partial("no launcher")


def _whole_number(
    name: str, argument: SupportsIndex | None, found: Found | None, sources: dict[str, str]
) -> int | None:
    if argument is not None:
        sources[name] = f"the argument {name}"
        try:
            if isinstance(argument, bool):
                raise TypeError
            return index(argument)
        except TypeError:
            raise ConfigError(f"the argument {name} is {argument!r}, which is not a whole number") from None
    if found is None:
        return None
    sources[name] = found.source
    return _integer(found)


def _integer(found: Found) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", found.text):
        raise ConfigError(f"{found.source} is {found.text!r}, which is not a whole number")
    return int(found.text)


def _complete(rank: int | None, size: int | None, sources: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and size. If both are missing, the job has one rank. A single missing one is an error, unless the
    size is 1."""
    if size is None and rank is None:
        return 0, 1
    if size is None:
        raise ConfigError(
            f"rank {rank} is given (by {sources['rank']}) but no size: pass size=, or set {SIZE} or WORLD_SIZE",
            rank=rank,
        )
    if rank is None:
        if size > 1:
            raise ConfigError(
                f"size {size} is given (by {sources['size']}) but no rank: pass rank=, set {RANK} or RANK, "
                f"or start all ranks with `gradwire run -n {size} …`"
            )
        rank = 0
    return rank, size


def _agrees(partial: Partial, rank: int | None, size: int | None) -> bool:
    """Return whether the rank and size in a launcher's variables, if any, are those of this process."""
    return (partial.rank is None or partial.rank.text == str(rank)) and (
        partial.size is None or partial.size.text == str(size)
    )


@dataclass(frozen=True, slots=True)
class _Rendezvous:
    address: Address | None
    served: bool = False
    taken: bool = False


def _rendezvous(
    argument: Address | str | None, environ: Mapping[str, str], launchers: list[Partial], sources: dict[str, str]
) -> _Rendezvous:
    """Return where the ranks meet. `GRADWIRE_COORDINATOR` takes precedence over `GRADWIRE_ADDRESS`."""
    if argument is not None:
        sources["address"] = "the argument address"
        if isinstance(argument, Address):
            return _Rendezvous(argument)
        if not isinstance(argument, str):
            raise ConfigError(f'the argument address is {argument!r}: write a string of the form "host:port"')
        return _Rendezvous(Address.parse(argument, sources["address"]))
    given = find(environ, COORDINATOR, ADDRESS)
    partial = next((partial for partial in launchers if partial.address), None)
    found = given or (partial.address if partial else None)
    if found is None:
        return _Rendezvous(None)
    sources["address"] = found.source
    return _Rendezvous(
        Address.parse(found.text, found.source),
        served=found.source == COORDINATOR,
        taken=given is None and partial is not None and partial.address_taken,
    )


def _local_rank(
    environ: Mapping[str, str], agreeing: list[Partial], rank: int | None, size: int | None, sources: dict[str, str]
) -> int | None:
    """Return the local rank, or None. A local rank set beside another rank's number belongs to that other rank."""
    found, rank_variable = find(environ, LOCAL_RANK), find(environ, RANK)
    if found is None or (rank_variable is not None and rank_variable.text != str(rank)):
        found = next((partial.local_rank for partial in agreeing if partial.rank and partial.local_rank), None)
    if found is None:
        return 0 if size == 1 else None
    sources["local_rank"] = found.source
    return _integer(found)


def _transport(argument: str, environ: Mapping[str, str], sources: dict[str, str]) -> str:
    found = find(environ, TRANSPORT)
    if argument != "auto" or found is None:
        sources["transport"] = "the argument transport"
        return argument
    sources["transport"] = found.source
    return found.text.lower()


def _timeout(argument: float, environ: Mapping[str, str], sources: dict[str, str]) -> float:
    found = find(environ, TIMEOUT) if isinstance(argument, _DefaultValue) else None
    value: object = found.text if found else argument
    source = sources["timeout"] = found.source if found else "the argument timeout"
    try:
        if found is None and isinstance(argument, bool | str):
            raise TypeError
        return float(value)  # type: ignore[arg-type]  # callers may pass any object; a wrong type raises ConfigError
    except (TypeError, ValueError):
        raise ConfigError(f"{source} is {value!r}, which is not a number of seconds") from None


def _peer_timeout(environ: Mapping[str, str], sources: dict[str, str]) -> float:
    found = find(environ, PEER_TIMEOUT)
    if found is None:
        return PEER_SECONDS
    sources["peer_timeout"] = found.source
    try:
        return float(found.text)
    except ValueError:
        raise ConfigError(f"{found.source} is {found.text!r}, which is not a number of seconds") from None


def _text(found: Found | None) -> str | None:
    return found.text if found else None


def _flag(found: Found | None) -> bool:
    if found is None:
        return False
    text = found.text.lower()
    if text not in TRUE + FALSE:
        raise ConfigError(
            f"{found.source} is {found.text!r}, which is neither true ({'/'.join(TRUE)}) nor false ({'/'.join(FALSE)})"
        )
    return text in TRUE


def _job(environ: Mapping[str, str], agreeing: list[Partial], served: bool, sources: dict[str, str]) -> str | None:
    found = find(environ, JOB)
    if found is None and not served:  # a separate coordinator names its job itself; the launcher's name would not match
        found = next((partial.job for partial in agreeing if partial.rank and partial.job), None)
    if found is None:
        return None
    sources["job"] = found.source
    return found.text


def _missing_address(config: JobConfig, agreeing: list[Partial]) -> str:
    """Return the message of the error that is raised when a job of several ranks has no address."""
    hint = next((f" ({partial.hint})" for partial in agreeing if partial.hint), "")
    return (
        f'a job of {config._named("size")} needs an address where its ranks meet{hint}: pass address="host:port", '
        f"set {ADDRESS}, set MASTER_ADDR and MASTER_PORT, or start all ranks with `gradwire run -n {config.size} …`"
    )
