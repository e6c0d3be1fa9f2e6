"""Processes that do not belong into a simulated job: newcomers that are unfit, members of another run, impostors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Literal, get_args

from gradwire.membership.types import Claim, Refusal
from gradwire.security.tokens import Ticket
from gradwire.simulate.coordinator_calls import Caller
from gradwire.simulate.process import Process, Program, Thread
from gradwire.simulate.time import Clock
from gradwire.training.commit_rules import NONE

if TYPE_CHECKING:
    from gradwire.simulate.simulated_worker import Worker
    from gradwire.simulate.world import World

JOB = "simulated"
TOKEN_SECONDS = 3600  # for which a simulated join token holds
TRIES = 5  # of an impostor

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


class Impostor(Process):
    """Holds a join token of its own. It claims the ids of other members, and then reports those members as gone."""

    def __init__(self, world: World, name: str, clock: Clock, random: Random, ticket: bytes) -> None:
        super().__init__(name, f"host of {name}", world.timeline, clock)
        self._world = world
        self._random = random
        self._session = random.randbytes(16)
        self._coordinator = Caller(self, world, ticket)
        self._thread = Thread(self, self._live(), world.broke_down(self))

    def wake(self) -> None:
        self._thread.wake()

    def _live(self) -> Program:
        for _ in range(TRIES):
            victim = self._choose()
            if victim is not None:
                yield from self._attack(victim)
            yield self._random.uniform(0.1, 2.0)

    def _choose(self) -> Worker | None:
        """A member that lives, and came with other credentials."""
        members = set(self._world.coordinator.member_ids)
        living = [worker for worker in self._world.workers if worker.name in members]
        return self._random.choice(living) if living else None

    def _attack(self, victim: Worker) -> Program:
        world, name = self._world, victim.name
        member = victim.member()
        if self._random.random() < 0.5:  # it may know the victim's host and pid from an assembly
            member = replace(member, host=self.host, hostname=self.host)
        generation = self._random.choice((0, victim.generation))
        world.impersonated.add(name)
        world.note(self, "claims to be %s after generation %d", name, generation)
        run = victim.run if generation else b""
        claim = Claim(member, None, None, self._session, generation=generation, run=run, transport="auto")
        known = victim.generation > 0  # before, its id may be free: a coordinator that restarts forgets those who wait
        outcome = yield from self._coordinator.ask("register", claim)
        if known and victim.alive and name in world.coordinator.member_ids and not isinstance(outcome, Refusal):
            world.fail(f"{self.name} was given the place of {name}, which lives and came with other credentials")
        world.note(self, "reports %s as gone", name)
        yield from self._coordinator.ask("beat", ([], [name], self._random.choice((b"", victim.run))))
        yield from self._coordinator.ask("leave", (member, victim.run))
