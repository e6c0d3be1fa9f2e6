"""Describe the special properties of a simulated worker: a join token, a defect, or membership in another run."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from gradwire.security.tokens import Ticket
from gradwire.training.commit_rules import NONE

JOB = "simulated"
TOKEN_SECONDS = 3600  # lifetime of a simulated join token

Unfit = Literal[
    "no data plane", "no address", "bad address", "old protocol", "memory of another host", "unfit in set-up"
]
"""The defect of a new worker. The coordinator can see all but the last in the worker's claim."""

UNFIT: tuple[Unfit, ...] = get_args(Unfit)


@dataclass(frozen=True, slots=True)
class Profile:
    """The special properties of a worker."""

    ticket: bytes = b""  # the ticket of its join token
    unfit: Unfit | None = None
    run: bytes = b""  # the other run that it was a member of
    generation: int = 0  # its last generation in that run
    completed: int = NONE  # its last completed step in that run

    @property
    def refusable(self) -> bool:
        """Return whether the coordinator should refuse it at once."""
        return bool(self.run) or self.unfit not in (None, "unfit in set-up")


def ticket(random: Random, uses: int, now: float) -> bytes:
    """Return the ticket of a new join token for `uses` members."""
    return Ticket(JOB, int(now) + TOKEN_SECONDS, uses, random.randbytes(12)).pack()
