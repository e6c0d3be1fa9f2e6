"""Simulate a member of an elastic job: it registers, trains, breaks, recovers and renews its lease.

All decisions are made by the shipped code, `SessionProtocol` and `StepProtocol`. Their requests are simulated: calls to
the coordinator, links, collectives and the transfer of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from random import Random
from typing import NoReturn, Protocol

from gradwire.errors import Broken, GradwireError, Refused, ReplicasDiverged, StateLost
from gradwire.generation.establish import is_known_to_others
from gradwire.identity import PROTOCOL
from gradwire.job import session_protocol
from gradwire.job.session_protocol import SET_UP_SECONDS, Failure, Past, Register, Repeat, SessionProtocol, SetUp
from gradwire.membership import Assembly, Member
from gradwire.membership.client.registration_rules import accepted
from gradwire.membership.types import Claim, News
from gradwire.simulate.coordinator_calls import Caller, CallTarget
from gradwire.simulate.invariants import Invariants, Version
from gradwire.simulate.network import End, Network, nothing
from gradwire.simulate.process import Process, Program, Thread, drive
from gradwire.simulate.rank import OTHER_VERSION, VERSION, Hello, Listener, Peers, Rank
from gradwire.simulate.scenario import Scenario
from gradwire.simulate.simulated_checkpoints import EVERY, CheckpointFolder, SimulatedSaver
from gradwire.simulate.time import Clock, Timeline
from gradwire.simulate.toy_training import applied, beginning, digest, gradient
from gradwire.simulate.worker_profile import Profile
from gradwire.training import step_requests
from gradwire.training.checkpoint_protocol import CheckpointProtocol
from gradwire.training.commit_rules import NONE, Settlement, has_joiners
from gradwire.training.step_protocol import StepProtocol
from gradwire.training.step_requests import (
    Gather,
    GatherDigests,
    HandOver,
    LoadCheckpoint,
    Loaded,
    NextGeneration,
    Pause,
    Vote,
)

LEASE_SECONDS = 1.0  # between two renewals of a lease
NORMAL = Profile()


class _Left(Exception):
    """The member leaves the job."""


class WorkerJob(Peers, Protocol):
    """The parts of the job that a worker uses, and its reports to the job."""

    seed: int
    scenario: Scenario
    timeline: Timeline
    network: Network
    checkpoints: CheckpointFolder

    @property
    def coordinator(self) -> CallTarget: ...

    def has_launcher(self, host: str) -> bool: ...

    def note(self, process: Process | None, text: str, *facts: object) -> None: ...

    def fail(self, reason: str) -> NoReturn: ...

    def error_handler(self, process: Process) -> Callable[[BaseException], None]: ...

    def ledger_of(self, run: bytes) -> Invariants: ...

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
        self._rank: Rank | None = None
        self.joined = False  # it was not in the previous generation
        self.lacks_state = False  # it has joined and does not have the training state yet
        self.waiting = ""  # the coordinator's reason why it has to wait
        self.news: News | None = None
        self.state = beginning(random.randrange(1, 50))
        self._session = SessionProtocol(elastic=True, past=Past(profile.generation, profile.run))
        self.protocol = StepProtocol(_Replica(self, job), checkpoints=self._checkpoints())
        if profile.run:
            self.protocol.digest = digest(self.state)
            self.protocol.completed, self.protocol.completed_in = profile.completed, profile.generation
            self.protocol.committed = profile.completed
        self._version = VERSION if profile.unfit is None else OTHER_VERSION  # of the set-up protocol
        self._random = random
        self._wish = wish
        self._ip = f"10.0.{number >> 8}.{number & 255}"
        self.address = ""
        self._attempts = 0
        self.claim_session = random.randbytes(16)
        self._early_streams: list[tuple[Hello, End]] = []
        self._coordinator = Caller(self, job.coordinator, job.network, profile.ticket)
        self.thread = Thread(self, self._live(), job.error_handler(self))
        if not job.has_launcher(host):
            self._lease = Caller(self, job.coordinator, job.network, profile.ticket)
            self._renew_lease()

    def _checkpoints(self) -> CheckpointProtocol | None:
        job, random = self._job, Random(f"checkpoints of {self.name} in {self._job.seed}")
        if not job.scenario.checkpoints:
            return None
        saver = SimulatedSaver(self, self, job.checkpoints, job.ledger_of, job.fail, random)
        return CheckpointProtocol(saver, EVERY)

    @property
    def rank(self) -> Rank:
        """Return this worker's rank in the current generation."""
        assert self._rank is not None
        return self._rank

    @property
    def run(self) -> bytes:
        """Return the run that it is a member of; empty before its first generation."""
        return self._session.run

    @property
    def generation(self) -> int:
        """Return the last generation that it was in."""
        return self._session.generation

    def wake(self) -> None:
        self.thread.wake()

    # -- the training thread ------------------------------------------------------------------------------------------

    def _live(self) -> Program:
        try:
            yield from self._next_generation()
            while True:
                yield from self._follow(self.protocol.begin())
                yield from self._step(self.protocol.completed + 1)
        except Refused as error:
            self._job.refused(self, str(error))
            self._job.end_worker(self)
        except StateLost as error:
            self._job.state_lost(self, self.rank.ids, error)
        except _Left:
            self.rank.close()
            yield from self._coordinator.ask("leave", (self.member(), self.run))
            self._job.note(self, "left")
            self._job.end_worker(self)

    def _step(self, step: int) -> Program:
        """Run one step as a user's program does. It ends with the vote."""
        rank, state, scenario = self.rank, self.state, self._job.scenario
        try:
            yield from self.compute(scenario.step_seconds * self._random.uniform(0.5, 1.5))
            in_place = step % scenario.in_place_every == rank.rank
            if in_place:
                state += 1  # the body changes the state in place: if it is interrupted, the state stays changed
            total = gradient(self._job.seed, step, rank.rank, rank.size)
            yield from rank.calls.run("all_reduce", scenario.reduce_algorithm, total, total, "sum")
            state[:] = applied(state - 1 if in_place else state, total)
        except Broken as error:
            yield from self._follow(self.protocol.recover(error))
            return
        self._job.ledger_of(self.run).completed(self.name, (step, rank.number), rank.size, state)
        yield from self._follow(self.protocol.end(step))

    # -- from one generation to the next ------------------------------------------------------------------------------

    def _next_generation(self) -> Program:
        if self._rank is not None:
            stood_still = self._rank.standstill.lately(self.now)
            self._session.leave(
                self._rank.control.unreachable_peers, lacks_state=self.lacks_state, stood_still=stood_still
            )
            self._rank.close()
            self._rank = None
        yield from drive(self._session.next_generation(), self._perform_session)

    def _perform_session(self, request: session_protocol.Request) -> Program:
        match request:
            case Register(past):
                return (yield from self._register(past))
            case SetUp(assembly, joined):
                self.joined = joined
                return (yield from self._set_up(assembly, request.within))
            case Repeat(generation, error):
                self._job.note(self, "generation %d could not be set up: %s", generation, str(error))

    def _register(self, past: Past) -> Program:
        """Call the coordinator until it has a generation for this member, and return the generation."""
        self._attempts += 1
        self.address = f"{self._ip}:{self._attempts}"
        self._job.note(self, "registers after generation %d, lost %s", past.generation, past.lost)
        while True:
            claim = self._claim(past)
            try:
                outcome = accepted(claim, (yield from self._coordinator.ask("register", claim)), "coordinator")
            except GradwireError as error:
                return Failure(error)
            if isinstance(outcome, Assembly):
                self.waiting = ""
                self._job.ledger_of(outcome.run).assembled(self.name, outcome)
                return outcome
            self.waiting = outcome.reason
            if not outcome.reason:
                self._job.fail(f"{self.name} waits, but the coordinator gave no reason")

    def _claim(self, past: Past) -> Claim:
        first, unfit = past.generation == 0, self.profile.unfit
        return Claim(
            self.member(),
            self._job.scenario.start if first and self._wish is not None else None,
            None,
            self.claim_session,
            protocol=PROTOCOL - (unfit == "old protocol"),
            transport={"no data plane": "", "memory of another host": "shm"}.get(unfit or "", "auto"),
            **asdict(past),
        )

    def member(self) -> Member:
        wish = self._wish if self.generation == 0 else None
        unusable = {"no data plane": "", "no address": "", "bad address": self.name}
        address = unusable.get(self.profile.unfit or "", self.address)
        return Member(self.name, wish, self.host, self.host, 1, address)

    def _set_up(self, assembly: Assembly, within: float | None) -> Program:
        rank = self._rank = Rank(self, assembly, self._job.network, self._job, self._version)
        self._open_early_streams()
        try:
            yield from rank.connect(self.now + (within or SET_UP_SECONDS))
        except GradwireError as error:
            unreachable = frozenset(rank.control.unreachable_peers)
            if not isinstance(error, Broken) and not is_known_to_others(error, elastic=True):
                rank.give_up(str(error))
            rank.close()
            self._rank = None
            return Failure(error, unreachable)
        return None

    # -- requests of the step protocol --------------------------------------------------------------------------------

    def _follow(self, steps: step_requests.Steps) -> Program:
        yield from drive(steps, self._perform)

    def _perform(self, request: step_requests.Request) -> Program:
        match request:
            case Vote(ballot):
                yield from self.rank.calls.run("all_reduce", self._job.scenario.vote_algorithm, ballot, ballot, "max")
                return ballot
            case Gather(value) | GatherDigests(value):
                return (yield from self.rank.gather(value, self._job.scenario.gather_algorithm))
            case HandOver():
                yield from self._hand_over(request)
            case NextGeneration():
                if self.leaving:
                    raise _Left
                yield from self._next_generation()
            case Pause(seconds):
                yield from self.compute(seconds)
            case LoadCheckpoint():  # a simulated run does not continue from a checkpoint
                return Loaded()

    def _hand_over(self, request: HandOver) -> Program:
        rank = self.rank
        if request.giver != rank.rank:
            yield from rank.pull(self.state, request.giver, request.overwrite)
            if digest(self.state) != request.digest:
                self._job.fail(f"{self.name} has pulled a state whose digest is not the expected one")
            return
        for taker in request.takers:
            yield from rank.give(self.state, taker, self._job.scenario.transfer_seconds)

    # -- other threads ------------------------------------------------------------------------------------------------

    def _renew_lease(self) -> None:
        """Send a heartbeat to the coordinator, for a worker that no launcher sends heartbeats for."""
        self._lease.send("beat", ([self.name], [], self.run), self._receive_news)
        self.later(LEASE_SECONDS, self._renew_lease)

    def _receive_news(self, news: object) -> None:
        if isinstance(news, News):
            self.news = news

    def dialed(self, hello: Hello, end: End) -> None:
        """Handle the first packet of a new stream."""
        if not self.alive:
            end.close()  # refuse the connection; if the host has no power, the other end does not notice it
        else:
            end.ready = nothing
            self.do(lambda: self._open(hello, end))

    def _open(self, hello: Hello, end: End) -> None:
        if hello.address != self.address:  # the address of an earlier generation, which is closed
            end.close()
        elif self._rank is None:
            self._early_streams.append((hello, end))
        elif (self._rank.assembly.run, self._rank.number) == (hello.run, hello.generation):
            self._rank.welcome(hello, end)
        else:
            end.close()

    def _open_early_streams(self) -> None:
        early, self._early_streams = self._early_streams, []
        for hello, end in early:
            self._open(hello, end)

    def ends_generation(self) -> bool:
        """Return whether this member votes to end its generation: other workers wait to join, or it is leaving."""
        news = self.news if self._session.concerns(self.news) else None
        return self.leaving or has_joiners(news, self.generation)


