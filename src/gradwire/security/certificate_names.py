"""The job and member that a certificate stands for: the URI `gradwire://JOB/MEMBER` among its alternative names.

A certificate is for one job and one member of it. It covers the member of that name and those below it: a host's
certificate, for "host-a", covers its workers "host-a/0", "host-a/1" …
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

SCHEME = "gradwire://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Identity(NamedTuple):
    """A job and a member of it; written as a URI."""

    job: str
    member: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.job}/{self.member}"


def is_name(text: str) -> bool:
    """Whether a job, or one part of a member's name, may be called so.

    >>> is_name("host-a.example"), is_name("a/b"), is_name("")
    (True, False, False)
    """
    return _NAME.fullmatch(text) is not None


def parse(uri: str) -> Identity:
    """The job and the member of a URI; ValueError if it names none.

    >>> parse("gradwire://digits/host-a/0")
    Identity(job='digits', member='host-a/0')
    """
    job, _, member = uri.removeprefix(SCHEME).partition("/")
    if not uri.startswith(SCHEME) or not all(map(is_name, (job, *member.split("/")))):
        raise ValueError(f"{uri!r} is not of the form {SCHEME}JOB/MEMBER")
    return Identity(job, member)


def only(uris: Iterable[str]) -> Identity:
    """The identity among the URIs of a certificate, which must have exactly one; ValueError otherwise."""
    ours = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(ours) != 1:
        found = f"names {len(ours)} of them" if ours else "names none"
        raise ValueError(f"a certificate has one name of the form {SCHEME}JOB/MEMBER, and this one {found}")
    return parse(ours[0])


def covers(identity: str, member_id: str) -> bool:
    """Whether a certificate of this identity may be shown by the member of this id.

    >>> covers("gradwire://digits/host-a", "host-a/0"), covers("gradwire://digits/host-a", "host-ab")
    (True, False)
    """
    member = parse(identity).member
    return member_id == member or member_id.startswith(f"{member}/")
