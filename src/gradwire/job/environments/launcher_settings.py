"""The settings found in a launcher's variables, each with the variable it came from."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

# Above the range that Linux hands out to outgoing connections (32768-60999), so a derived port is rarely taken.
FIRST_DERIVED_PORT = 61440
DERIVED_PORTS = 4096


@dataclass(frozen=True, slots=True)
class Found:
    """A value as text and where it was found; it is parsed only if it is needed, so that unused junk harms nobody."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Partial:
    """What one launcher says about this process; None is what it does not say.

    `address` is where rank 0 serves, as "host:port"; `address_derived` says that nobody set it, so that it holds only
    for ranks as this launcher numbers them; `address_taken` says that the launcher itself listens there. `hint` tells
    why there is no address, for the error that follows if nobody else gives one.
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
    """The first of these variables that is set; one that is empty or blank counts as not set."""
    for name in names:
        text = environ.get(name, "").strip()
        if text:
            return Found(text, name)
    return None


def join(host: str, port: str | int) -> str:
    """host:port, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def derived_port(job: str) -> int:
    """A port that all ranks of a job compute alike from its name, where no launcher hands one out."""
    return FIRST_DERIVED_PORT + zlib.crc32(job.encode()) % DERIVED_PORTS
