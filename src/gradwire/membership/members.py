"""A member of a job, and the assembly of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


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
