"""What is special about a simulated worker: a join token, a defect, or membership in another run."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from gradwire.security.tokens import Ticket
from gradwire.training.commit_rules import NONE

JOB = "simulated"
TOKEN_SECONDS = 3600  # for which a simulated join token holds

Unfit = Literal[
    "no data plane", "no address", "bad address", "old protocol", "memory of another host", "unfit in set-up"
]
"""What is wrong with a newcomer. All but the last can be seen from its claim."""

UNFIT: tuple[Unfit, ...] = get_args(Unfit)


@dataclass(frozen=True, slots=True)
class Profile:
    """What is special about a worker."""

    ticket: bytes = b""  # of the join token that it came with
    unfit: Unfit | None = None
    run: bytes = b""  # another run, of which it was a member
    generation: int = 0  # of that run
    completed: int = NONE  # in that run

    @property
    def refusable(self) -> bool:
        """Whether a coordinator should refuse it at once."""
        return bool(self.run) or self.unfit not in (None, "unfit in set-up")


def ticket(random: Random, uses: int, now: float) -> bytes:
    """The ticket of a new join token for so many members."""
    return Ticket(JOB, int(now) + TOKEN_SECONDS, uses, random.randbytes(12)).pack()
