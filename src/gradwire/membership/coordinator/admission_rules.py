"""Decides which claims are refused: invalid ones, and those that conflict with the job or with other members. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import KW_ONLY, dataclass

from gradwire.errors import ConfigError, InvalidSize
from gradwire.identity import PROTOCOL, RUN_BYTES, replaces
from gradwire.membership.coordinator.roster import Roster
from gradwire.membership.endpoints import split
from gradwire.membership.types import LARGEST_JOB, Claim, Member

DEFAULT_LEASE = 10.0  # seconds
LONGEST_NAME = 128  # characters of an id, host, hostname, address or job
TRANSPORTS = ("", "auto", "shm", "tcp", "grpc")  # of a claim


@dataclass(frozen=True, slots=True)
class Terms:
    """The description of a job. Without a minimum and a maximum it is static: one generation of `start` members."""

    job: str
    run: bytes
    _: KW_ONLY
    start: int
    minimum: int | None = None
    maximum: int | None = None
    lease: float = DEFAULT_LEASE  # seconds without a heartbeat after which a member is removed
    # The coordinator serves as long as the job runs, so the members of a static job renew leases and leave, too.
    lasting: bool = False
    settle: float = 0.1  # seconds without a change before a generation forms without members that could still register
    previous_run: bytes = b""  # the run that `run` replaced when the current generation formed, if it did

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
    def all_renew(self) -> bool:
        """Whether every member renews a lease. Otherwise only members without gradwire's data plane do."""
        return self.elastic or self.lasting

    @property
    def smallest(self) -> int:
        return self.start if self.minimum is None else self.minimum

    @property
    def largest(self) -> int:
        return self.start if self.maximum is None else self.maximum


def is_current_member(claim: Claim, terms: Terms, roster: Roster) -> bool:
    """Return whether a member of the current generation asks for this same generation (again).

    In a static job a member keeps this right even after it has been removed.
    """
    record = roster.records.get(claim.member.id)
    if record is None or record.session != claim.session or claim.generation >= roster.generation:
        return False
    return not terms.elastic or claim.member.id not in roster.removed


def is_survivor(claim: Claim, roster: Roster) -> bool:
    """Return whether a member of the current generation asks for the next one."""
    record = roster.records.get(claim.member.id)
    if record is None or claim.generation != roster.generation or not same_process(record.member, claim.member):
        return False
    return roster.returnable(claim.member.id)


def same_process(one: Member, other: Member) -> bool:
    """Return whether both describe the same process. Its address and the rank that it asks for may differ."""
    return (one.id, one.host, one.pid, one.started) == (other.id, other.host, other.pid, other.started)


def objection(claim: Claim, terms: Terms, roster: Roster) -> str | None:
    """Return why a claim is refused; None if it is not."""
    return (
        _invalid(claim)
        or _other_version(claim)
        or _bad_address(claim)
        or _disagreement(claim, terms)
        or _fence(claim, terms, roster)
        or _conflict(claim, terms, roster)
        or _unfit(claim, terms, roster)
    )


def _invalid(claim: Claim) -> str | None:
    member = claim.member
    if not member.id:
        return "a worker's id must not be empty"
    for name in ("id", "host", "hostname", "address"):
        if len(getattr(member, name)) > LONGEST_NAME:
            return f"a worker's {name} has at most {LONGEST_NAME} characters, not {len(getattr(member, name))}"
    if claim.generation < 0:
        return f"a generation must not be negative, and this one is {claim.generation}"
    if len(claim.run) not in (0, RUN_BYTES):
        return f"a run id has {RUN_BYTES} bytes, not {len(claim.run)}"
    if claim.transport not in TRANSPORTS:
        return f"there is no transport {claim.transport[:LONGEST_NAME]!r}"
    return None


