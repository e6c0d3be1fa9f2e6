"""The static rendezvous as a state machine: claims and the time come in, answers go out.

    claim(rank, id, size, job)  →  Waiting    registered; others are missing
                                   Refusal    turned away, with the reason
                                   Assembly   all are there

A member holds its place by claiming it again; a place that nobody has claimed for `LAPSE` seconds is free. A place that
is held is never given to anybody else. Once all have come, the assembly is final: its members may ask for it again,
everybody else is refused. No I/O, no clock, no locks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gradwire.errors import ConfigError, InvalidSize
from gradwire.membership.members import Assembly, Member

LARGEST_JOB = 65_536
LONGEST_NAME = 128  # characters of an id, host, hostname, address or job
FIRST_GENERATION = 1
LAPSE = 5.0  # seconds; much longer than the pause between two claims of a waiting member


@dataclass(frozen=True, slots=True)
class Claim:
    """A process asks to be `member` of a job of `size`; `session` tells two processes apart that claim alike, and
    `sequence` grows from one claim of a session to the next."""

    member: Member
    size: int
    job: str | None
    session: bytes
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Registered; these ranks have not come."""

    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Turned away for good."""

    reason: str


Outcome = Waiting | Refusal | Assembly


@dataclass(slots=True)
class _Place:
    claim: Claim
    claimed_at: float
    informed: bool = False


@dataclass
class Rendezvous:
    """Who has come so far. `claim` is the way in; `withdraw`, `unregister` and time are the ways out."""

    size: int
    job: str
    run: bytes
    lapse: float = LAPSE
    _places: dict[str, _Place] = field(default_factory=dict, init=False)  # by id, in the order of arrival
    _assembly: tuple[Member, ...] | None = field(default=None, init=False)
    _stopped: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.size <= LARGEST_JOB:
            raise InvalidSize(f"a job has 1 to {LARGEST_JOB} ranks, not {self.size}")
        if not 0 < len(self.job) <= LONGEST_NAME:
            raise ConfigError(f"a job's name has 1 to {LONGEST_NAME} characters, not {len(self.job)}")
        if len(self.run) != 16:
            raise ConfigError(f"a run is 16 bytes, not {len(self.run)}")

    @property
    def assembled(self) -> bool:
        return self._assembly is not None

    def knows(self, member: Member) -> bool:
        return member.id in self._places

    def claim(self, claim: Claim, now: float) -> Outcome:
        """Claim a place, or claim it again. Whoever is refused has changed nothing."""
        self._let_lapse(now)
        reason = self._objection(claim)
        if reason is not None:
            return Refusal(reason)
        if self._stopped is None:
            place = self._places.setdefault(claim.member.id, _Place(claim, now))
            place.claim, place.claimed_at = claim, now
            if len(self._places) == self.size and self._assembly is None:
                self._assembly = self._seated()
        return self.outcome(claim)

    def outcome(self, claim: Claim) -> Outcome:
        """The present answer to a claim that was not refused; who gets a final one counts as informed."""
        place = self._places.get(claim.member.id)
        if place is not None and place.claim.session == claim.session:
            place.informed = self._assembly is not None or self._stopped is not None
        if self._assembly is not None and place is not None:
            rank = next(rank for rank, member in enumerate(self._assembly) if member.id == claim.member.id)
            return Assembly(self.job, FIRST_GENERATION, rank, self._assembly, self.run)
        if self._stopped is not None:
            return Refusal(self._stopped)
        return Waiting(self._missing())

    def withdraw(self, claim: Claim) -> Member | None:
        """The process behind a claim is gone: frees its place, unless it has claimed again since."""
        place = self._places.get(claim.member.id)
        if self._assembly is not None or place is None:
            return None
        if (place.claim.session, place.claim.sequence) != (claim.session, claim.sequence):
            return None
        return self._places.pop(claim.member.id).claim.member

    def unregister(self, member: Member) -> bool:
        """A member takes its leave; True if there was exactly this one. The assembly, once made, stays as it is."""
        place = self._places.get(member.id)
        if place is None or replace(place.claim.member, rank=None) != replace(member, rank=None):
            return False
        place.informed = True
        if self._assembly is None:
            del self._places[member.id]
        return True

    def stop(self, reason: str) -> None:
        """Nobody gets in any more; those who wait are refused for `reason`."""
        self._stopped = reason

    def uninformed(self, now: float) -> bool:
        """Whether a member that still asks has not been told how it ended."""
        return any(not place.informed and now - place.claimed_at < self.lapse for place in self._places.values())

    def _let_lapse(self, now: float) -> None:
        if self._assembly is None:
            stale = [key for key, place in self._places.items() if now - place.claimed_at >= self.lapse]
            for key in stale:
                del self._places[key]

    def _objection(self, claim: Claim) -> str | None:
        return self._nonsense(claim) or self._disagreement(claim) or self._conflict(claim)

    def _nonsense(self, claim: Claim) -> str | None:
        member = claim.member
        if not member.id:
            return "a worker's id must not be empty"
        for name in ("id", "host", "hostname", "address"):
            if len(getattr(member, name)) > LONGEST_NAME:
                return f"a worker's {name} has at most {LONGEST_NAME} characters, not {len(getattr(member, name))}"
        return None

    def _disagreement(self, claim: Claim) -> str | None:
        member = claim.member
        if claim.job is not None and claim.job != self.job:
            return f"{member} belongs to job {claim.job[:LONGEST_NAME]!r}, and this is job {self.job!r}"
        if claim.size != self.size:
            return f"{member} expects a job of {claim.size} ranks, and this one has {self.size}"
        if member.rank is not None and not 0 <= member.rank < self.size:
            return f"rank {member.rank} is out of range: a job of {self.size} has the ranks 0 to {self.size - 1}"
        return None

    def _conflict(self, claim: Claim) -> str | None:
        member = claim.member
        place = self._places.get(member.id)
        if place is not None:
            if place.claim.session != claim.session:
                return f"the id {member.id!r} is taken by {place.claim.member}"
            if place.claim.member != member:
                return f"{place.claim.member} came back as something else, {member}"
            return None
        if self._assembly is not None:
            holder = None if member.rank is None else self._assembly[member.rank]
            return "all ranks of this job are taken" if holder is None else f"rank {member.rank} is taken by {holder}"
        for place in self._places.values():
            if member.rank is not None and place.claim.member.rank == member.rank:
                return f"rank {member.rank} is taken by {place.claim.member}"
        return None

    def _seats(self) -> dict[int, Member]:
        """Members by rank: those that named one get it, the others the lowest free ones, in the order of arrival."""
        members = [place.claim.member for place in self._places.values()]
        seats = {member.rank: member for member in members if member.rank is not None}
        free = (rank for rank in range(self.size) if rank not in seats)
        lowest = [(next(free), member) for member in members if member.rank is None]
        return seats | {rank: replace(member, rank=rank) for rank, member in lowest}

    def _seated(self) -> tuple[Member, ...]:
        seats = self._seats()
        return tuple(seats[rank] for rank in range(self.size))

    def _missing(self) -> tuple[int, ...]:
        seats = self._seats()
        return tuple(rank for rank in range(self.size) if rank not in seats)
