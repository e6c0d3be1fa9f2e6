"""Admission rules: what a job and a claim must be like, and which claims conflict with other members."""

from __future__ import annotations

import ipaddress
from dataclasses import KW_ONLY, dataclass

from gradwire.errors import ConfigError, InvalidSize
from gradwire.identity import PROTOCOL, RUN_BYTES, replaces
from gradwire.membership.coordinator.roster import Roster
from gradwire.membership.endpoints import split
from gradwire.membership.types import LARGEST_JOB, Claim, Member

LONGEST_NAME = 128  # characters of an id, host, hostname, address or job
TRANSPORTS = ("", "auto", "shm", "tcp")  # of a claim


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
    previous_run: bytes = b""  # in place of which the present generation has begun `run`, if it has

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
        if len(self.run) != RUN_BYTES:
            raise ConfigError(f"a run id is {RUN_BYTES} bytes, not {len(self.run)}")

    @property
    def elastic(self) -> bool:
        return self.minimum is not None or self.maximum is not None

    @property
    def smallest(self) -> int:
        return self.start if self.minimum is None else self.minimum

    @property
    def largest(self) -> int:
        return self.start if self.maximum is None else self.maximum


def is_current_member(claim: Claim, terms: Terms, roster: Roster) -> bool:
    """Whether a member of the present generation asks for this very one (again). Static jobs keep them for life."""
    record = roster.records.get(claim.member.id)
    if record is None or record.session != claim.session or claim.generation >= roster.generation:
        return False
    return not terms.elastic or claim.member.id not in roster.out


def survives(claim: Claim, roster: Roster) -> bool:
    """Whether a member of the present generation asks for the next one."""
    record = roster.records.get(claim.member.id)
    if record is None or claim.generation != roster.generation or not same_process(record.member, claim.member):
        return False
    return roster.returnable(claim.member.id)


def same_process(one: Member, other: Member) -> bool:
    """Whether this is one process; its address and the rank that it asks for may have changed."""
    return (one.id, one.host, one.pid, one.started) == (other.id, other.host, other.pid, other.started)


