"""Hold the settings found in a launcher's variables, each with the variable that it came from."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

# Linux uses ports 32768-60999 for outgoing connections. A derived port is above that range, so it is rarely taken.
FIRST_DERIVED_PORT = 61440
DERIVED_PORTS = 4096


@dataclass(frozen=True, slots=True)
class Found:
    """The text of a value, and the variable that it came from. The text is parsed only when it is used."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Partial:
    """The settings that one launcher gives this process. A setting that it does not give is None.

    `address` is the "host:port" where rank 0 serves the rendezvous. `address_derived`: it was computed, not set by the
    launcher, so it is valid only with this launcher's rank and size. `address_taken`: the launcher itself listens
    there. `hint` explains a missing address, for the error that is raised if no other source has one.
    """

    launcher: str
    rank: Found | None = None
    size: Found | None = None
    local_rank: Found | None = None
    address: Found | None = None
    address_derived: bool = False
    address_taken: bool = False
    job: Found | None = None
    hint: str = ""


def find(environ: Mapping[str, str], *names: str) -> Found | None:
    """Return the first of these variables that is set, or None. An empty or blank variable counts as not set."""
    for name in names:
        text = environ.get(name, "").strip()
        if text:
            return Found(text, name)
    return None


def join(host: str, port: str | int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def derived_port(job: str) -> int:
    """Return a port computed from the job's name, so that all ranks get the same one. For launchers that give none."""
    return FIRST_DERIVED_PORT + zlib.crc32(job.encode()) % DERIVED_PORTS
