"""Splits, joins and resolves addresses of the form host:port."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

from gradwire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An IP address and a port. `ip` includes the zone of a link-local address, as in "fe80::1%eth0"."""

    ip: str
    port: int

    def __str__(self) -> str:
        return join(self.ip, self.port)

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.ip else socket.AF_INET

    @property
    def sockaddr(self) -> Any:
        """The argument for `socket.connect` and `socket.bind`. No resolver is asked for it."""
        if self.family == socket.AF_INET:
            return self.ip, self.port
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return socket.getaddrinfo(self.ip, self.port, type=socket.SOCK_STREAM, flags=numeric)[0][4]

    @property
    def loopback(self) -> bool:
        """Whether the address can be reached from this machine only."""
        address = ipaddress.ip_address(self.ip)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            return address.ipv4_mapped.is_loopback
        return address.is_loopback


class Unresolved(ConfigError):
    """A host name cannot be resolved; `temporary` if the resolver reports that this may change."""

    def __init__(self, message: str = "", *, temporary: bool = False, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.temporary = temporary


def join(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address.

    >>> join("::1", 80), join("127.0.0.1", 80)
    ('[::1]:80', '127.0.0.1:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Return the host and port of "host:port" or "[ip]:port". Raise `ConfigError` for anything else.

    >>> split("[::1]:80"), split("name:80")
    (('::1', 80), ('name', 80))
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    well_formed = colon and host and bracketed == (":" in host) and port.isascii() and port.isdigit()
    if not well_formed or not 0 <= int(port) <= 65535:
        raise ConfigError(f"{address!r} is not an address: write host:port or [ipv6]:port")
    return host, int(port)


def resolve(host: str, port: int) -> list[Endpoint]:
    """Return all addresses of a host in the resolver's order. Raise `Unresolved` if there is none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        temporary = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
        raise Unresolved(f"the host name {host!r} cannot be resolved: {why}", temporary=temporary) from error
    endpoints = [Endpoint(_with_zone(sockaddr), port) for *_, sockaddr in found]
    return list(dict.fromkeys(endpoints))


def _with_zone(sockaddr: tuple[object, ...]) -> str:
    ip = str(sockaddr[0])
    zone = sockaddr[3] if len(sockaddr) == 4 else 0
    return f"{ip}%{zone}" if zone and "%" not in ip else ip
