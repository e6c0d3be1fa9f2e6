"""Tests of addresses: splitting, joining, resolving, and recognising loopback."""

from __future__ import annotations

import pytest

from gradwire.errors import ConfigError
from gradwire.membership.endpoints import Endpoint, Unresolved, join, resolve, split


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 1), ("::1", 65535), ("a-name.example", 0), ("fe80::1%lo", 2)])
def test_join_and_split_are_inverse(host: str, port: int) -> None:
    assert split(join(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "host", ":80", "host:", "host:port", "::1:80", "[host]:80", "host:65536", "h:-1", "h:²"]
)
def test_split_malformed_address_raises(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write host:port or \[ipv6\]:port"):
        split(text)


@pytest.mark.parametrize(
    ("ip", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%lo", False),
    ],
)
def test_loopback_is_true_only_for_addresses_of_this_machine(ip: str, loopback: bool) -> None:
    assert Endpoint(ip, 1).loopback is loopback


def test_resolve_numeric_address_returns_itself() -> None:
    assert resolve("127.0.0.1", 80) == [Endpoint("127.0.0.1", 80)]
    assert Endpoint("127.0.0.1", 80).sockaddr == ("127.0.0.1", 80)


def test_resolve_unknown_name_raises() -> None:
    with pytest.raises(Unresolved, match=r"'no-such-host\.invalid' cannot be resolved"):
        resolve("no-such-host.invalid", 80)
    with pytest.raises(Unresolved, match="cannot be resolved"):
        resolve("x" * 300, 80)