class _Replica:
    """A simulated member, in the form that the step protocol uses."""

    def __init__(self, worker: Worker, job: WorkerJob) -> None:
        self._worker = worker
        self._job = job

    @property
    def rank(self) -> int:
        return self._worker.rank.rank

    @property
    def size(self) -> int:
        return self._worker.rank.size

    @property
    def generation(self) -> int:
        return self._worker.generation

    def digest(self) -> str:
        return digest(self._worker.state)

    def digest_if_readable(self) -> str:
        return self.digest()

    def digests(self) -> list[tuple[str, str]]:
        return [("state", self.digest())]

    def others_wait(self) -> bool:
        return self._worker.ends_generation()

    def stop_wanted(self) -> int:
        return 0

    def last_checkpoint(self) -> str:
        return ""

    def can_recover(self, error: Broken) -> bool:
        return True

    def begun_runs(self, number: int) -> int:
        return 1

    def leave(self) -> None:
        """Never called: each member begins one run."""

    def is_short_of_members(self, wanted: int) -> None:
        """Never called: the coordinator has the same minimum."""

    def begins(self) -> None:
        self._worker.lacks_state = self._worker.joined

    def decided(self, settlement: Settlement) -> None:
        run = self._worker.run
        self._job.ledger_of(run).settled(self.generation, settlement, self._job.state_is_held(run))

    def holds(self, version: Version) -> None:
        worker = self._worker
        self._job.ledger_of(worker.run).began(worker.name, self.generation, worker.state)

    def committed(self, version: Version) -> None:
        self._worker.lacks_state = False
        if version[0] != NONE:
            self._job.committed(self._worker, version)

    def diverged(self, error: ReplicasDiverged) -> None:
        """Never called: the protocol raises a divergence as an error."""

    def broke(self, error: Broken, step: int) -> None:
        self._job.note(self._worker, "generation %d broke after step %d: %s", self.generation, step, str(error))

    def recovered(self) -> None:
        self._job.note(self._worker, "continues in generation %d of %d members", self.generation, self.size)
