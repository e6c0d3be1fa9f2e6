"""Makes and checks join tokens: they let members join one job, limited in time and uses, without the job's secret.

    gwj1.TICKET.KEY     the ticket is public: the job, the expiry time, the number of uses, and a random number
                        the key is derived from the job's secret and the ticket

A joining member sends the ticket and proves the key. The coordinator holds the secret and derives the same key from
the ticket. So the coordinator does not need to store tokens, and a changed ticket does not fit its key. When the
coordinator admits the member, it sends the key of the links, encrypted with the token's key.
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
MOST_MEMBERS = 1 << 16  # that can join with one token
_PREFIX = "gwj1."
_TICKET = struct.Struct(">QI12s")  # expires (seconds since 1970), uses, random; the job's name follows


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a token allows: `uses` members may join `job` until `expires`. 0 uses: any number of members."""

    job: str
    expires: int
    uses: int
    number: bytes

    def pack(self) -> bytes:
        return _TICKET.pack(self.expires, self.uses, self.number) + self.job.encode()

    @classmethod
    def parse(cls, data: bytes) -> Ticket:
        """Read a ticket from bytes. Raise ValueError if they are not one."""
        if not _TICKET.size < len(data) <= LONGEST_TICKET:
            raise ValueError(f"a ticket has {_TICKET.size + 1} to {LONGEST_TICKET} bytes, not {len(data)}")
        return cls(data[_TICKET.size :].decode(), *_TICKET.unpack_from(data))


@dataclass(frozen=True, slots=True)
class Token:
    """The two parts of a join token: the ticket, which is sent, and the key, which is proved."""

    ticket: bytes
    key: bytes = field(repr=False)

    @property
    def job(self) -> str:
        return Ticket.parse(self.ticket).job


def make(secret: bytes, *, job: str, expires_in: float, uses: int = 1, now: float | None = None) -> str:
    """Return a token with which `uses` members can join within `expires_in` seconds.

    It is printable and safe in an environment variable.
    """
    if not 0 < len(job.encode()) <= LONGEST_JOB:
        raise ConfigError(f"the name of a token's job has 1 to {LONGEST_JOB} bytes, not {job!r}")
    if not 0 < expires_in <= 366 * 86400:
        raise ConfigError(f"a token is valid for more than 0 seconds and at most a year, not for {expires_in:g} s")
    if not 0 <= uses <= MOST_MEMBERS:
        raise ConfigError(f"a token has 1 to {MOST_MEMBERS} uses (or 0: any number), not {uses}")
    expires = int((time.time() if now is None else now) + expires_in)
    ticket = Ticket(job, expires, uses, secrets.token_bytes(12)).pack()
    return f"{_PREFIX}{_text(ticket)}.{_text(key_of(secret, ticket))}"


def is_token(text: str) -> bool:
    """Return whether this text has the form of a join token; otherwise it is the job's secret."""
    return text.startswith(_PREFIX)


def read(text: str) -> Token:
    """Return the parts of a token. Raise `ConfigError` if it is damaged; only the coordinator checks its validity."""
    try:
        ticket, key = (_bytes(part) for part in text.strip().removeprefix(_PREFIX).split("."))
        Ticket.parse(ticket)
        if not is_token(text) or len(key) != 32:
            raise ValueError
    except ValueError as error:
        raise ConfigError("the join token is damaged: copy it again, or get a new one from gradwire invite") from error
    return Token(ticket, key)


def secret_or_token(environ: Mapping[str, str], loopback: bool) -> bytes | Token:
    """Return the credential of this process: the job's secret, or a join token if `GRADWIRE_TOKEN` is one."""
    text = environ.get(TOKEN, "")
    return read(text) if is_token(text) else job_secret(environ, loopback)


