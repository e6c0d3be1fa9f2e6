"""The options of `gradwire run` for jobs on several hosts, in torchrun's spellings too, and torchrun's variables.

A value on the command line takes precedence over a `PET_*` variable, in any of its spellings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from gradwire.errors import ConfigError
from gradwire.job.address import Address

_ENDPOINT_PORT, _MASTER_PORT = 29400, 29500  # torchrun's defaults
VARIABLES = {
    "nnodes": "PET_NNODES",
    "nproc": "PET_NPROC_PER_NODE",
    "node_rank": "PET_NODE_RANK",
    "rdzv_endpoint": "PET_RDZV_ENDPOINT",
    "master_addr": "PET_MASTER_ADDR",
    "master_port": "PET_MASTER_PORT",
    "rdzv_id": "PET_RDZV_ID",
    "max_restarts": "PET_MAX_RESTARTS",
}


@dataclass(frozen=True)
class Nodes:
    """On how many hosts a job runs, and this host's part in it."""

    fewest: int
    most: int
    workers: int  # on this host
    rank: int | None
    address: Address | None
    ranged: bool = False  # the number of hosts was given as A:B

    @property
    def several(self) -> bool:
        return self.most > 1


_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_OPTIONS: tuple[_Decorator, ...] = (
    click.option(
        "--nnodes",
        metavar="N|A:B",
        help="Run on N hosts, with this command once on each of them. A:B makes the job elastic.  [default: 1]",
    ),
    click.option("--node-rank", "node_rank", metavar="K", help="The number of this host, from 0; 0 coordinates."),
    click.option(
        "--nproc-per-node",
        "nproc",
        metavar="N",
        help="Number of processes on this host, as -n.  [default: 1]",
    ),
    click.option("--address", metavar="HOST:PORT", help="Address of host 0, where the hosts meet."),
    click.option("--insecure", is_flag=True, help="Let the hosts connect without TLS.  [GRADWIRE_INSECURE]"),
    # Other spellings of torchrun, for scripts that were written for it.
    click.option("--rdzv-endpoint", "rdzv_endpoint", hidden=True, help="The same as --address."),
    click.option("--rdzv-id", "rdzv_id", hidden=True, help="The same as --job."),
    click.option(
        "--rdzv-backend",
        "rdzv_backend",
        type=click.Choice(["c10d", "static"]),
        hidden=True,
        help="Has no effect.",
    ),
    click.option("--master-addr", "master_addr", hidden=True, help="The host of --address."),
    click.option("--master-port", "master_port", hidden=True, help="The port of --address."),
    click.option("--max-restarts", "max_restarts", hidden=True, help="The same as --restarts."),
    click.option("--standalone", is_flag=True, hidden=True, help="Run on this host only."),
)


def with_hyphens(name: str) -> str:
    """Return the name of an option as it is declared: torchrun also accepts underscores."""
    return name.replace("_", "-")


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with these options. It gets them as the keyword arguments that `NodeOptions` has."""
    for decorate in reversed(_OPTIONS):
        command = decorate(command)
    return command


@dataclass(frozen=True)
class NodeOptions:
    """The options as they were given. Empty and absent ones are None."""

    nnodes: str | None = None
    node_rank: str | None = None
    nproc: str | None = None
    address: str | None = None
    insecure: bool = False
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_backend: str | None = None
    master_addr: str | None = None
    master_port: str | None = None
    max_restarts: str | None = None
    standalone: bool = False

    def with_variables(self, environ: Mapping[str, str], *, size: int | None) -> NodeOptions:
        """Return the options with torchrun's variables for those that were not given.

        `-n` without --nnodes starts all ranks on this host, so it makes the variables about hosts meaningless.
        """
        here = size is not None and self.nnodes is None
        found = {} if here else {name: environ.get(variable) for name, variable in VARIABLES.items()}
        if self.address or self.rdzv_endpoint or self.master_addr:
            found = {name: value for name, value in found.items() if not name.startswith(("rdzv_endpoint", "master"))}
        given = {name: value for name, value in vars(self).items() if value is not None}
        return NodeOptions(**{**{name: value or None for name, value in found.items()}, **given})

    @property
    def restarts(self) -> int | None:
        """The value of --max-restarts. 0 is torchrun's default, with which a job is not elastic."""
        return _number(self.max_restarts, "--max-restarts", 0) or None if self.max_restarts is not None else None

    @property
    def job(self) -> str | None:
        return None if self.rdzv_id in (None, "none") else self.rdzv_id

    def nodes(self, size: int | None) -> Nodes:
        """Return the part of this host; raise a usage error if the options conflict."""
        if self.standalone and self.nnodes not in (None, "1", "1:1"):
            raise click.UsageError("--standalone is for one host: leave --nnodes out")
        if size is not None and self.nproc is not None:
            raise click.UsageError("-n and --nproc-per-node are the same: give one of them")
        fewest, most = _range(self.nnodes or "1")
        workers = size or _workers(self.nproc)
        rank = None if self.node_rank is None else _number(self.node_rank, "--node-rank", 0)
        if rank is not None and rank >= most:
            raise click.UsageError(f"--node-rank {rank} is out of range: {most} hosts have the numbers 0 to {most - 1}")
        address = self._address()
        if most > 1 and address is None:
            raise click.UsageError("--nnodes needs --address HOST:PORT, an address of host 0 that all hosts can reach")
        return Nodes(fewest, most, workers, rank, address, most > 1 and ":" in (self.nnodes or ""))

    def _address(self) -> Address | None:
        try:
            if self.address is not None:
                return Address.parse(self.address, "--address")
            if self.rdzv_endpoint is not None:
                port = "" if re.search(r":\d+$", self.rdzv_endpoint) else f":{_ENDPOINT_PORT}"
                return Address.parse(self.rdzv_endpoint + port, "--rdzv-endpoint")
            if self.master_addr is not None:
                host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
                return Address.parse(f"{host}:{self.master_port or _MASTER_PORT}", "--master-addr and --master-port")
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
        return None


def _number(text: str, name: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise click.UsageError(f"{name} {text!r} is not a whole number of at least {least}")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    """Return the fewest and the most hosts of "4" or "2:4"."""
    first, colon, last = text.partition(":")
    fewest = _number(first, "--nnodes", 1)
    most = _number(last, "--nnodes", 1) if colon else fewest
    if most < fewest:
        raise click.UsageError(f"--nnodes {text}: the first number is the fewest hosts, the second the most")
    return fewest, most


def _workers(text: str | None) -> int:
    if text in ("auto", "cpu"):
        return len(os.sched_getaffinity(0))
    if text == "gpu":
        raise click.UsageError("--nproc-per-node gpu: gradwire trains on CPUs; give a number, or cpu")
    return 1 if text is None else _number(text, "--nproc-per-node", 1)
