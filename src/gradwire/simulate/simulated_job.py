"""Run the processes of a simulated job, and raise `Violation` if their reports break an invariant."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import NoReturn, get_args

from gradwire.errors import StateLost
from gradwire.membership import Member
from gradwire.membership.coordinator.roster import BACKOFF
from gradwire.membership.types import Cause, Change, Kind
from gradwire.simulate.impostor import Impostor
from gradwire.simulate.invariants import Invariants, Version, Violation
from gradwire.simulate.network import Network
from gradwire.simulate.process import Process
from gradwire.simulate.scenario import Scenario
from gradwire.simulate.simulated_checkpoints import CheckpointFolder
from gradwire.simulate.simulated_coordinator import Coordinator
from gradwire.simulate.simulated_launcher import Launcher
from gradwire.simulate.simulated_worker import NORMAL, Worker
from gradwire.simulate.time import Clock, Timeline
from gradwire.simulate.worker_profile import Profile

HISTORY_LINES = 400  # kept for the message of a violation
AFTERMATH_SECONDS = 20.0  # time after a fault in which the fault still explains an eviction
STEPS_AFTER = 3  # steps to commit after the last fault; then the job counts as continued
_WHY = {"gone": "died", "left": "left"}


class SimulatedJob:
    """One simulated job: its processes, and checks of what they report."""

    def __init__(self, seed: int, scenario: Scenario, random: Random, replay_command: str) -> None:
        """`random` draws all random choices from here on. `replay_command` is the command that simulates this job."""
        self.seed = seed
        self.random = random
        self.scenario = scenario
        self.timeline = Timeline()
        self.network = Network(self.timeline, Random(seed + 1), self.scenario.quality)
        self._ledgers: dict[bytes, Invariants] = {}  # by run
        self.checkpoints = CheckpointFolder()
        self.history: deque[tuple[float, str, str, tuple[object, ...]]] = deque(maxlen=HISTORY_LINES)
        self.faults_over_at = max((fault.over_at for fault in self.scenario.faults), default=1.0)
        self.ending = ""
        self.lost: set[str] = set()  # processes that an endless fault keeps out of the job
        self.hosts = [f"h{number}" for number in range(self.scenario.hosts)]
        self._hosts_without_power: set[str] = set()
        self._replay_command = replay_command
        self._disturbed_until: dict[str, float] = {}
        self._commits_after: set[int] = set()
        self.recovered_at: float | None = None
        self._watched_until = 0.0
        self._formed = 0
        self._removed: dict[str, str] = {}  # members that were removed from the current generation, with the cause
        self._by_name: dict[str, Worker] = {}
        self.unfit_admissions: dict[str, tuple[float, int]] = {}  # by unfit worker: time of the first, and their number
        self.impersonated: set[str] = set()  # members whose ids impostors have claimed
        # Ids of the current generation that an impostor has registered. Reports about them do not concern the worker.
        self._held_by_impostors: set[str] = set()
        self._impostors: list[Impostor] = []
        self.coordinator = Coordinator(self.scenario, self.network, self.new_clock(random), random, self)
        self._launchers: dict[str, Launcher] = {}
        if self.scenario.launchers:
            for host in self.hosts:
                self._add_launcher(host, restarts=self.scenario.restarts)
        for number in range(self.scenario.start):
            host = self.hosts[number % len(self.hosts)]
            wish = number if self.scenario.launchers else None
            self.timeline.after(self.random.uniform(0.0, 0.2), partial(self.start_worker, host, wish))

    # -- processes ----------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Worker]:
        return [worker for worker in self._by_name.values() if worker.alive]

    def names(self) -> list[str]:
        return [worker.name for worker in self.workers]

    def worker(self, name: str) -> Worker:
        return self._by_name[name]

    def listens(self, member: Member) -> bool:
        """Return False if this member's address refuses connections. An address without an answer counts as True."""
        worker = self._by_name[member.id]
        return worker.host in self._hosts_without_power or (worker.alive and worker.address == member.address)

    def has_launcher(self, host: str) -> bool:
        return host in self._launchers

    def launchers_of(self, names: list[str]) -> list[str]:
        hosts = {self._by_name[name].host for name in names}
        return [launcher.name for host, launcher in self._launchers.items() if host in hosts]

    def workers_of(self, names: list[str]) -> list[str]:
        """Return the workers whose launchers are among these processes, because those launchers renew their leases."""
        hosts = [host for host, launcher in self._launchers.items() if launcher.name in names]
        return [worker.name for worker in self.workers if worker.host in hosts]

    def _add_launcher(self, host: str, *, restarts: int = 0, ticket: bytes = b"") -> None:
        clock = self.new_clock(self.random)
        self._launchers[host] = Launcher(
            self.coordinator,
            self.network,
            host,
            clock,
            self.random,
            self.start_worker,
            restarts=restarts,
            ticket=ticket,
        )

    def invite(self, count: int, ticket: bytes) -> None:
        """Start workers on a new host that hold a join token. Their launcher, if any, holds only the token too."""
        host = self.new_host()
        if self.scenario.launchers:
            self._add_launcher(host, ticket=ticket)
        for _ in range(count):
            self.start_worker(host, profile=Profile(ticket))

    def add_impostor(self, random: Random, ticket: bytes) -> None:
        self._impostors.append(Impostor(self, f"x{len(self._impostors)}", self.new_clock(random), random, ticket))

    def start_worker(self, host: str, wish: int | None = None, profile: Profile = NORMAL) -> None:
        if host in self._hosts_without_power:
            return
        number, random = len(self._by_name), self.random
        worker = Worker(self, number, host, self.new_clock(random), Random(random.getrandbits(32)), wish, profile)
        name = worker.name
        self._by_name[name] = worker
        self.note(worker, "starts on %s", host)
        if host in self._launchers:
            launcher = self._launchers[host]
            launcher.watch(worker)
            if launcher.name in self._disturbed_until:  # the launcher may be unable to renew the worker's lease
                self._disturbed_until[name] = self._disturbed_until[launcher.name]
            if launcher.name in self.lost:
                self.lost.add(name)

    def end_worker(self, worker: Worker, power: bool = False) -> None:
        worker.crash(power)
        self.disturb(worker.name, 0.0)
        if worker.host in self._launchers:
            self._launchers[worker.host].worker_ended(worker)

    def end_host(self, host: str) -> None:
        self.hosts = [other for other in self.hosts if other != host] or self.hosts
        if host not in self.hosts:
            self._hosts_without_power.add(host)
        if host in self._launchers:
            self._launchers[host].crash(power=True)
        for worker in [worker for worker in self.workers if worker.host == host]:
            self.end_worker(worker, power=True)

    def new_host(self) -> str:
        """Return a new host, on which no launcher with the job's secret runs."""
        return f"guest{len(self._by_name)}"

    def new_clock(self, random: Random) -> Clock:
        return Clock(self.timeline, random.uniform(0.0, 1e6), random.uniform(0.999, 1.001))

    # -- reports ------------------------------------------------------------------------------------------------------

    def note(self, process: Process | None, text: str, *facts: object) -> None:
        """Add a line to the history."""
        self.history.append((self.timeline.now, process.name if process is not None else "network", text, facts))

    def disturb(self, name: str, seconds: float) -> None:
        """Record that a fault affects a process for some seconds, which explains an eviction."""
        self._disturbed_until[name] = max(self._disturbed_until.get(name, 0.0), self.timeline.now + seconds)

    def changed(self, change: Change) -> None:
        """Check a change that the coordinator reports."""
        self.note(self.coordinator, "%s: %s %s", change.kind, change.member or "", change.text)
        if change.member is not None:
            if change.member not in self._held_by_impostors:
                self._check_removal(self._by_name[change.member], change.kind)
            if change.kind in get_args(Cause):
                self._removed[change.member] = change.kind
            elif change.kind == "returned":
                self._removed.pop(change.member, None)

    def _check_removal(self, worker: Worker, kind: Kind) -> None:
        if worker.alive and (kind == "gone" or (kind == "left" and not worker.leaving)):
            self.fail(f"{worker.name} was removed because it {_WHY[kind]}, but it is still alive")
        if kind == "silent" and self._is_undisturbed(worker):
            self.fail(f"{worker.name} was removed because its lease ran out, but no fault had affected it")

    def committed(self, worker: Worker, version: Version) -> None:
        """Check a step that a member has learned to be committed."""
        self.ledger_of(worker.run).commit(worker.name, version, worker.state)
        if self.timeline.now >= self.faults_over_at and worker.run == self.coordinator.run:
            if self.recovered_at is None:
                self.recovered_at = self.timeline.now
            self._commits_after.add(version[0])
            if len(self._commits_after) >= STEPS_AFTER and self.timeline.now >= self._watched_until:
                self.ending = "continued"

    @property
    def ledger(self) -> Invariants:
        """Return the ledger of the run that the coordinator serves."""
        return self.ledger_of(self.coordinator.run)

    def ledger_of(self, run: bytes) -> Invariants:
        if run not in self._ledgers:
            previous = self._ledgers.get(self.coordinator.previous_run) if run == self.coordinator.run else None
            self._ledgers[run] = Invariants(self.seed, self.fail, len(self._ledgers) + 1, previous)
        return self._ledgers[run]

    def state_is_held(self, run: bytes) -> bool:
        """Return whether a living member of a run has an intact copy of the last committed state, or of a later one."""
        return bool(self._holders(run))

    def _holders(self, run: bytes) -> list[str]:
        ledger = self.ledger_of(run)
        able = [worker for worker in self.workers if worker.name not in self.lost and worker.run == run]
        return [one.name for one in able if ledger.holds(one.protocol.version, one.state)]

    def state_lost(self, worker: Worker, members: list[str], error: StateLost) -> None:
        """Check the report of a generation that none of its members has an intact copy of the committed state."""
        holders = self._holders(worker.run)
        if any(name in members for name in holders):
            self.fail(f"{worker.name} reports the state as lost, but {holders} have it: {error}")
        self.ending = "state lost, but held outside of the generation" if holders else "state lost"

    def refused(self, worker: Worker, reason: str) -> None:
        """Check a refusal by the coordinator, which ends the worker."""
        of_another_run = worker.run not in (b"", self.coordinator.run)
        # The id of a worker without a generation may be free, and the holder of a join token may take a free id.
        id_is_taken = f"the id {worker.name!r} is " in reason
        by_an_impostor = worker.name in self.impersonated and worker.generation == 0 and id_is_taken
        expected = worker.profile.refusable or of_another_run or by_an_impostor
        if not expected and "requires transport 'shm'" not in reason:
            self.fail(f"{worker.name} was refused: {reason}")
        self.note(worker, "is refused: %s", reason)

    def error_handler(self, process: Process) -> Callable[[BaseException], None]:
        """Return a function that turns an unexpected error of a process into a violation."""

        def failed(error: BaseException) -> None:
            if isinstance(error, Violation):
                raise error
            raise self._violation(f"{process.name} raised {type(error).__name__}: {error}") from error

        return failed

    def fail(self, reason: str) -> NoReturn:
        raise self._violation(reason)

    def _violation(self, reason: str) -> Violation:
        lines = [f"  {time:9.4f}  {name:14} {text % facts}" for time, name, text, facts in self.history]
        head = [f"  {self.scenario}"]
        return Violation(
            self.seed, f"{reason} (at {self.timeline.now:.4f} s)", "\n".join(head + lines), self._replay_command
        )

    # -- checks of generations ----------------------------------------------------------------------------------------

    def formed(self, number: int, ids: tuple[str, ...]) -> None:
        """Check a generation that the coordinator has formed and written to its journal."""
        run, ledger = self.coordinator.run, self.ledger
        self.note(self.coordinator, "generation %d: %s", number, ids)
        ledger.formed(number, ids, self._removed.keys(), self.scenario.minimum, self.scenario.maximum)
        self._formed = number
        if self.coordinator.previous_run:  # simulate long enough to see that leases are renewed in the new run too
            self._watched_until = self.timeline.now + self.scenario.lease + 5.0
        before = [name for name in ledger.generations.get(number - 1, ()) if name not in self._held_by_impostors]
        claimed = [name for name in ids if name in self.impersonated]
        self._held_by_impostors = {name for name in claimed if not self._is_member(self._by_name[name])}
        for name in ids:
            if name not in self._held_by_impostors:
                self._check_fitness(self._by_name[name], run)
        for name in before:
            if name in self._held_by_impostors:
                self.fail(f"generation {number} has an impostor as {name}, which joined with other credentials")
            if name not in ids and self._removed.get(name) != "replaced":
                self._check_eviction(name)
        self._removed = {}

    def resumed(self) -> None:
        """Check the state of the coordinator after a restart."""
        number, known = self.coordinator.membership.generation, max(self.ledger.generations, default=0)
        self.note(self.coordinator, "has restarted with run %d, and knows generation %d", self.ledger.run, number)
        if number < known:
            self.fail(f"the coordinator resumes run {self.ledger.run}, but knows generation {number} of {known}")
        if known != self._formed:  # the coordinator serves another run now
            self._removed, self._formed, self._held_by_impostors = {}, known, set()
        if number > known:
            self.formed(number, self.coordinator.member_ids)

    def _is_member(self, worker: Worker) -> bool:
        """Return whether a member of the current generation is this worker, and not an impostor with its id."""
        return self.coordinator.is_member(worker.name, worker.claim_session)

    def _check_fitness(self, worker: Worker, run: bytes) -> None:
        """Check that a new generation may have this worker as a member."""
        first = self._formed == min(self.ledger.generations)
        founder = first and worker.run == self.coordinator.previous_run  # a run may begin with members of the last one
        if worker.run not in (b"", run) and not founder:
            other_run, this_run = self.ledger_of(worker.run).run, self.ledger.run
            self.fail(f"{worker.name} is a member of run {other_run}, but was admitted to run {this_run}")
        # In the first generation of a run there was no other member to compare its host with.
        began = worker.name in self.ledger.generations[min(self.ledger.generations)]
        if worker.profile.refusable and not (began and worker.profile.unfit == "memory of another host"):
            self.fail(f"{worker.name} is unfit ({worker.profile.unfit}), but was admitted to generation {self._formed}")
        if worker.profile.unfit:
            self._check_waiting_times(worker.name)

    def _check_waiting_times(self, name: str) -> None:
        """Check that an unfit worker, which breaks each generation that it joins, waits twice as long each time."""
        first, times = self.unfit_admissions.get(name, (self.timeline.now, 0))
        self.unfit_admissions[name] = first, times + 1
        waited = self.timeline.now - first
        if times > 2 + math.log2(1 + waited / BACKOFF):
            self.fail(f"{name} is unfit, but was admitted {times + 1} times in {waited:.1f} s")

    def _check_eviction(self, name: str) -> None:
        worker = self._by_name[name]
        # A member that leaves during set-up may close a link before its goodbye message has arrived.
        was_set_up = self._formed - 1 in self.ledger.bases
        if was_set_up and not worker.leaving and self._is_undisturbed(worker):
            self.fail(f"{name} was evicted, but no fault had affected it")

    def _is_undisturbed(self, worker: Worker) -> bool:
        """Return whether a worker is alive and no recent fault explains that other members lost it."""
        launcher = self._launchers.get(worker.host)
        if launcher is not None and not launcher.alive:
            return False
        recently = self.timeline.now <= self._disturbed_until.get(worker.name, -AFTERMATH_SECONDS) + AFTERMATH_SECONDS
        return worker.alive and self.scenario.lossless and not recently
