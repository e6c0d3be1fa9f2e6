"""`Address`: checked text of the form "host:port"."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Self

from gradwire.errors import ConfigError
from gradwire.job.environments.launcher_settings import join
from gradwire.security.credentials import Credentials

# A host of digits and dots only must be a valid IPv4 address. It is never treated as a host name.
_LIKE_IPV4 = re.compile(r"[0-9.]+")
_HOST_NAME = re.compile(r"[^\s/@,;\[\]:]{1,253}")


class Address(str):
    """A host and a port, as the text "host:port". Port 0 lets the system choose a free port, for listeners only."""

    __slots__ = ("_host", "_port")

    _host: str
    _port: int

    def __new__(cls, host: str, port: int) -> Self:
        _check_host(host)
        if not 0 <= port <= 65535:
            raise ConfigError(f"port {port} is not between 0 and 65535")
        self = super().__new__(cls, join(host, port))
        self._host, self._port = host, port
        return self

    @property
    def host(self) -> str:
        """The host: a name or an IP address, without brackets."""
        return self._host

    @property
    def port(self) -> int:
        """The port."""
        return self._port

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]  # for pickling
        return self.host, self.port

    def __repr__(self) -> str:
        return f"Address(host={self.host!r}, port={self.port!r})"

    @classmethod
    def parse(cls, text: str, source: str = "the address") -> Address:
        """Parse "127.0.0.1:29500", "[::1]:29500" or "name:29500". Errors name `source` as the origin of the text.

        >>> Address.parse("[::1]:29500")
        Address(host='::1', port=29500)
        """
        try:
            host, port = _split(text.strip())
            return cls(host, port)
        except ConfigError as error:
            raise ConfigError(f"{source}: {text!r} is not an address: {error}") from None

    def resolve(self) -> tuple[str, ...]:
        """Return the IP addresses of the host, in the resolver's order."""
        try:
            answers = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ConfigError(f"the host of {self} cannot be resolved: {reason}") from error
        return tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in answers))

    def is_loopback(self) -> bool:
        """Return whether all IP addresses of the host are loopback addresses, which other machines cannot reach."""
        return all(_is_loopback(ip) for ip in self.resolve())


def check_encrypted(address: Address, *, insecure: bool, credentials: Credentials | None) -> None:
    """Raise `ConfigError` if links to this address would leave this machine without encryption, and none allowed it."""
    if credentials is None and not insecure and not address.is_loopback():
        raise ConfigError(
            f"{address} is not a loopback address, and links are not encrypted: make certificates with "
            "`gradwire certs` and set GRADWIRE_TLS_CA, GRADWIRE_TLS_CERT and GRADWIRE_TLS_KEY, or pass insecure=True "
            "(GRADWIRE_INSECURE=1, --insecure) if you trust the network"
        )


def _split(text: str) -> tuple[str, int]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not rest.startswith(":"):
            raise ConfigError("an IPv6 address is written [host]:port")
        if not _is_ip(host, 6):
            raise ConfigError(f"{host!r} in brackets is not an IPv6 address")
        port = rest[1:]
    else:
        if "://" in text:
            raise ConfigError("write host:port, without a scheme")
        host, colon, port = text.rpartition(":")
        if not colon:
            raise ConfigError("the port is missing; write host:port")
        if ":" in host:
            raise ConfigError("an IPv6 address needs brackets: [host]:port")
    if not re.fullmatch(r"[0-9]{1,5}", port):
        raise ConfigError(f"the port {port!r} is not a number between 0 and 65535")
    return host, int(port)


def _check_host(host: str) -> None:
    if not host:
        raise ConfigError("the host is missing; write host:port")
    if ":" in host:
        if not _is_ip(host, 6):
            raise ConfigError(f"the host {host!r} is not an IPv6 address")
    elif _LIKE_IPV4.fullmatch(host):
        if not _is_ip(host, 4):
            raise ConfigError(f"the host {host!r} is not an IPv4 address")
    elif not _HOST_NAME.fullmatch(host):
        raise ConfigError(f"the host {host!r} is neither an IP address nor a host name")


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def _is_loopback(text: str) -> bool:
    ip = ipaddress.ip_address(text)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped.is_loopback  # Python 3.11's is_loopback is False for ::ffff:127.0.0.1
    return ip.is_loopback