def _other_version(claim: Claim) -> str | None:
    """Refuse members with another set-up protocol, because they would break every generation that they join."""
    if claim.protocol == PROTOCOL:
        return None
    age = "an older" if claim.protocol < PROTOCOL else "a newer"
    version = f" ({claim.version[:LONGEST_NAME]})" if claim.version else ""
    return (
        f"{claim.member} runs {age} gradwire{version}: its set-up protocol is version {claim.protocol}, and this "
        f"coordinator's is {PROTOCOL}. Install the same gradwire on all machines of the job"
    )


def _bad_address(claim: Claim) -> str | None:
    """Refuse members that use gradwire's data plane but have no valid address for links."""
    if not claim.transport:
        return None
    address = claim.member.address
    try:
        host, port = split(address)
        ipaddress.ip_address(host.partition("%")[0])
        valid = port > 0
    except ValueError:  # includes ConfigError
        valid = False
    return None if valid else f"{claim.member} has no usable data address: {address!r} is not ip:port or [ip]:port"


def _disagreement(claim: Claim, terms: Terms) -> str | None:
    member = claim.member
    if claim.job is not None and claim.job != terms.job:
        return f"{member} belongs to job {claim.job[:LONGEST_NAME]!r}, and this is job {terms.job!r}"
    if claim.generation:
        return None  # the size at the start of the job does not matter to a member that was in a generation
    if claim.size is not None and claim.size != terms.start:
        return f"{member} expects a job of {claim.size} ranks, and this one has {terms.start}"
    if member.rank is not None and not 0 <= member.rank < terms.start:
        return f"rank {member.rank} is out of range: a job of size {terms.start} has ranks 0 to {terms.start - 1}"
    return None


def is_of_another_run(claim: Claim, terms: Terms, roster: Roster) -> bool:
    """Return whether a claimant was in a generation of another run.

    A member of the first generation of a replacement run still names the previous run until it has received its answer.
    """
    asks_again = is_current_member(claim, terms, roster) and replaces(terms.run, claim.run)
    return claim.generation > 0 and claim.run != terms.run and not asks_again


def _fence(claim: Claim, terms: Terms, roster: Roster) -> str | None:
    if is_of_another_run(claim, terms, roster):
        return (
            f"{claim.member} is a member of run {claim.run.hex()}, and this coordinator serves run {terms.run.hex()}: "
            "the coordinator was restarted without its journal, the job continued without this member, or this is "
            "another job. Restart this worker to join this run"
        )
    if claim.generation > roster.generation:
        return (
            f"{claim.member} was in generation {claim.generation}, and this coordinator only knows generation "
            f"{roster.generation}: it serves another job, or was restarted without its journal"
        )
    if claim.generation and not terms.elastic:
        return "this job is static and has one generation: start it with a minimum size to continue after a loss"
    return None


def _conflict(claim: Claim, terms: Terms, roster: Roster) -> str | None:
    member = claim.member
    record, place = roster.records.get(member.id), roster.place(member.id)
    if record is not None and terms.elastic and member.id in roster.removed:
        record = None
    if is_current_member(claim, terms, roster) and record is not None:
        return None if record.claimed() == member else f"{record.member} now describes itself as {member}"
    if record is not None and record.session != claim.session:
        reason = _held_by_another(claim, record.member, record.came_from, terms)
        if reason is not None:
            return reason
    if place is not None and place.claim.session != claim.session:
        return _held_by_another(claim, place.claim.member, place.claim.generation, terms)
    if place is not None:
        known = place.claim.member
        return None if known == member else f"{known} now describes itself as {member}"
    if record is not None:
        return None
    return _no_place(member, terms, roster)


def _held_by_another(claim: Claim, known: Member, came_from: int, terms: Terms) -> str | None:
    """Return why a claim is refused whose id belongs to another session. The same process may claim again."""
    if not (terms.elastic and same_process(known, claim.member)):
        return f"the id {claim.member.id!r} is taken by {known}"
    if claim.generation < came_from:
        return "the same worker has already asked for a later generation"
    return None


