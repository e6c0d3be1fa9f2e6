"""`MessageEndpoint`: this rank as the end of a group's point-to-point messages, with the checks that all calls need."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.errors import Closed, GradwireError, InvalidRank, PeerLost
from gradwire.generation.failure_path import ANSWER_SECONDS
from gradwire.generation.generation import Generation
from gradwire.generation.waiting import POLL_SECONDS, SlowWait
from gradwire.operations.types import check_rank

log = logging.getLogger("gradwire")


@dataclass(frozen=True, slots=True)
class MessageEndpoint:
    """This rank in one group. Ranks are the group's; `members` are their world ranks."""

    generation: Generation
    group: int
    rank: int
    members: Sequence[int]

    @property
    def changed(self) -> threading.Condition:
        """A condition that is notified when a message arrives, leaves or is requested, and when the generation ends."""
        return self.generation.mailbox.changed

    def check_peer(self, rank: int) -> int:
        """Return the number of another rank of this group; raise `InvalidRank` for anything else."""
        number = check_rank(rank, len(self.members))
        if number == self.rank:
            raise InvalidRank(
                f"rank {number} is this rank itself: point-to-point calls need another rank",
                rank=number,
                size=len(self.members),
                peer=number,
            )
        return number

    def check(self, operation: str, during: str = "") -> None:
        """Raise the error of a closed or broken group."""
        self.generation.failure.check(operation, during)
        if not self.generation.control.open(self.group):
            raise Closed("the group is closed", operation=operation)

    def check_reachable(self, rank: int, operation: str) -> None:
        """Raise if the group cannot be used any more, or a rank of it has left."""
        self.check(operation, self.generation.failure.during(operation))
        if self.departed(rank):
            raise self.gone(rank, operation)

    def usable(self) -> bool:
        """Whether the group is neither closed nor broken."""
        generation = self.generation
        return not generation.failure.closed and generation.control.intact and generation.control.open(self.group)

    def departed(self, rank: int) -> bool:
        """Whether a rank has left, and all of its messages have been read."""
        return self.generation.service.departed(self.members[rank])

    def gone(self, rank: int, operation: str) -> GradwireError:
        """Return the error to raise because a rank has left."""
        failure = self.generation.failure
        error = failure.lost(self.members[rank], operation, failure.during(operation))
        if isinstance(error, PeerLost):
            error.peer = rank
        return error

    def log_if_slow(self, slow_wait: SlowWait, what: str, explain: Callable[[], str]) -> None:
        """Log a long wait when it is due, with an explanation."""
        now = time.monotonic()
        if now < slow_wait.due:
            return
        slow_wait.reported(now)
        rank = self.generation.identity.rank
        log.warning("rank %d has waited %.0f s %s; %s", rank, now - slow_wait.began, what, explain())

    def last_calls(self, ranks: Sequence[int]) -> str:
        """Return a text with the last call of each of these ranks, or that it does not answer."""
        worlds = [self.members[rank] for rank in ranks]
        return self.generation.control.last_calls(self.group, worlds, ANSWER_SECONDS)


def pause(now: float, deadline: float, slow_wait: SlowWait) -> float:
    """Return the seconds that a thread may sleep before it checks again."""
    return max(0.0, min(deadline - now, slow_wait.due - now, POLL_SECONDS))
