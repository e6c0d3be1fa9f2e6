"""A simulated member of an elastic job: it registers, trains, breaks, recovers, and keeps its lease.

It goes the way of `training.elastic` and `MemberSession`, as a program that can be stopped anywhere; the rules are
those of `training.commit_rules`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import NoReturn, Protocol

import numpy as np

from gradwire.arrays import raw
from gradwire.errors import Broken, NoConnection, StateLost
from gradwire.identity import PROTOCOL
from gradwire.job.member_session import SET_UP_SECONDS
from gradwire.membership import Assembly, Member
from gradwire.membership.types import Claim, News, Refusal, Waiting
from gradwire.simulate.coordinator_calls import Caller, CallTarget
from gradwire.simulate.invariants import Ledger, Version
from gradwire.simulate.network import End, Network, nothing
from gradwire.simulate.process import Process, Program, Thread
from gradwire.simulate.rank import OTHER_VERSION, STATE, VERSION, Hello, Listener, Peers, Rank
from gradwire.simulate.scenario import Setting
from gradwire.simulate.time import Clock, Timeline
from gradwire.simulate.toy_training import applied, beginning, digest, gradient
from gradwire.simulate.worker_profile import Profile
from gradwire.training.commit_rules import NONE, Standing, ballot, count, has_joiners, is_sound, settle
from gradwire.transports.base import LinkClosed

STANDING_BYTES = 160
LEASE_BEAT = 1.0
CHUNK = 16  # bytes of state
NORMAL = Profile()


class WorkerJob(Peers, Protocol):
    """What a worker needs of the job that it is in, and what it reports to it."""

    seed: int
    setting: Setting
    timeline: Timeline
    network: Network

    @property
    def coordinator(self) -> CallTarget: ...

    def has_launcher(self, host: str) -> bool: ...

    def note(self, process: Process | None, text: str, *facts: object) -> None: ...

    def fail(self, reason: str) -> NoReturn: ...

    def broke_down(self, process: Process) -> Callable[[BaseException], None]: ...

    def ledger_of(self, run: bytes) -> Ledger: ...

    def state_is_held(self, run: bytes) -> bool: ...

    def refused(self, worker: Worker, reason: str) -> None: ...

    def committed(self, worker: Worker, version: Version) -> None: ...

    def state_lost(self, worker: Worker, members: list[str], error: StateLost) -> None: ...

    def end_worker(self, worker: Worker) -> None: ...


class Worker(Listener):
    """One member, from its start to its end."""

    def __init__(
        self,
        job: WorkerJob,
        number: int,
        host: str,
        clock: Clock,
        random: Random,
        wish: int | None = None,
        profile: Profile = NORMAL,
    ) -> None:
        super().__init__(f"m{number}", host, job.timeline, clock)
        self._job = job
        self.profile = profile
        self.leaving = False
        self.rank: Rank | None = None
        self.run = profile.run  # of which it is a member; empty before its first generation
        self.generation = profile.generation  # the last one it was in
        self._stranger = False  # it joined a generation whose state it has not got yet
        self._stood_still = False
        self.waiting = ""  # for what, as the coordinator says
        self.news: News | None = None
        self.state = beginning(random.randrange(1, 50))
        self.digest = (
            digest(self.state) if profile.run else ""
        )  # after the last completed step, or of what all began with
        self.completed, self.completed_in, self.committed = profile.completed, profile.generation, profile.completed
        self._overwritten = False  # its state is neither its own nor yet another's
        self._version = VERSION if profile.unfit is None else OTHER_VERSION  # of the set-up protocol
        self._random = random
        self._wish = wish
        self._lost: tuple[str, ...] = ()
        self._ip = f"10.0.{number >> 8}.{number & 255}"
        self.address = ""
        self._attempts = 0
        self._session = random.randbytes(16)
        self._knocks: list[tuple[Hello, End]] = []
        self._coordinator = Caller(self, job.coordinator, job.network, profile.ticket)
        self.thread = Thread(self, self._live(), job.broke_down(self))
        if not job.has_launcher(host):
            self._lease = Caller(self, job.coordinator, job.network, profile.ticket)
            self._keep_lease()

    def wake(self) -> None:
        self.thread.wake()

    # -- the training thread ------------------------------------------------------------------------------------------

    def _live(self) -> Program:
        while True:
            assembly = yield from self._register()
            if assembly is None:
                self._job.end_worker(self)
                return
            rank = self.rank = Rank(self, assembly, self._job.network, self._job, self._version)
            self._answer_knocks()
            try:
                yield from rank.connect()
                yield from self._settle(rank)
                yield from self._train(rank)
            except Broken as error:
                self._stood_still = rank.standstill.lately(self.now)
                self._job.note(self, "generation %d broke: %s", rank.number, str(error))
            except NoConnection as error:
                self._job.note(self, "generation %d did not come about: %s", rank.number, str(error))
                rank.give_up(str(error))
            except StateLost as error:
                self._job.state_lost(self, rank.ids, error)
                return
            self._lost = rank.complaints()
            rank.close()
            self.rank = None
            if self.leaving:
                yield from self._coordinator.ask("leave", (self.member(), self.run))
                self._job.note(self, "left")
                self._job.end_worker(self)
                return

    def _register(self) -> Program:
        """Ask the coordinator until it has a generation for this member; None if it is refused."""
        self._attempts += 1
        self.address = f"{self._ip}:{self._attempts}"
        self._job.note(self, "registers after generation %d, lost %s", self.generation, self._lost)
        while True:
            outcome = yield from self._coordinator.ask("register", self._claim())
            if isinstance(outcome, Assembly):
                if self.run not in (b"", outcome.run, outcome.previous_run):
                    self._job.note(self, "refuses the assembly of another run")
                    return None
                self.waiting, self._lost, self._stood_still = "", (), False
                self._job.ledger_of(outcome.run).assembled(self.name, outcome)
                self._stranger = self._stranger or outcome.generation != self.generation + 1
                self.run, self.generation = outcome.run, outcome.generation
                return outcome
            if isinstance(outcome, Refusal):
                self._job.refused(self, outcome.reason)
                return None
            if isinstance(outcome, Waiting):
                self.waiting = outcome.reason
                if not outcome.reason:
                    self._job.fail(f"{self.name} waits and is not told for what")

    def _claim(self) -> Claim:
        first, unfit = self.generation == 0, self.profile.unfit
        return Claim(
            self.member(),
            self._job.setting.start if first and self._wish is not None else None,
            None,
            self._session,
            generation=self.generation,
            lost=self._lost,
            stranger=self._stranger,
            stood_still=self._stood_still,
            run=self.run,
            protocol=PROTOCOL - (unfit == "old protocol"),
            transport={"no data plane": "", "memory of another host": "shm"}.get(unfit or "", "auto"),
        )

    def member(self) -> Member:
        wish = self._wish if self.generation == 0 else None
        unusable = {"no data plane": "", "no address": "", "bad address": self.name}
        address = unusable.get(self.profile.unfit or "", self.address)
        return Member(self.name, wish, self.host, self.host, 1, address)

    def _standing(self) -> Standing:
        now = digest(self.state)
        sound = is_sound(self.completed, self.digest, now, self._overwritten)
        return Standing(self.completed, self.completed_in, self.committed, now, sound)

    def _settle(self, rank: Rank) -> Program:
        """Tell where this member stands, hear where the others do, and pull the state if it is not the latest."""
        ledger = self._job.ledger_of(self.run)
        text = json.dumps(self._standing().to_wire()).encode().ljust(STANDING_BYTES)
        told = np.empty(STANDING_BYTES * rank.size, np.uint8)
        yield from rank.calls.run("all_gather", self._job.setting.gathering, np.frombuffer(text, np.uint8), told)
        parts = told.reshape(rank.size, STANDING_BYTES)
        standings = [Standing.from_wire(json.loads(part.tobytes())) for part in parts]
        settlement = settle(standings)
        ledger.settled(rank.number, settlement, self._job.state_is_held(self.run))
        giver = settlement.pulls.get(rank.rank)
        if giver is not None:
            self._overwritten = self.completed == NONE and settlement.completed != NONE
            yield from self._pull(rank, giver)
            self._overwritten = False
        for taker in settlement.gives(rank.rank):
            yield from self._give(rank, taker)
        ledger.began(self.name, rank.number, self.state)
        self.completed, self.completed_in = settlement.version_in(rank.number)
        self.digest = digest(self.state)
        self._stranger = False
        all_here = np.zeros(1, np.uint8)
        yield from rank.calls.run("all_reduce", self._job.setting.voting, all_here, all_here, "max")
        self.committed = settlement.completed
        if self.committed != NONE:
            self._job.committed(self, settlement.version)

    def _pull(self, rank: Rank, giver: int) -> Program:
        """In pieces, put into place when all are there; a member that has nothing to lose lets them overwrite it."""
        yield from rank.dial((giver,), STATE, self.now + SET_UP_SECONDS)
        link, pulled, got = rank.links[STATE][giver], self.state if self._overwritten else self.state.copy(), 0
        view = raw(pulled)
        while got < len(view):
            try:
                got += link.receive([view[got:]])
            except LinkClosed:
                yield from rank.calls.find_out(giver, "transfer")
            yield from rank.calls.check("transfer")
            if got < len(view):
                yield None
        self.state[:] = pulled

    def _give(self, rank: Rank, taker: int) -> Program:
        while taker not in rank.links[STATE]:
            yield from rank.calls.check("transfer")
            yield None
        data = self.state.tobytes()
        for begin in range(0, len(data), CHUNK):
            yield from self._compute(self._job.setting.transfer_seconds * CHUNK / len(data))
            yield from rank.calls.check("transfer")
            try:
                rank.links[STATE][taker].send([data[begin : begin + CHUNK]])
            except LinkClosed:
                yield from rank.calls.find_out(taker, "transfer")

    def _train(self, rank: Rank) -> Program:
        """Steps, until members join or this one leaves."""
        setting, job = self._job.setting, self._job
        while True:
            step = self.completed + 1
            yield from self._compute(setting.step_seconds * self._random.uniform(0.5, 1.5))
            spoils = step % setting.spoiling == rank.rank
            if spoils:
                self.state += 1  # a body that works in place: cut short, it leaves this behind
            total = gradient(job.seed, step, rank.rank, rank.size)
            yield from rank.calls.run("all_reduce", setting.reducing, total, total, "sum")
            self.state[:] = applied(self.state - 1 if spoils else self.state, total)
            self.completed, self.completed_in, self.digest = step, rank.number, digest(self.state)
            job.ledger_of(self.run).completed(self.name, (step, rank.number), rank.size, self.state)
            votes = ballot(step, self.digest, self._wants_renewal(rank))
            yield from rank.calls.run("all_reduce", setting.voting, votes, votes, "max")
            tally = count(votes)
            if not tally.agreed or not tally.identical:
                job.fail(f"{self.name}: the vote on step {step} of generation {rank.number} shows {tally}")
            self.committed = step
            job.committed(self, (step, rank.number))
            if tally.renew:
                job.note(self, "generation %d ends at step %d: others join or leave", rank.number, step)
                return

    def _wants_renewal(self, rank: Rank) -> bool:
        own = self.news is not None and self.news.run == self.run
        return self.leaving or (own and has_joiners(self.news, rank.number))

    def _compute(self, seconds: float) -> Program:
        """Work that notices nothing of what happens around it."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            yield until - self.now

    # -- other threads ------------------------------------------------------------------------------------------------

    def _keep_lease(self) -> None:
        """A lone worker's beats to the coordinator."""
        self._lease.send("beat", ([self.name], [], self.run), self._hear_news)
        self.later(LEASE_BEAT, self._keep_lease)

    def _hear_news(self, news: object) -> None:
        if isinstance(news, News):
            self.news = news

    def knocked(self, hello: Hello, end: End) -> None:
        """Somebody's first packet has arrived at this host."""
        if not self.alive:
            end.close()  # nobody listens there; if the host has no power, `close` goes nowhere
        else:
            end.ready = nothing
            self.do(lambda: self._open(hello, end))

    def _open(self, hello: Hello, end: End) -> None:
        if hello.address != self.address:  # a door of an earlier generation, closed since
            end.close()
        elif self.rank is None:
            self._knocks.append((hello, end))
        elif (self.rank.assembly.run, self.rank.number) == (hello.run, hello.generation):
            self.rank.welcome(hello, end)
        else:
            end.close()

    def _answer_knocks(self) -> None:
        knocks, self._knocks = self._knocks, []
        for hello, end in knocks:
            self._open(hello, end)