def _unfit(claim: Claim, terms: Terms, roster: Roster) -> str | None:
    """Return why a newcomer could not work with the current members.

    Returning members are not checked again. They must have a known id: the generation in a claim is no proof.
    """
    known = claim.member.id in roster.records or claim.member.id in roster.dropped
    if (claim.generation and known) or is_current_member(claim, terms, roster):
        return None
    uses_data_plane = roster.uses_data_plane
    if uses_data_plane and not claim.transport:
        return (
            f"{claim.member} has no data address, and the members of this job exchange data through gradwire: join it "
            "with gw.init() or gradwire join. A WorkerNode is for jobs of worker nodes only"
        )
    if (reason := _other_links(claim, roster)) is not None:
        return reason
    if not roster.generation:
        return None  # queued processes without a data plane are `displaced`; shared memory is checked at set-up
    if uses_data_plane is False and claim.transport:
        return f"{claim.member} uses gradwire's data plane, and the members of this job bring their own"
    return _cannot_share(claim, roster)


def displaced(claim: Claim, roster: Roster) -> list[str]:
    """Return the processes without a data address that wait for a first generation, if a claim with one arrives."""
    if not claim.transport or roster.generation or roster.uses_data_plane is not False:
        return []
    return list(roster.queue)


def _other_links(claim: Claim, roster: Roster) -> str | None:
    """Refuse a claim for gRPC links if the others use TCP, and the other way round: such ranks cannot connect."""
    members = [(record.member, record.transport) for name, record in roster.records.items() if roster.returnable(name)]
    waiting = [(place.claim.member, place.claim.transport) for place in roster.queue.values()]
    for member, transport in members or waiting:
        if transport and claim.transport and member.id != claim.member.id and "grpc" in (transport, claim.transport):
            if transport == claim.transport:
                return None
            return (
                f"{claim.member} uses transport {claim.transport!r}, and {member} uses {transport!r}: either all "
                "members of a job use 'grpc' or none does. Set the same transport everywhere (GRADWIRE_TRANSPORT)"
            )
    return None


def _cannot_share(claim: Claim, roster: Roster) -> str | None:
    """Refuse a claim if a member requires shared memory and another one cannot use it.

    Shared memory needs all members on one host, and the native core in each.
    """
    newcomer, requiring = claim.member, _member_requiring_shm(roster)
    if claim.transport == "shm":
        records = (record for name, record in roster.records.items() if roster.returnable(name))  # also silent ones
        other = next((r.member for r in records if r.transport == "tcp" or r.member.host != newcomer.host), None)
        requiring = newcomer
    elif requiring is not None and (claim.transport == "tcp" or requiring.host != newcomer.host):
        other = newcomer
    else:
        return None
    if other is None:
        return None
    return (
        f"{requiring} requires transport 'shm', and {other} cannot share memory with it: that needs one host and the "
        "native core. Use transport 'auto'"
    )


def _member_requiring_shm(roster: Roster) -> Member | None:
    """Return a member that requires shared memory, and is live or may return."""
    if not roster.requires_shm:
        return None
    records = ((name, record) for name, record in roster.records.items() if record.transport == "shm")
    return next((record.member for name, record in records if roster.returnable(name)), None)


def _no_place(member: Member, terms: Terms, roster: Roster) -> str | None:
    if len(roster.queue) >= LARGEST_JOB:
        return f"{len(roster.queue)} workers already wait"
    if roster.generation and terms.elastic:
        return None  # the wanted rank only matters for the first generation
    if roster.generation and not roster.size():
        return "this job is static, and all its members have left or were lost: start a new coordinator for another run"
    if roster.generation:
        holder = None if member.rank is None else roster.members[member.rank]
        return "all ranks of this job are taken" if holder is None else f"rank {member.rank} is taken by {holder}"
    if member.rank is None or member.rank not in roster.wanted_ranks():
        return None
    holders = [place.claim.member for place in roster.queue.values() if place.claim.member.rank == member.rank]
    return f"rank {member.rank} is taken by {holders[0]}"
