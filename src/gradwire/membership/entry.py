"""What a job and a claim must be like, and how a member is written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradwire.errors import ConfigError, InvalidSize
from gradwire.membership.answers import Claim
from gradwire.membership.members import Member

LARGEST_JOB = 65_536
LONGEST_NAME = 128  # characters of an id, host, hostname, address or job


def check_job(job: str, run: bytes, start: int, minimum: int, maximum: int) -> None:
    """Raise if there can be no such job."""
    for size in (start, minimum, maximum):
        if not 1 <= size <= LARGEST_JOB:
            raise InvalidSize(f"a job has 1 to {LARGEST_JOB} ranks, not {size}")
    if not minimum <= start <= maximum:
        raise InvalidSize(f"a job that starts with {start} cannot have at least {minimum} and at most {maximum} ranks")
    if not 0 < len(job) <= LONGEST_NAME:
        raise ConfigError(f"a job's name has 1 to {LONGEST_NAME} characters, not {len(job)}")
    if len(run) != 16:
        raise ConfigError(f"a run is 16 bytes, not {len(run)}")


def nonsense(claim: Claim) -> str | None:
    """Why this can be no member of any job, if it cannot."""
    member = claim.member
    if not member.id:
        return "a worker's id must not be empty"
    for name in ("id", "host", "hostname", "address"):
        if len(getattr(member, name)) > LONGEST_NAME:
            return f"a worker's {name} has at most {LONGEST_NAME} characters, not {len(getattr(member, name))}"
    if claim.generation < 0:
        return f"a generation is not negative, as {claim.generation} is"
    return None


def disagreement(claim: Claim, job: str, start: int) -> str | None:
    """Where a newcomer's picture of the job differs from ours, if it does."""
    member = claim.member
    if claim.job is not None and claim.job != job:
        return f"{member} belongs to job {claim.job[:LONGEST_NAME]!r}, and this is job {job!r}"
    if claim.generation:
        return None
    if claim.size is not None and claim.size != start:
        return f"{member} expects a job of {claim.size} ranks, and this one has {start}"
    if member.rank is not None and not 0 <= member.rank < start:
        return f"rank {member.rank} is out of range: a job of {start} has the ranks 0 to {start - 1}"
    return None


def same_process(one: Member, other: Member) -> bool:
    """Whether this is one process; its address and the rank that it asks for may have changed."""
    return (one.id, one.host, one.pid) == (other.id, other.host, other.pid)


def to_json(member: Member, wish: int | None, session: bytes) -> dict[str, Any]:
    return {
        "id": member.id,
        "rank": member.rank,
        "wish": wish,
        "host": member.host,
        "hostname": member.hostname,
        "pid": member.pid,
        "address": member.address,
        "session": session.hex(),
    }


def from_json(fields: Mapping[str, Any]) -> tuple[Member, Member, bytes]:
    """The member, the same as it described itself when it came, and its session."""
    names = ("id", "rank", "host", "hostname", "pid", "address")
    member = Member(**{name: fields[name] for name in names})
    return member, replace(member, rank=fields["wish"]), bytes.fromhex(fields["session"])