def whole_secret(environ: Mapping[str, str], loopback: bool) -> bytes:
    """Return the job's secret, which a coordinator needs. Raise `ConfigError` if there is only a join token."""
    if is_token(environ.get(TOKEN, "")):
        raise ConfigError(f"{TOKEN} is a join token, which only allows joining: a coordinator needs the job's secret")
    return job_secret(environ, loopback)


def key_of(secret: bytes, ticket: bytes) -> bytes:
    """Return the key of a ticket."""
    return derive(secret, "join token", ticket)


def wrapped(key: bytes, over: bytes, *context: bytes) -> bytes:
    """Encrypt a key of 32 bytes with another key, `over`. The same call decrypts it.

    The result is the exclusive or with a pad. A pad must be used once, so the same `context` (nonces of both sides, a
    sequence number) must never be repeated with the same `over`. The result is not authenticated: send it inside an
    authenticated message.
    """
    if len(key) != 32:
        raise ValueError(f"a wrapped key has 32 bytes, not {len(key)}")
    pad = derive(over, "handing over a key", *context)
    return bytes(one ^ other for one, other in zip(key, pad, strict=True))


class TokenGate:
    """Remembers, at the coordinator, which members joined with which ticket. Not thread-safe.

    The holder of a ticket may act only for members that joined with this ticket. It may not act for a member that
    registered with the secret, nor for one that later joined under the same id with another ticket.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._admitted: dict[bytes, set[str]] = {}  # ids by ticket number; each id is one use of the ticket
        self._owners: dict[str, bytes] = {}  # ticket number by id; ids that registered with the secret are not in it
        self._pending: set[str] = set()  # ids that have registered but have not been in a generation yet

    def refusal(self, ticket: bytes, member: str, now: float, known: Callable[[str], bool]) -> str | None:
        """Return why a member that has proved the ticket's key may not register; None if it may.

        `known` returns whether an id is registered now. A member that joined with this ticket may register again after
        the ticket has expired. A member that left before it was in any generation has not used up the ticket.
        """
        try:
            parsed = Ticket.parse(ticket)
        except ValueError as error:
            return f"its join token is damaged: {error}"
        if parsed.job != self._job:
            return f"its join token is for job {parsed.job}, and this is job {self._job}"
        if self._owners.get(member) == parsed.number:
            return None
        if known(member):
            return f"the id {member!r} is registered with other credentials than this join token"
        members = self._admitted.get(parsed.number, set())
        if now >= parsed.expires:
            return f"its join token expired {now - parsed.expires:.0f} s ago"
        most = parsed.uses or MOST_MEMBERS
        if len(members) >= most:
            return f"its join token has no uses left ({len(members)} of {most} used)"
        return None

    def admit(self, ticket: bytes, member: str) -> bool:
        """Record that a member registered with a ticket (empty: with the secret). Return whether that changed it."""
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
        """Record that these members are in a generation. From now on their uses of a ticket count permanently."""
        self._pending.difference_update(members)

    def release(self, member: str) -> bool:
        """Record that a member left. If it was in no generation, its use of a ticket no longer counts.

        Return whether that changed anything.
        """
        if member not in self._pending:
            return False
        self._pending.discard(member)
        self._admitted[self._owners.pop(member)].discard(member)
        return True

    def may_act_for(self, ticket: bytes, member: str) -> bool:
        """Return whether the holder of a ticket (empty: of the secret) may make calls for a member."""
        try:
            return not ticket or self._owners.get(member) == Ticket.parse(ticket).number
        except ValueError:
            return False

    def snapshot(self) -> dict[str, Any]:
        """Return which members joined with which ticket, for the journal."""
        uses = {number.hex(): sorted(members) for number, members in self._admitted.items() if members}
        owners = {member: number.hex() for member, number in self._owners.items()}
        return {"uses": uses, "owners": owners, "pending": sorted(self._pending)}

    def restore(self, snapshot: Mapping[str, Any], registered: Iterable[str] = ()) -> None:
        """Load a snapshot. `registered` are the ids of the current generation."""
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
