"""Check the rules that every simulated job must keep, whatever faults happen to it.

one membership    A generation number means the same ordered members to all processes. Survivors keep their order,
                  joiners follow them, and the size stays within its bounds.
one world         A member enters only later generations. Once a later generation has committed a step, no earlier
                  generation commits a step beyond the one at which the later generation began.
nothing lost      No generation begins before a committed step while a living member holds the state of that step. No
                  committed step is repeated with another result. Exception: if no living member held the state and
                  the others began again, a member that returns with a later step restores its own history.
equal replicas    All members that complete a step of a generation hold the same state, and it is the correct one.
no eviction       A member that no fault has affected is not evicted.
one history       No state of a run comes from another run. Exception: a run that replaces another may begin with an
                  earlier state of that run. Each run has its own ledger.
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
"""Identifies a state: the last step in it, and the generation that completed that step."""


class Violation(AssertionError):
    """An invariant does not hold. The message shows the history and the command that replays it."""

    def __init__(self, seed: int, reason: str, history: str, replay_command: str) -> None:
        super().__init__(f"seed {seed}: {reason}\n{history}\nseed {seed}: {reason}\nreplay it with: {replay_command}")
        self.seed = seed
        self.reason = reason


class Invariants:
    """The ledger of one run: its generations, states and commits. `fail` is called with the reason for a violation."""

    def __init__(
        self, seed: int, fail: Callable[[str], NoReturn], run: int = 1, previous: Invariants | None = None
    ) -> None:
        """`previous` is the ledger of the run that this run replaces: it may begin with an earlier state of that."""
        self._seed = seed
        self._fail = fail
        self.run = run
        self.generations: dict[int, tuple[str, ...]] = {}
        self.commits: dict[int, Version] = {}  # by step
        self.states: dict[Version, Array] = dict(previous.states) if previous else {}
        # By generation: the state that it began with.
        self.bases: dict[int, Version] = dict(previous.bases) if previous else {}
        # By generation: the initial state, if the generation began before the first step.
        self.beginnings: dict[int, Array] = dict(previous.beginnings) if previous else {}
        self._since = 0  # the first generation after the last loss of committed steps; older ones are not checked
        self._forgotten: set[Version] = set()  # committed states that were lost with all members that held them
        self.generation_of: dict[str, int] = {}  # by member: the last generation that it entered

    @property
    def committed(self) -> int:
        """Return the last committed step."""
        return max(self.commits, default=NONE)

    # -- memberships --------------------------------------------------------------------------------------------------

    def formed(self, number: int, ids: tuple[str, ...], removed: AbstractSet[str], smallest: int, largest: int) -> None:
        """Check a generation that the coordinator has formed. Members in `removed` count as joiners, not survivors."""
        known = self.generations.setdefault(number, ids)
        if known != ids:
            self._fail(f"generation {number} is {ids}, but it was {known} before")
        if not smallest <= len(ids) <= largest or len(set(ids)) != len(ids):
            self._fail(f"generation {number} is {ids}, but needs {smallest} to {largest} different members")
        before = self.generations.get(number - 1)
        if before is not None:
            survivors = [name for name in before if name in ids and name not in removed]
            if list(ids[: len(survivors)]) != survivors:
                self._fail(f"generation {number} is {ids}: the survivors of {before} did not keep their order")

    def assembled(self, name: str, assembly: Assembly) -> None:
        """Check the generation that a member received from the coordinator."""
        number, ids = assembly.generation, tuple(member.id for member in assembly.members)
        if self.generations.get(number) != ids:
            self._fail(f"{name} received generation {number} as {ids}, but it is {self.generations.get(number)}")
        if ids[assembly.rank] != name or assembly.members[assembly.rank].rank != assembly.rank:
            self._fail(f"{name} received rank {assembly.rank} of {ids}, which is not its own")
        if number <= self.generation_of.get(name, 0):
            self._fail(f"{name} entered generation {number} after {self.generation_of[name]}")
        self.generation_of[name] = number

    def holds(self, version: Version, state: Array) -> bool:
        """Return whether this is an intact copy of the last committed state, or of a state that followed from it."""
        last = self.committed
        begun = version[0] == NONE and version[1] == max(self.beginnings, default=0)
        known = self.beginnings.get(version[1]) if begun else self.states.get(version)
        intact = known is not None and digest(known) == digest(state)
        return intact and (last == NONE or self._history(version).get(last) == self.commits[last])

    def _history(self, version: Version) -> dict[int, Version]:
        """Return the states that led to a state, by step, including itself."""
        found: dict[int, Version] = {}
        while version[0] != NONE:
            last, number = version
            version = self.bases[number]
            found |= {step: (step, number) for step in range(version[0] + 1, last + 1)}
        return found

    # -- steps --------------------------------------------------------------------------------------------------------

    def settled(self, number: int, settlement: Settlement, holders: bool) -> None:
        """Check where a generation begins. `holders`: a living member holds the last committed state."""
        base = settlement.version
        known = self.bases.get(number)
        if known is not None:
            if known != base:
                self._fail(f"generation {number} begins after {base} for some members and after {known} for others")
            return
        if base[0] != NONE and base not in self.states:
            self._fail(f"generation {number} of run {self.run} begins after {base}, which is not a step of this run")
        last = self.committed
        if base[0] < last and holders:
            self._fail(f"generation {number} begins after step {base[0]}, but step {last} was committed")
        self.bases[number] = base
        history = self._history(base)
        if last == NONE or history.get(last) == self.commits[last]:
            return
        if holders and self._forgotten.isdisjoint(history.values()):
            self._fail(f"generation {number} begins after {base}, which did not follow from {self.commits[last]}")
        ever = self._forgotten.union(self.commits.values())
        self.commits = {step: one for step, one in history.items() if one in ever}
        self._forgotten = ever.difference(self.commits.values())
        self._since = number

    def began(self, name: str, number: int, state: Array) -> None:
        """Check the state with which a member begins a generation."""
        base = self.bases[number]
        if base[0] == NONE:  # before its first step a run keeps its initial state; a new run may have any initial state
            known = self.beginnings.setdefault(number, self.beginnings.get(base[1], state).copy())
        else:
            known = self.states[base]
        if digest(state) != digest(known):
            self._fail(f"{name} begins generation {number} after {base} with {state}, but it should be {known}")

    def completed(self, name: str, version: Version, size: int, state: Array) -> None:
        """Check a step that a member completed: its state must follow from the previous state and all gradients."""
        known = self.states.get(version)
        if known is None:
            step, number = version
            before = (step - 1, number) if (step - 1, number) in self.states else self.bases[number]
            if before[0] != step - 1:
                self._fail(f"{name} completed step {step} of generation {number}, but the step before was {before}")
            state_before = self.beginnings[number] if before[0] == NONE else self.states[before]
            total = np.sum([gradient(self._seed, step, rank, size) for rank in range(size)], axis=0)
            known = self.states[version] = applied(state_before, np.asarray(total))
        if digest(state) != digest(known):
            self._fail(f"{name} holds {state} after step {version[0]} of generation {version[1]}, expected {known}")

    def commit(self, name: str, version: Version, state: Array) -> None:
        """Check a step that a member learned to be committed."""
        step, number = version
        known = self.commits.setdefault(step, version)
        if known != version:
            self._fail(f"{name} commits step {step} of generation {number}, but generation {known[1]} committed it")
        if digest(state) != digest(self.states[version]):
            self._fail(f"{name} commits step {step} of generation {number} with another state than it completed")
        # Generations without a commit broke before the state was handed over.
        continued = {later for _, later in self.commits.values()}
        for later, base in self.bases.items():
            if later > number and later >= self._since and base[0] < step and later in continued:
                self._fail(
                    f"{name} commits step {step} in generation {number}, "
                    f"but generation {later} has continued after step {base[0]}"
                )
