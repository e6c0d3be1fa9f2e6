"""The rules of elastic training: when a step is committed, and whose state survives a break.

Pure: what ranks say comes in, what they do comes out; all ranks hear the same and so decide alike.

A step is *completed* on a rank when its body has ended there, and *committed* when all are known to have completed
it: that is what the vote at its end is for. After a break, or when members join, each rank tells where it stands
(`Standing`), and `settle` says at which step all go on and who pulls the state from whom. The highest completed step
of which a sound copy is left wins; of a step that was done twice, because a member was given up in between and came
back, the later generation's. A copy is sound if it is what it was when its step was completed: a body that was cut
short may have changed it. No committed step is ever given up: if only spoiled copies of it are left, that is
`StateLost`.

Sound copies of one step must have one digest. If they do not, the replicas have diverged: the settlement names the
ranks that differ, and all ranks that need the state get it from ranks of one digest, the most common one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gradwire.arrays import Array
from gradwire.errors import StateLost

if TYPE_CHECKING:
    from gradwire.membership.types import News

NONE = -1  # the step before the first
_POSITIVE = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank stands when a generation begins: the last step it completed, and in which generation that was."""

    completed: int = NONE
    generation: int = 0
    committed: int = NONE
    digest: str = ""
    sound: bool = True
    run: int = 1  # of those that its process has begun in this job

    @property
    def version(self) -> tuple[int, int]:
        """Which state this is a copy of; the greater one is the later."""
        return self.completed, self.generation

    @classmethod
    def from_wire(cls, fields: object) -> Standing:
        """Believe a peer's standing as far as it is well-formed; ValueError otherwise."""
        match fields:
            case [int(completed), int(generation), int(committed), str(digest), bool(sound), int(run)]:
                if NONE <= committed <= completed and generation >= 0 and run >= 1:
                    return cls(completed, generation, committed, digest, sound, run)
        raise ValueError(f"malformed standing {str(fields)[:200]}")

    def to_wire(self) -> list[object]:
        return [self.completed, self.generation, self.committed, self.digest, self.sound, self.run]


@dataclass(frozen=True, slots=True)
class Settlement:
    """All go on after step `completed` of a generation; `pulls` says which rank takes the state from which.

    `differing` are the ranks whose state of that step is not the one that the others hold and hand over.
    """

    completed: int
    generation: int
    pulls: dict[int, int] = field(default_factory=dict)
    differing: tuple[int, ...] = ()

    @property
    def version(self) -> tuple[int, int]:
        """Which state all go on with."""
        return self.completed, self.generation

    def version_in(self, generation: int) -> tuple[int, int]:
        """What ranks call that state from now on: before the first step, what this generation begins with."""
        return (NONE, generation) if self.completed == NONE else self.version

    def gives(self, rank: int) -> tuple[int, ...]:
        """The ranks that a rank hands its state to, in order."""
        return tuple(sorted(taker for taker, giver in self.pulls.items() if giver == rank))


def has_begun(completed: int, remembered: str, overwritten: bool = False) -> bool:
    """Whether a rank holds a state of the run: of a completed step, or what all ranks have begun with.

    `remembered` is the digest that the rank's state had then, if ever; `overwritten`: by an unfinished copy.
    """
    return completed != NONE or (bool(remembered) and not overwritten)


def is_sound(completed: int, remembered: str, digest: str, overwritten: bool = False) -> bool:
    """Whether a rank's state, which has this digest now, can be gone on from.

    Before the first step is completed, too, one that was cut short may have changed what all began with.
    """
    return digest == remembered if has_begun(completed, remembered, overwritten) else not overwritten


def settle(standings: Sequence[Standing]) -> Settlement:
    """At which step all ranks go on, and who pulls from whom; givers share the work evenly.

    >>> settle([Standing(4, 1, 4, "a"), Standing(5, 1, 4, "b"), Standing()])
    Settlement(completed=5, generation=1, pulls={0: 1, 2: 1}, differing=())
    """
    committed = max(standing.committed for standing in standings)
    sound = [standing for standing in standings if standing.sound]
    latest = max((standing.version for standing in sound), default=(NONE, 0))
    newest = max(standing.version for standing in standings)
    if not sound or latest[0] < committed or (newest[0] == NONE and latest < newest):  # a joiner's own is not it
        what = (
            "nobody has the whole state to begin with: who had it is gone, or the first step was cut short when it had "
            "changed it"
            if committed == NONE
            else f"step {committed} was committed, and every copy of its state that is left was changed by the step "
            "after it, which was cut short"
        )
        raise StateLost(f"{what}. Start the job again, from a checkpoint if the program has written one")
    copies = [rank for rank, one in enumerate(standings) if one.sound and one.version == latest]
    digests = [standings[rank].digest for rank in copies]
    if latest[0] == NONE:  # nothing is completed yet: all begin with what the first of them has
        holders = [rank for rank in copies if standings[rank].digest == digests[0]]
        differing: tuple[int, ...] = ()
    else:
        usual = Counter(digests).most_common(1)[0][0]  # of equally common ones, the lowest rank's
        holders = [rank for rank in copies if standings[rank].digest == usual]
        differing = tuple(rank for rank in copies if rank not in holders)
    takers = [rank for rank in range(len(standings)) if rank not in holders and rank not in differing]
    pulls = {taker: holders[index % len(holders)] for index, taker in enumerate(takers)}
    return Settlement(*latest, pulls, differing)


def has_joiners(news: News | None, generation: int) -> bool:
    """Whether members wait to join this very generation; news of an earlier one is old."""
    return news is not None and news.joiners > 0 and news.generation == generation


@dataclass(frozen=True, slots=True)
class Tally:
    """What a vote has shown: the same on every rank."""

    agreed: bool  # all ranks have completed the same step
    identical: bool  # and hold the same state
    renew: bool  # members wait to join, or one wants to leave: the generation ends here, for the next


def ballot(step: int, digest: str, renew: bool) -> Array:
    """A rank's vote at the end of a step. All ranks' ballots are reduced by `max`; of (x, -x) that gives both ends."""
    mark = int(digest[:16] or "0", 16) & _POSITIVE
    return np.array([step, -step, mark, -mark, int(renew)], dtype=np.int64)


def count(reduced: Array) -> Tally:
    """What the reduced ballots of all ranks say.

    >>> count(ballot(3, "ff", False))
    Tally(agreed=True, identical=True, renew=False)
    """
    step, lowest_step, mark, lowest_mark, renew = (int(value) for value in reduced)
    return Tally(step == -lowest_step, mark == -lowest_mark, bool(renew))
