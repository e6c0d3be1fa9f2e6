"""What must hold in every simulated job, whatever happens to it.

one membership       a generation's number means the same ordered members to everybody; survivors keep their order,
                     joiners follow, and the size stays within its bounds
one world            a member goes from one generation to a later one; once a later one has committed anything, no
                     earlier one commits anything beyond where that began
nothing lost         no generation begins before a committed step, as long as anybody alive holds its state; no
                     committed step is done again with another result. Where nobody held it, and the others began
                     anew, one that comes back with an earlier state that is farther on brings its history back
the same everywhere  all members that complete a step of a generation hold the same state, and it is the right one
no eviction          of members that nothing happened to
one history          of each run: no state of a run comes from another, except that a run that is begun in place of
                     another may begin with an earlier state of that. So there is a ledger for each
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import NoReturn

import numpy as np

from gradwire.arrays import Array
from gradwire.membership import Assembly
from gradwire.simulate.toy_training import applied, digest, gradient
from gradwire.training.commit_rules import NONE, Settlement

Version = tuple[int, int]
"""Which state: after which step, and completed in which generation."""


class Violation(AssertionError):
    """An invariant does not hold; the message shows the history and how to see it again."""

    def __init__(self, seed: int, reason: str, history: str, again: str) -> None:
        super().__init__(f"seed {seed}: {reason}\n{history}\nseed {seed}: {reason}\nreplay it with: {again}")
        self.seed = seed
        self.reason = reason


class Invariants:
    """All that was ever agreed on in one run; `fail` is told what contradicts it."""

    def __init__(
        self, seed: int, fail: Callable[[str], NoReturn], run: int = 1, previous: Invariants | None = None
    ) -> None:
        """`previous` is of the run in whose place this one was begun: it may begin with an earlier state of that."""
        self._seed = seed
        self._fail = fail
        self.run = run
        self.generations: dict[int, tuple[str, ...]] = {}
        self.commits: dict[int, Version] = {}  # by step
        self.states: dict[Version, Array] = dict(previous.states) if previous else {}
        self.bases: dict[int, Version] = dict(previous.bases) if previous else {}  # by generation: where it began
        self.beginnings: dict[int, Array] = (
            dict(previous.beginnings) if previous else {}
        )  # by generation: what it began with, if that was from nothing
        self._since = 0  # the generation from which on all this holds: before it everything was lost
        self._forgotten: set[Version] = set()  # what was committed, and lost with all who knew it
        self.generation_of: dict[str, int] = {}  # by member: the last one it entered

    @property
    def committed(self) -> int:
        """The last committed step."""
        return max(self.commits, default=NONE)

    # -- memberships --------------------------------------------------------------------------------------------------

    def formed(self, number: int, ids: tuple[str, ...], struck: AbstractSet[str], smallest: int, largest: int) -> None:
        """The coordinator has a generation; those who are struck off the one before can only join it anew."""
        known = self.generations.setdefault(number, ids)
        if known != ids:
            self._fail(f"generation {number} is {ids}, and was {known}")
        if not smallest <= len(ids) <= largest or len(set(ids)) != len(ids):
            self._fail(f"generation {number} is {ids}, of {smallest} to {largest} members")
        before = self.generations.get(number - 1)
        if before is not None:
            survivors = [name for name in before if name in ids and name not in struck]
            if list(ids[: len(survivors)]) != survivors:
                self._fail(f"generation {number} is {ids}: the survivors of {before} have not kept their order")

    def assembled(self, name: str, assembly: Assembly) -> None:
        """A member was told of its generation."""
        number, ids = assembly.generation, tuple(member.id for member in assembly.members)
        if self.generations.get(number) != ids:
            self._fail(f"{name} was told that generation {number} is {ids}; it is {self.generations.get(number)}")
        if ids[assembly.rank] != name or assembly.members[assembly.rank].rank != assembly.rank:
            self._fail(f"{name} was told that it is rank {assembly.rank} of {ids}")
        if number <= self.generation_of.get(name, 0):
            self._fail(f"{name} entered generation {number} after {self.generation_of[name]}")
        self.generation_of[name] = number

    def holds(self, version: Version, state: Array) -> bool:
        """Whether this is a sound copy of what was committed last, or of something that came of it."""
        last = self.committed
        begun = version[0] == NONE and version[1] == max(self.beginnings, default=0)
        known = self.beginnings.get(version[1]) if begun else self.states.get(version)
        sound = known is not None and digest(known) == digest(state)
        return sound and (last == NONE or self._history(version).get(last) == self.commits[last])

    def _history(self, version: Version) -> dict[int, Version]:
        """Through which states a state has come, by step."""
        found: dict[int, Version] = {}
        while version[0] != NONE:
            last, number = version
            version = self.bases[number]
            found |= {step: (step, number) for step in range(version[0] + 1, last + 1)}
        return found

    # -- steps --------------------------------------------------------------------------------------------------------

    def settled(self, number: int, settlement: Settlement, holders: bool) -> None:
        """A member of a generation has learned where it begins; `holders`: somebody alive holds what was committed."""
        base = settlement.version
        known = self.bases.get(number)
        if known is not None:
            if known != base:
                self._fail(f"generation {number} begins after {base} for some and after {known} for others")
            return
        if base[0] != NONE and base not in self.states:
            self._fail(f"generation {number} of run {self.run} begins after {base}, which is no step of this run")
        last = self.committed
        if base[0] < last and holders:
            self._fail(f"generation {number} begins after step {base[0]}, and step {last} was committed")
        self.bases[number] = base
        history = self._history(base)
        if last == NONE or history.get(last) == self.commits[last]:
            return
        if holders and self._forgotten.isdisjoint(history.values()):
            self._fail(f"generation {number} begins after {base}, which did not come of {self.commits[last]}")
        ever = self._forgotten.union(self.commits.values())
        self.commits = {step: one for step, one in history.items() if one in ever}
        self._forgotten = ever.difference(self.commits.values())
        self._since = number

    def began(self, name: str, number: int, state: Array) -> None:
        """A member has the state that a generation begins with."""
        base = self.bases[number]
        if base[0] == NONE:  # a run that has begun goes on with what it began with; a new one with anything
            known = self.beginnings.setdefault(number, self.beginnings.get(base[1], state).copy())
        else:
            known = self.states[base]
        if digest(state) != digest(known):
            self._fail(f"{name} begins generation {number} after {base} with {state}; it should be {known}")

    def completed(self, name: str, version: Version, size: int, state: Array) -> None:
        """A member has completed a step; its state must be what the gradients of all ranks make of the one before."""
        known = self.states.get(version)
        if known is None:
            step, number = version
            before = (step - 1, number) if (step - 1, number) in self.states else self.bases[number]
            if before[0] != step - 1:
                self._fail(f"{name} completed step {step} of generation {number}, which is at {before}")
            state_before = self.beginnings[number] if before[0] == NONE else self.states[before]
            total = np.sum([gradient(self._seed, step, rank, size) for rank in range(size)], axis=0)
            known = self.states[version] = applied(state_before, np.asarray(total))
        if digest(state) != digest(known):
            self._fail(f"{name} holds {state} after step {version[0]} of generation {version[1]}; it should be {known}")

    def commit(self, name: str, version: Version, state: Array) -> None:
        """A member has learned that all have completed a step."""
        step, number = version
        known = self.commits.setdefault(step, version)
        if known != version:
            self._fail(f"{name} commits step {step} of generation {number}, and it was committed in {known[1]}")
        if digest(state) != digest(self.states[version]):
            self._fail(f"{name} commits step {step} of generation {number} with another state than it completed")
        went_on = {later for _, later in self.commits.values()}  # others broke before the state was handed over
        for later, base in self.bases.items():
            if later > number and later >= self._since and base[0] < step and later in went_on:
                self._fail(f"{name} commits step {step} in generation {number}, and {later} went on after {base[0]}")
