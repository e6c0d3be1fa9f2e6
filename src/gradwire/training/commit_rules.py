"""The rules of elastic training: when a step is committed, and which state survives a failure.

The functions here are pure: no I/O, no clock. All ranks receive the same input and so make the same decision.

A step is *completed* on a rank when its body has ended there. It is *committed* when all ranks are known to have
completed it, which the vote at the end of the step establishes. After a failure, or when members join, each rank sends
its `Standing`. `settle` then decides after which step all ranks continue, and which rank receives the state from which.

The highest completed step wins, as long as an intact copy of its state is left. If a step was done in two generations
(a member was excluded in between and came back), the copy of the later generation wins. A copy is intact if its digest
is the one that it had when the step was completed: the interrupted body of the next step may have changed it. A
committed step is never lost silently: if no copy of it is intact, `settle` raises `StateLost`.

All intact copies of one step must have the same digest. If they do not, the replicas have diverged. The settlement then
names the ranks that differ, and the ranks that need the state receive the most common one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gradwire.arrays import Array
from gradwire.errors import StateLost

if TYPE_CHECKING:
    from gradwire.membership.types import News

NONE = -1  # no step is completed
REQUESTED = 1  # a stop that a program asked for; smaller than the number of every signal that stops a run
_POSITIVE = (1 << 62) - 1  # mask: both x and -x of the result fit into an int64


@dataclass(frozen=True, slots=True)
class Standing:
    """The progress of a rank when a generation begins, as the rank sends it to all others."""

    completed: int = NONE  # the last step that the rank completed
    generation: int = 0  # the generation in which it completed that step
    committed: int = NONE  # the last step that it knows to be committed
    digest: str = ""  # of its state now
    intact: bool = True  # whether its state is still that of the completed step
    run: int = 1  # how many elastic runs its process has begun in this job
    stop: int = 0  # the signal or request that stops the run, 0 if none is known to the rank
    saving: str = ""  # its settings of checkpoints, empty if it writes none

    @property
    def version(self) -> tuple[int, int]:
        """The step and generation of this copy; a greater pair is a later state."""
        return self.completed, self.generation

    @classmethod
    def from_wire(cls, fields: object) -> Standing:
        """Parse the standing of a peer; raise ValueError if it is malformed."""
        match fields:
            case [
                int(completed),
                int(generation),
                int(committed),
                str(digest),
                bool(intact),
                int(run),
                int(stop),
                str(saving),
            ]:
                if NONE <= committed <= completed and generation >= 0 and run >= 1 and stop >= 0:
                    return cls(completed, generation, committed, digest, intact, run, stop, saving)
        raise ValueError(f"malformed standing {str(fields)[:200]}")

    def to_wire(self) -> list[object]:
        standing = [self.completed, self.generation, self.committed, self.digest, self.intact, self.run]
        return [*standing, self.stop, self.saving]


@dataclass(frozen=True, slots=True)
class Settlement:
    """The decision of a new generation: all ranks continue after step `completed`, as completed in `generation`.

    `pulls` maps each rank that needs the state to the rank that sends it. `differing` lists the ranks whose state of
    that step differs from the most common one.
    """

    completed: int
    generation: int
    pulls: dict[int, int] = field(default_factory=dict)
    differing: tuple[int, ...] = ()

    @property
    def version(self) -> tuple[int, int]:
        """The step and generation of the state that all ranks continue with."""
        return self.completed, self.generation

    def version_in(self, generation: int) -> tuple[int, int]:
        """Return the version that ranks use for that state from now on.

        If no step is completed yet, the initial state belongs to this generation.
        """
        return (NONE, generation) if self.completed == NONE else self.version

    def gives(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that receive the state from `rank`, in order."""
        return tuple(sorted(taker for taker, giver in self.pulls.items() if giver == rank))


def has_begun(completed: int, recorded: str, overwritten: bool = False) -> bool:
    """Return whether a rank holds a state of this run: that of a completed step, or the agreed initial state.

    `recorded` is the digest of that state, empty if there is none. `overwritten` means that a transfer which did not
    finish has overwritten the state.
    """
    return completed != NONE or (bool(recorded) and not overwritten)


def is_intact(completed: int, recorded: str, digest: str, overwritten: bool = False) -> bool:
    """Return whether training can continue from a rank's state, whose digest is now `digest`.

    The agreed initial state must be unchanged too: an interrupted first step may have changed it.
    """
    return digest == recorded if has_begun(completed, recorded, overwritten) else not overwritten


