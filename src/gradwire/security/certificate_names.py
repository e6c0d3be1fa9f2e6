"""Reads and checks the name in a certificate: the URI `gradwire://JOB/MEMBER` among its alternative names.

A certificate is for one job and one member of it. It also covers the members below that one: the certificate of the
host "host-a" covers its workers "host-a/0", "host-a/1" and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

SCHEME = "gradwire://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Identity(NamedTuple):
    """A job and one of its members. `str()` gives the URI."""

    job: str
    member: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.job}/{self.member}"


def is_name(text: str) -> bool:
    """Return whether this is a valid name for a job, or for one part of a member's name.

    >>> is_name("host-a.example"), is_name("a/b"), is_name("")
    (True, False, False)
    """
    return _NAME.fullmatch(text) is not None


def parse(uri: str) -> Identity:
    """Return the job and the member that a URI names. Raise ValueError if it is not such a URI.

    >>> parse("gradwire://digits/host-a/0")
    Identity(job='digits', member='host-a/0')
    """
    job, _, member = uri.removeprefix(SCHEME).partition("/")
    if not uri.startswith(SCHEME) or not all(map(is_name, (job, *member.split("/")))):
        raise ValueError(f"{uri!r} is not of the form {SCHEME}JOB/MEMBER")
    return Identity(job, member)


def single_identity(uris: Iterable[str]) -> Identity:
    """Return the identity among the URIs of a certificate. Raise ValueError unless there is exactly one."""
    names = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(names) != 1:
        raise ValueError(f"a certificate has one name of the form {SCHEME}JOB/MEMBER, and this one has {len(names)}")
    return parse(names[0])


def covers(identity: str, member_id: str) -> bool:
    """Return whether the member with this id may use a certificate of this identity.

    >>> covers("gradwire://digits/host-a", "host-a/0"), covers("gradwire://digits/host-a", "host-ab")
    (True, False)
    """
    member = parse(identity).member
    return member_id == member or member_id.startswith(f"{member}/")