def objection(claim: Claim, terms: Terms, roster: Roster) -> str | None:
    """Why a claim is refused, if it is."""
    return (
        _nonsense(claim)
        or _other_version(claim)
        or _bad_address(claim)
        or _disagreement(claim, terms)
        or _fence(claim, terms, roster)
        or _conflict(claim, terms, roster)
        or _unfit(claim, terms, roster)
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
    if len(claim.run) not in (0, RUN_BYTES):
        return f"a run id has {RUN_BYTES} bytes, not {len(claim.run)}"
    if claim.transport not in TRANSPORTS:
        return f"no transport is called {claim.transport[:LONGEST_NAME]!r}"
    return None


def _other_version(claim: Claim) -> str | None:
    """Members of different set-up protocols would break each generation that they are in together."""
    if claim.protocol == PROTOCOL:
        return None
    age = "an older" if claim.protocol < PROTOCOL else "a newer"
    version = f" ({claim.version[:LONGEST_NAME]})" if claim.version else ""
    return (
        f"{claim.member} runs {age} gradwire{version}: its set-up protocol is version {claim.protocol}, and this "
        f"coordinator's is {PROTOCOL}. Install the same gradwire on all machines of the job"
    )


def _bad_address(claim: Claim) -> str | None:
    """A member with gradwire's data plane must say where its links are accepted."""
    if not claim.transport:
        return None
    address = claim.member.address
    try:
        host, port = split(address)
        ipaddress.ip_address(host.partition("%")[0])
        sound = port > 0
    except ValueError:  # a ConfigError is one
        sound = False
    return None if sound else f"{claim.member} has no usable data address: {address!r} is not ip:port or [ip]:port"


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


def is_of_another_run(claim: Claim, terms: Terms, roster: Roster) -> bool:
    """Whether a claimant was in a generation, and of another run. One that is in a generation of a new run, and has not
    received that answer yet, still names the run before."""
    asks_again = is_current_member(claim, terms, roster) and replaces(terms.run, claim.run)
    return claim.generation > 0 and claim.run != terms.run and not asks_again


def _fence(claim: Claim, terms: Terms, roster: Roster) -> str | None:
    if is_of_another_run(claim, terms, roster):
        return (
            f"{claim.member} is a member of run {claim.run.hex()}, and this coordinator serves run {terms.run.hex()}: "
            "it was started anew without its journal, the job went on without this member, or it is another job's. "
            "Start this worker anew to join this run"
        )
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
    record, place = roster.records.get(member.id), roster.place(member.id)
    if record is not None and terms.elastic and member.id in roster.out:
        record = None
    if is_current_member(claim, terms, roster) and record is not None:
        return None if record.claimed() == member else f"{record.member} came back as something else, {member}"
    if record is not None and record.session != claim.session:
        reason = _another(claim, record.member, record.came_from, terms)
        if reason is not None:
            return reason
    if place is not None and place.claim.session != claim.session:
        return _another(claim, place.claim.member, place.claim.generation, terms)
    if place is not None:
        known = place.claim.member
        return None if known == member else f"{known} came back as something else, {member}"
    if record is not None:
        return None
    return _no_room(member, terms, roster)


def _another(claim: Claim, known: Member, came_from: int, terms: Terms) -> str | None:
    """Why a claim is refused whose id is held by another session; a process that gave up may come again."""
    if not (terms.elastic and same_process(known, claim.member)):
        return f"the id {claim.member.id!r} is taken by {known}"
    if claim.generation < came_from:
        return "the same worker has asked for a later generation since"
    return None


def _unfit(claim: Claim, terms: Terms, roster: Roster) -> str | None:
    """Why a newcomer could not work with those who are here. Members that come back were fit when they came; that a
    claim says so is no proof."""
    known = claim.member.id in roster.records or claim.member.id in roster.outside
    if (claim.generation and known) or is_current_member(claim, terms, roster):
        return None
    exchanging = roster.exchanging
    if exchanging and not claim.transport:
        return (
            f"{claim.member} has no data address, and the members of this job exchange data: join it with gw.init() or "
            "gradwire join. A WorkerNode is for jobs whose members bring their own data plane"
        )
    if not roster.generation:
        return None  # those who came without are `ousted`; and whether memory can be shared, all will find out
    if exchanging is False and claim.transport:
        return f"{claim.member} exchanges data, and the members of this job bring their own data plane"
    return _cannot_share(claim, roster)


def ousted(claim: Claim, roster: Roster) -> list[str]:
    """Those who wait for the first generation and have no data address, where one comes that has."""
    if not claim.transport or roster.generation or roster.exchanging is not False:
        return []
    return list(roster.line)


def _cannot_share(claim: Claim, roster: Roster) -> str | None:
    """Shared memory that somebody insists on needs all members on one host, and the native core in each."""
    newcomer, insisting = claim.member, _insisting(roster)
    if claim.transport == "shm":
        records = (record for name, record in roster.records.items() if roster.returnable(name))  # silent ones too
        other = next((s.member for s in records if s.transport == "tcp" or s.member.host != newcomer.host), None)
        insisting = newcomer
    elif insisting is not None and (claim.transport == "tcp" or insisting.host != newcomer.host):
        other = newcomer
    else:
        return None
    if other is None:
        return None
    return (
        f"{insisting} insists on transport 'shm', and {other} cannot share memory with it: that takes one host and the "
        "native core. Use transport 'auto'"
    )


def _insisting(roster: Roster) -> Member | None:
    """A member that insists on shared memory, and lives or may come back."""
    if not roster.insists:
        return None
    records = ((name, record) for name, record in roster.records.items() if record.transport == "shm")
    return next((record.member for name, record in records if roster.returnable(name)), None)


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
