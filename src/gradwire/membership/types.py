"""Defines the types that the coordinator and its clients share: members, claims, outcomes, news."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gradwire.identity import PROTOCOL

LARGEST_JOB = 65_536  # ranks


@dataclass(frozen=True, slots=True)
class Member:
    """A process in a job, with an id that it keeps for life.

    With `rank` None the member takes any free rank. Two members have the same `host` exactly if they share a machine;
    `hostname` is only for messages. `address` is where the member accepts data links: "ip:port" or "[ip]:port".
    `started` is the start time of the process in the kernel's units, because a pid can be reused; 0 if it is unknown.
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
    """All members of one generation in rank order, as sent to the member at `rank`.

    `job` is the job's name. `run` is the id of this execution of the job (`identity.new_run`): it distinguishes links
    and members of this run from those of an earlier run under the same name, and of other jobs. `link_key` is sent only
    to members that joined with a join token; all others derive it from the job's secret. `previous_run` is set if the
    coordinator began this run as the replacement of another one, and no member has the last state of that one. A member
    that sends no heartbeat for `lease` seconds is removed; with 0, the coordinator expects no heartbeats.
    """

    job: str
    generation: int
    rank: int
    members: tuple[Member, ...]
    run: bytes
    link_key: bytes | None = field(default=None, repr=False)
    previous_run: bytes = b""
    lease: float = 0.0


def format_ranks(ranks: Iterable[int], count: int | None = None, most: int = 16) -> str:
    """Format a list of ranks for a message. `count` is their number if `ranks` has only some of them.

    >>> format_ranks([3]), format_ranks([1, 2, 5]), format_ranks([1, 2], count=9)
    ('rank 3', 'ranks 1, 2, 5', 'ranks 1, 2 and 7 more')
    """
    listed = sorted(ranks)
    count = max(count or 0, len(listed))
    shown = listed[:most]
    text = ("rank " if count == 1 else "ranks ") + ", ".join(map(str, shown))
    return text if count == len(shown) else f"{text} and {count - len(shown)} more"


@dataclass(frozen=True, slots=True)
class Claim:
    """The request of a process to be `member` of the next generation.

    `session` distinguishes two processes that claim the same id, and `sequence` grows with each claim. `generation` is
    the last generation that the process was in (0: none) and `run` the run of that generation. `lost` are the ids of
    members of that generation that the process itself could not reach. `transport` is what it can use for data links:
    "auto", "tcp", "grpc", or "shm" if it requires shared memory. It is empty for a process that brings its own data
    plane.
    """

    member: Member
    size: int | None  # the number of members that it expects at the start; None: any number
    job: str | None
    session: bytes
    sequence: int = 0
    generation: int = 0
    lost: tuple[str, ...] = ()
    lacks_state: bool = False  # it joined `generation`, but left it before it had received the training state
    stood_still: bool = False  # the process was recently stopped for a moment (SIGSTOP, a paused machine)
    run: bytes = b""
    protocol: int = PROTOCOL
    version: str = ""  # of gradwire, only for messages
    transport: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The claim is registered and waits for `reason`. `missing` are the absent ranks of the first generation."""

    missing: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The claim is refused, and asking again does not help.

    `finished`: all work of the job is done. `other_run`: the process is a member of another run.
    """

    reason: str
    finished: bool = False
    other_run: bool = False


Outcome = Waiting | Refusal | Assembly


@dataclass(frozen=True, slots=True)
class News:
    """The coordinator's reply to a heartbeat: the current state of the job.

    If `generation` is newer than the receiver's own, the job has continued without the receiver.
    """

    generation: int
    joiners: int  # how many processes wait and would be admitted to the next generation
    evicted: tuple[str, ...]  # members removed from this generation: their process died, was silent or unreachable
    checkpoint: int | None  # the epoch of the checkpoint that is in progress
    over: bool = False  # members of this generation already wait for the next one
    size: int = field(default=0, compare=False)  # how many of its members have neither left nor been removed
    finished: bool = False  # all work is done: no process can join any more
    run: bytes = field(default=b"", compare=False)  # the run that the coordinator serves
    unknown: tuple[str, ...] = field(default=(), compare=False)  # ids in the heartbeat that are not in this run
    lease: float = field(default=0.0, compare=False)  # seconds without heartbeats after which a member is removed


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """The progress of the checkpoint of `epoch`. It is complete when every live worker has reported."""

    epoch: int
    waiting_for: tuple[str, ...]
    complete: bool


Kind = Literal["came", "went", "formed", "returned", "left", "gone", "silent", "accused", "replaced", "checkpoint"]
Cause = Literal["left", "gone", "silent", "accused", "replaced"]  # why a member is no longer in its generation


@dataclass(frozen=True, slots=True)
class Change:
    """An event in the membership, for the log.

    A `lasting` change must be in the journal before any reply depends on it.
    """

    kind: Kind
    generation: int
    member: str | None
    text: str
    lasting: bool
