"""Who may come in: what a job and a claim must be like, and where a claim is in somebody's way."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from gradwire.errors import ConfigError, InvalidSize
from gradwire.membership.answers import Claim
from gradwire.membership.members import Member
from gradwire.membership.roster import Roster

LARGEST_JOB = 65_536
LONGEST_NAME = 128  # characters of an id, host, hostname, address or job


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job is. Without a minimum and a maximum it is static: one generation of `start` members."""

    job: str
    run: bytes
    _: KW_ONLY
    start: int
    minimum: int | None = None
    maximum: int | None = None
    lease: float = 10.0  # seconds
    settle: float = 0.1  # seconds

    def __post_init__(self) -> None:
        for size in (self.start, self.smallest, self.largest):
            if not 1 <= size <= LARGEST_JOB:
                raise InvalidSize(f"a job has 1 to {LARGEST_JOB} ranks, not {size}")
        if not self.smallest <= self.start <= self.largest:
            raise InvalidSize(
                f"a job of at least {self.smallest} and at most {self.largest} ranks cannot start with {self.start}"
            )
        if not 0 < len(self.job) <= LONGEST_NAME:
            raise ConfigError(f"a job's name has 1 to {LONGEST_NAME} characters, not {len(self.job)}")
        if len(self.run) != 16:
            raise ConfigError(f"a run is 16 bytes, not {len(self.run)}")

    @property
    def elastic(self) -> bool:
        return self.minimum is not None or self.maximum is not None

    @property
    def smallest(self) -> int:
        return self.start if self.minimum is None else self.minimum

    @property
    def largest(self) -> int:
        return self.start if self.maximum is None else self.maximum


def holds_seat(claim: Claim, terms: Terms, roster: Roster) -> bool:
    """Whether a member of the present generation asks for this very one (again). In a static job seats are for life."""
    seat = roster.seats.get(claim.member.id)
    if seat is None or seat.session != claim.session or claim.generation >= roster.generation:
        return False
    return not terms.elastic or claim.member.id not in roster.out


def survives(claim: Claim, roster: Roster) -> bool:
    """Whether a member of the present generation asks for the next one."""
    seat = roster.seats.get(claim.member.id)
    if seat is None or claim.generation != roster.generation or not same_process(seat.member, claim.member):
        return False
    return roster.returnable(claim.member.id)


def same_process(one: Member, other: Member) -> bool:
    """Whether this is one process; its address and the rank that it asks for may have changed."""
    return (one.id, one.host, one.pid) == (other.id, other.host, other.pid)


def objection(claim: Claim, terms: Terms, roster: Roster) -> str | None:
    """Why a claim is refused, if it is."""
    return (
        _nonsense(claim)
        or _disagreement(claim, terms)
        or _fence(claim, terms, roster)
        or _conflict(claim, terms, roster)
    )


def _nonsense(claim: Claim) -> str | None:
    member = claim.member
    if not member.id:
        return "a worker's id must not be empty"
    for name in ("id", "host", "hostname", "address"):
        if len(getattr(member, name)) > LONGEST_NAME:
            return f"a worker's {name} has at most {LONGEST_NAME} characters, not {len(getattr(member, name))}"
    if claim.generation < 0:
        return f"a generation is not negative, as {claim.generation} is"
    return None


def _disagreement(claim: Claim, terms: Terms) -> str | None:
    member = claim.member
    if claim.job is not None and claim.job != terms.job:
        return f"{member} belongs to job {claim.job[:LONGEST_NAME]!r}, and this is job {terms.job!r}"
    if claim.generation:
        return None  # it knows what it was in; how the job started matters no more
    if claim.size is not None and claim.size != terms.start:
        return f"{member} expects a job of {claim.size} ranks, and this one has {terms.start}"
    if member.rank is not None and not 0 <= member.rank < terms.start:
        return f"rank {member.rank} is out of range: a job of {terms.start} has the ranks 0 to {terms.start - 1}"
    return None


def _fence(claim: Claim, terms: Terms, roster: Roster) -> str | None:
    if claim.generation > roster.generation:
        return (
            f"{claim.member} was in generation {claim.generation}, and this coordinator only knows of "
            f"{roster.generation}: is it another job's, or was it started anew without its journal?"
        )
    if claim.generation and not terms.elastic:
        return "this job is static, and has one generation: start it with a minimum size to go on after a loss"
    return None


def _conflict(claim: Claim, terms: Terms, roster: Roster) -> str | None:
    member = claim.member
    seat, place = roster.seats.get(member.id), roster.place(member.id)
    if seat is not None and terms.elastic and member.id in roster.out:
        seat = None
    if holds_seat(claim, terms, roster) and seat is not None:
        return None if seat.claimed() == member else f"{seat.member} came back as something else, {member}"
    if seat is not None and seat.session != claim.session:
        reason = _another(claim, seat.member, seat.came_from, terms)
        if reason is not None:
            return reason
    if place is not None and place.claim.session != claim.session:
        return _another(claim, place.claim.member, place.claim.generation, terms)
    if place is not None:
        known = place.claim.member
        return None if known == member else f"{known} came back as something else, {member}"
    if seat is not None:
        return None
    return _no_room(member, terms, roster)


def _another(claim: Claim, known: Member, came_from: int, terms: Terms) -> str | None:
    """Why a claim is refused whose id is held by another session; a process that gave up may come again."""
    if not (terms.elastic and same_process(known, claim.member)):
        return f"the id {claim.member.id!r} is taken by {known}"
    if claim.generation < came_from:
        return "the same worker has asked for a later generation since"
    return None


def _no_room(member: Member, terms: Terms, roster: Roster) -> str | None:
    if len(roster.line) >= LARGEST_JOB:
        return f"{len(roster.line)} workers already wait"
    if roster.generation and terms.elastic:
        return None  # the rank was a wish for the first generation only
    if roster.generation:
        holder = None if member.rank is None else roster.members[member.rank]
        return "all ranks of this job are taken" if holder is None else f"rank {member.rank} is taken by {holder}"
    if member.rank is None or member.rank not in roster.wishes():
        return None
    holders = [place.claim.member for place in roster.line.values() if place.claim.member.rank == member.rank]
    return f"rank {member.rank} is taken by {holders[0]}"
