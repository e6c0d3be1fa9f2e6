"""Simulate a process that holds a join token and claims the ids of other members."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Protocol

from gradwire.membership.types import Claim, Refusal
from gradwire.simulate.coordinator_calls import Caller
from gradwire.simulate.process import Process, Program, Thread
from gradwire.simulate.simulated_coordinator import Coordinator
from gradwire.simulate.simulated_worker import Worker, WorkerJob
from gradwire.simulate.time import Clock

TRIES = 5


class AttackedJob(WorkerJob, Protocol):
    """The parts of the job that an impostor uses."""

    impersonated: set[str]

    @property
    def coordinator(self) -> Coordinator: ...

    @property
    def workers(self) -> list[Worker]: ...


class Impostor(Process):
    """A process with its own join token. It claims the ids of other members, then reports those members as gone."""

    def __init__(self, job: AttackedJob, name: str, clock: Clock, random: Random, ticket: bytes) -> None:
        super().__init__(name, f"host of {name}", job.timeline, clock)
        self._job = job
        self._random = random
        self._session = random.randbytes(16)
        self._coordinator = Caller(self, job.coordinator, job.network, ticket)
        self._thread = Thread(self, self._live(), job.error_handler(self))

    def wake(self) -> None:
        self._thread.wake()

    def _live(self) -> Program:
        for _ in range(TRIES):
            victim = self._choose()
            if victim is not None:
                yield from self._attack(victim)
            yield self._random.uniform(0.1, 2.0)

    def _choose(self) -> Worker | None:
        """Choose a living member, or return None. Every member has other credentials than the impostor."""
        living = [worker for worker in self._job.workers if self._is_member(worker)]
        return self._random.choice(living) if living else None

    def _is_member(self, worker: Worker) -> bool:
        return self._job.coordinator.is_member(worker.name, worker.claim_session)

    def _attack(self, victim: Worker) -> Program:
        job, name = self._job, victim.name
        member = victim.member()
        if self._random.random() < 0.5:  # otherwise it knows the victim's host and pid, for example from an assembly
            member = replace(member, host=self.host, hostname=self.host)
        generation = self._random.choice((0, victim.generation))
        job.impersonated.add(name)
        job.note(self, "claims to be %s after generation %d", name, generation)
        run = victim.run if generation else b""
        claim = Claim(member, None, None, self._session, generation=generation, run=run, transport="auto")
        # A restarted coordinator forgets waiting workers. So the id of a worker without a generation may be free.
        known = victim.generation > 0
        outcome = yield from self._coordinator.ask("register", claim)
        if known and victim.alive and self._is_member(victim) and not isinstance(outcome, Refusal):
            job.fail(f"{self.name} was admitted as {name}, which is alive and joined with other credentials")
        job.note(self, "reports %s as gone", name)
        yield from self._coordinator.ask("beat", ([], [name], self._random.choice((b"", victim.run))))
        yield from self._coordinator.ask("leave", (member, victim.run))