def settle(standings: Sequence[Standing]) -> Settlement:
    """Decide after which step all ranks continue, and which rank receives the state from which.

    The ranks that hold the state share the sending evenly. Raise `StateLost` if no intact copy of the last committed
    state is left.

    >>> settle([Standing(4, 1, 4, "a"), Standing(5, 1, 4, "b"), Standing()])
    Settlement(completed=5, generation=1, pulls={0: 1, 2: 1}, differing=())
    """
    committed = max(standing.committed for standing in standings)
    intact = [standing for standing in standings if standing.intact]
    latest = max((standing.version for standing in intact), default=(NONE, 0))
    newest = max(standing.version for standing in standings)
    # The last condition: no step is completed, and the only intact state is that of a joining rank, which is not the
    # initial state that this run has agreed on.
    if not intact or latest[0] < committed or (newest[0] == NONE and latest < newest):
        reason = (
            "no rank has an intact copy of the initial state: the ranks that had one are lost, or the first step was "
            "interrupted after it had changed the state"
            if committed == NONE
            else f"no rank has an intact copy of the state of step {committed}, which was committed: the next step was "
            "interrupted after it had changed the state on every remaining rank"
        )
        raise StateLost(reason)
    copies = [rank for rank, one in enumerate(standings) if one.intact and one.version == latest]
    digests = [standings[rank].digest for rank in copies]
    if latest[0] == NONE:  # no step is completed: all ranks start with the state of the lowest rank that has a copy
        holders = [rank for rank in copies if standings[rank].digest == digests[0]]
        differing: tuple[int, ...] = ()
    else:
        majority = Counter(digests).most_common(1)[0][0]  # in a tie, the digest of the lowest rank
        holders = [rank for rank in copies if standings[rank].digest == majority]
        differing = tuple(rank for rank in copies if rank not in holders)
    takers = [rank for rank in range(len(standings)) if rank not in holders and rank not in differing]
    pulls = {taker: holders[index % len(holders)] for index, taker in enumerate(takers)}
    return Settlement(*latest, pulls, differing)


def has_joiners(news: News | None, generation: int) -> bool:
    """Return whether members wait to join this generation. News about an earlier generation is ignored."""
    return news is not None and news.joiners > 0 and news.generation == generation


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a rank asks for and reports in its ballot, beside its step and its state."""

    renew: bool = False  # members wait to join, or this one wants to leave: the next generation begins now
    stop: int = 0  # the signal or request that stops the run; 0: none
    checkpoint: bool = False  # a checkpoint of this step is wanted
    writing: bool = False  # this rank's thread still writes a file
    failed: bool = False  # this rank could not write its part of the checkpoint in progress
    published: int = NONE  # the step of the last checkpoint that this rank has published
    epoch: int = NONE  # the epoch for which the coordinator asks for a checkpoint


@dataclass(frozen=True, slots=True)
class Tally:
    """The result of a vote, the same on every rank."""

    agreed: bool  # all ranks have completed the same step
    identical: bool  # all ranks hold the same state
    wishes: Wishes  # of all ranks together: each entry is the greatest of any rank


def ballot(step: int, digest: str, wishes: Wishes) -> Array:
    """Return a rank's vote at the end of a step. The ballots of all ranks are reduced by `max`.

    Each number x that must be equal on all ranks is sent as (x, -x), so the reduction gives its maximum and its
    minimum.
    """
    mark = int(digest[:16] or "0", 16) & _POSITIVE
    return np.array([step, -step, mark, -mark, *(int(wish) for wish in astuple(wishes))], dtype=np.int64)


def count(reduced: Array) -> Tally:
    """Evaluate the reduced ballots of all ranks.

    >>> tally = count(ballot(3, "ff", Wishes(stop=15)))
    >>> tally.agreed, tally.identical, tally.wishes.stop
    (True, True, 15)
    """
    step, lowest_step, mark, lowest_mark, *wishes = (int(value) for value in reduced)
    renew, stop, checkpoint, writing, failed, published, epoch = wishes
    total = Wishes(bool(renew), stop, bool(checkpoint), bool(writing), bool(failed), published, epoch)
    return Tally(step == -lowest_step, mark == -lowest_mark, total)
