"""Join tokens: invitations to one job, limited in time and uses, that do not reveal the job's secret.

    gwj1.TICKET.KEY     the ticket is public: the job, when it expires, for how many, and a random number
                        the key is derived from the job's secret and the ticket

Whoever joins sends the ticket and proves the key. The coordinator, which holds the secret, derives the same key from
the ticket: it need not have heard of the token before, and nobody can change what a ticket says. What a member needs
further, the key of the links, it is told when it is admitted, under the token's key.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.errors import ConfigError
from gradwire.security.secret import TOKEN, derive, job_secret

LONGEST_JOB = 200  # bytes
LONGEST_TICKET = 256
MOST_MEMBERS = 1 << 16  # of one token
_PREFIX = "gwj1."
_TICKET = struct.Struct(">QI12s")  # expires (seconds since 1970), uses, random; the job's name follows


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a token allows: `uses` members to join `job` until `expires`; 0 uses are any number."""

    job: str
    expires: int
    uses: int
    number: bytes

    def pack(self) -> bytes:
        return _TICKET.pack(self.expires, self.uses, self.number) + self.job.encode()

    @classmethod
    def parse(cls, data: bytes) -> Ticket:
        """ValueError if this is none."""
        if not _TICKET.size < len(data) <= LONGEST_TICKET:
            raise ValueError(f"a ticket of {len(data)} bytes")
        return cls(data[_TICKET.size :].decode(), *_TICKET.unpack_from(data))


@dataclass(frozen=True, slots=True)
class Token:
    """What its holder needs: the ticket to send, and the key to prove."""

    ticket: bytes
    key: bytes = field(repr=False)

    @property
    def job(self) -> str:
        return Ticket.parse(self.ticket).job


def make(secret: bytes, *, job: str, expires_in: float, uses: int = 1, now: float | None = None) -> str:
    """A token for so many members to join within so many seconds; printable, safe in an environment variable."""
    if not 0 < len(job.encode()) <= LONGEST_JOB:
        raise ConfigError(f"a token is for a job with a name of 1 to {LONGEST_JOB} bytes, not {job!r}")
    if not 0 < expires_in <= 366 * 86400:
        raise ConfigError(f"a token holds for some seconds up to a year, not for {expires_in:g}")
    if not 0 <= uses <= MOST_MEMBERS:
        raise ConfigError(f"a token serves 1 to {MOST_MEMBERS} members (or 0: any number), not {uses}")
    expires = int((time.time() if now is None else now) + expires_in)
    ticket = Ticket(job, expires, uses, secrets.token_bytes(12)).pack()
    return f"{_PREFIX}{_text(ticket)}.{_text(key_of(secret, ticket))}"


def is_token(text: str) -> bool:
    """Whether this is meant as a join token, and not as the job's secret."""
    return text.startswith(_PREFIX)


def read(text: str) -> Token:
    """The parts of a token; `ConfigError` if it is damaged. Whether it still holds, the coordinator knows."""
    try:
        ticket, key = (_bytes(part) for part in text.strip().removeprefix(_PREFIX).split("."))
        Ticket.parse(ticket)
        if not is_token(text) or len(key) != 32:
            raise ValueError
    except ValueError as error:
        raise ConfigError("the join token is damaged: copy it again, or ask for a new one") from error
    return Token(ticket, key)


def secret_or_token(environ: Mapping[str, str], loopback: bool) -> bytes | Token:
    """What this process proves itself by: the job's secret, or a join token in its place."""
    text = environ.get(TOKEN, "")
    return read(text) if is_token(text) else job_secret(environ, loopback)


def whole_secret(environ: Mapping[str, str], loopback: bool) -> bytes:
    """The job's secret itself, for who serves the job; `ConfigError` if there is only a join token."""
    if is_token(environ.get(TOKEN, "")):
        raise ConfigError(f"{TOKEN} is a join token, which is for joining: who serves a job needs its secret itself")
    return job_secret(environ, loopback)


