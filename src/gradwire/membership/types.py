"""The types that coordinator and clients share: members, claims, outcomes, news."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gradwire.identity import PROTOCOL

LARGEST_JOB = 65_536  # ranks


@dataclass(frozen=True, slots=True)
class Member:
    """A process in a job, with an id for life.

    `rank` None takes any free one. `host` is equal for two members exactly if they share a machine; `hostname` is for
    people to read. `address` is where its data links are accepted, "ip:port" or "[ip]:port". `started` is when the
    process started, as the system counts: a pid alone may be another process's by now. 0 if that is not known.
    """

    id: str
    rank: int | None
    host: str
    hostname: str
    pid: int
    address: str
    started: int = 0

    def __str__(self) -> str:
        name = "a worker" if self.rank is None else f"rank {self.rank}"
        return f"{name} (host {self.hostname}, pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Assembly:
    """All members of one generation in rank order, as told to the one at `rank`.

    `job` is the job's name; `run` is the id of this very start of it (`identity.new_run`), so that links and members of
    an earlier run under the same name, or of another job, are never taken for this one's. `link_key` is sent to members
    that came with a join token; all others derive it from the job's secret. `previous_run` is set if the coordinator
    has begun this run in place of another one, whose last state none of its members holds.
    """

    job: str
    generation: int
    rank: int
    members: tuple[Member, ...]
    run: bytes
    link_key: bytes | None = field(default=None, repr=False)
    previous_run: bytes = b""


def named(ranks: Iterable[int], count: int | None = None, most: int = 16) -> str:
    """Ranks for people to read; `count` is how many there are, if more than are listed.

    >>> named([3]), named([1, 2, 5]), named([1, 2], count=9)
    ('rank 3', 'ranks 1, 2, 5', 'ranks 1, 2 and 7 more')
    """
    listed = sorted(ranks)
    count = max(count or 0, len(listed))
    shown = listed[:most]
    text = ("rank " if count == 1 else "ranks ") + ", ".join(map(str, shown))
    return text if count == len(shown) else f"{text} and {count - len(shown)} more"


@dataclass(frozen=True, slots=True)
class Claim:
    """A process asks to be `member` of the next generation.

    `session` tells two processes apart that claim alike, and `sequence` grows from one claim of a session to the next.
    `generation` is the last one it was in, 0 if none, and `run` the run of that one; `lost` are those of it that it
    could not reach itself. `transport` is what it can use between members: "auto", "tcp", or "shm" if it insists on
    shared memory; empty if it is a member only and brings its own data plane.
    """

    member: Member
    size: int | None  # how many members it expects at the start; None: as many as there are
    job: str | None
    session: bytes
    sequence: int = 0
    generation: int = 0
    lost: tuple[str, ...] = ()
    stranger: bool = False  # it had joined that one, and went before it had the state of the training
    stood_still: bool = False  # it was stopped for a moment lately
    run: bytes = b""
    protocol: int = PROTOCOL
    version: str = ""  # of gradwire, for people to read
    transport: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Registered; `reason` says what for, `missing` which ranks of the first generation have not come."""

    missing: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Turned away for good; `finished` if there is nothing left to do, `other_run` if it is a member of another run."""

    reason: str
    finished: bool = False
    other_run: bool = False


Outcome = Waiting | Refusal | Assembly


@dataclass(frozen=True, slots=True)
class News:
    """What a member at work should know. If `generation` is newer than its own, the job went on without it."""

    generation: int
    joiners: int  # how many wait and would be let in
    evicted: tuple[str, ...]  # members of this generation that were struck off: died, silent or accused
    checkpoint: int | None  # the epoch of the checkpoint that is under way
    over: bool = False  # members of this generation already wait for the next one
    size: int = field(default=0, compare=False)  # how many of its members are not out
    finished: bool = False  # all work is done: nobody joins any more
    run: bytes = field(default=b"", compare=False)  # that the coordinator serves
    unknown: tuple[str, ...] = field(default=(), compare=False)  # of the ids in the heartbeat: no members of this run


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """How far the checkpoint of `epoch` is: complete when every live worker has reported."""

    epoch: int
    waiting_for: tuple[str, ...]
    complete: bool


Kind = Literal["came", "went", "formed", "returned", "left", "gone", "silent", "accused", "replaced", "checkpoint"]
Cause = Literal["left", "gone", "silent", "accused", "replaced"]  # why a member is no longer in its generation


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened, for the log; what is `lasting` must be in the journal before anybody is told of it."""

    kind: Kind
    generation: int
    member: str | None
    text: str
    lasting: bool