def key_of(secret: bytes, ticket: bytes) -> bytes:
    """The key that belongs to a ticket."""
    return derive(secret, "join token", ticket)


def wrapped(key: bytes, over: bytes, *context: bytes) -> bytes:
    """A key of 32 bytes hidden under another, and the same again to unveil it.

    The context must never come twice under one key (nonces of both sides, a sequence number): the pad is used once. It
    hides and does not authenticate; send it inside something that does.
    """
    if len(key) != 32:
        raise ValueError(f"a key of {len(key)} bytes where 32 are hidden")
    pad = derive(over, "handing over a key", *context)
    return bytes(one ^ other for one, other in zip(key, pad, strict=True))


class TokenGate:
    """The coordinator's side: which members came in by which ticket. Not thread-safe.

    A ticket speaks for the members that it admitted, and for no others: not for one that holds the secret itself, nor
    for one that another ticket admitted under the same id since.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._admitted: dict[bytes, set[str]] = {}  # ids by ticket: the uses that are spent
        self._owners: dict[str, bytes] = {}  # the ticket of each id; an id registered by the secret has none
        self._pending: set[str] = set()  # ids that have registered and were in no generation yet

    def refusal(self, ticket: bytes, member: str, now: float, known: Callable[[str], bool]) -> str | None:
        """Why a member that has proved the ticket's key may not register; None if it may.

        `known` tells whether an id is registered at present. A member may come back with its ticket after that has
        expired. One that waited and went away before it was in any generation has not used the ticket up.
        """
        try:
            said = Ticket.parse(ticket)
        except ValueError as error:
            return f"its join token is not sound: {error}"
        if said.job != self._job:
            return f"its join token is for job {said.job}, and this is job {self._job}"
        if self._owners.get(member) == said.number:
            return None
        if known(member):
            return f"the id {member!r} is registered with other credentials than this join token"
        members = self._admitted.get(said.number, set())
        if now >= said.expires:
            return f"its join token expired {now - said.expires:.0f} s ago"
        if len(members) >= (said.uses or MOST_MEMBERS):
            return f"its join token has been used by {len(members)} already, which is all it was made for"
        return None

    def admit(self, ticket: bytes, member: str) -> bool:
        """A member has registered with a ticket, or with the secret if that is empty; whether that is new."""
        if not ticket:
            self._pending.discard(member)
            return self._owners.pop(member, None) is not None
        number = Ticket.parse(ticket).number
        if self._owners.get(member) == number:
            return False
        self._owners[member] = number
        self._admitted.setdefault(number, set()).add(member)
        self._pending.add(member)
        return True

    def registered(self, members: Iterable[str]) -> None:
        """These are in a generation: from now on their uses of a ticket count for good."""
        self._pending.difference_update(members)

    def release(self, member: str) -> bool:
        """A member went away. If it was in no generation its use of a ticket does not count; whether that is so."""
        if member not in self._pending:
            return False
        self._pending.discard(member)
        self._admitted[self._owners.pop(member)].discard(member)
        return True

    def may_act_for(self, ticket: bytes, member: str) -> bool:
        """Whether the holder of a ticket, or of the secret if that is empty, may speak for a member."""
        try:
            return not ticket or self._owners.get(member) == Ticket.parse(ticket).number
        except ValueError:
            return False

    def snapshot(self) -> dict[str, Any]:
        """Who came with which token, for a journal."""
        uses = {number.hex(): sorted(members) for number, members in self._admitted.items() if members}
        owners = {member: number.hex() for member, number in self._owners.items()}
        return {"uses": uses, "owners": owners, "pending": sorted(self._pending)}

    def restore(self, snapshot: Mapping[str, Any], registered: Iterable[str] = ()) -> None:
        """Go on from a snapshot; `registered` are the members of the present generation."""
        self._admitted = {bytes.fromhex(number): set(members) for number, members in snapshot["uses"].items()}
        self._owners = {member: bytes.fromhex(number) for member, number in snapshot["owners"].items()}
        self._pending = {member for member in snapshot["pending"] if member not in set(registered)}


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
