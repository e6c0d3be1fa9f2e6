"""The processes of a simulated job, and what must hold for what they report: `Violation` is raised if it does not."""

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
from gradwire.membership.types import Cause, Change
from gradwire.simulate.impostor import Impostor
from gradwire.simulate.invariants import Invariants, Version, Violation
from gradwire.simulate.network import Network
from gradwire.simulate.process import Process
from gradwire.simulate.scenario import Scenario
from gradwire.simulate.simulated_coordinator import Coordinator
from gradwire.simulate.simulated_launcher import Launcher
from gradwire.simulate.simulated_worker import NORMAL, Worker
from gradwire.simulate.time import Clock, Timeline
from gradwire.simulate.worker_profile import Profile

KEPT = 400  # lines of history
LINGER = 20.0  # seconds after a fault in which it may still be the cause of something
STEPS_AFTER = 3  # committed after the last fault, and the job has gone on
_WHY = {"gone": "died", "left": "left"}


class SimulatedJob:
    """One simulated job: its processes, and the checks of what they report."""

    def __init__(self, seed: int, setting: Scenario, random: Random, again: str) -> None:
        """`random` draws what happens from here on; `again` is the command that simulates this very job."""
        self.seed = seed
        self.random = random
        self.setting = setting
        self.timeline = Timeline()
        self.network = Network(self.timeline, Random(seed + 1), self.setting.quality)
        self._ledgers: dict[bytes, Invariants] = {}  # by run
        self.history: deque[tuple[float, str, str, tuple[object, ...]]] = deque(maxlen=KEPT)
        self.quiet_at = max((fault.over_at for fault in self.setting.faults), default=1.0)
        self.ending = ""
        self.lost: set[str] = set()  # whom an endless fault keeps from taking part
        self.hosts = [f"h{number}" for number in range(self.setting.hosts)]
        self._dark: set[str] = set()  # hosts without power
        self._again = again
        self._touched: dict[str, float] = {}
        self._commits_after: set[int] = set()
        self.recovered_at: float | None = None
        self._watched_until = 0.0
        self._formed = 0
        self._struck: dict[str, str] = {}  # off the present generation, and why
        self._by_name: dict[str, Worker] = {}
        self.let_in: dict[str, tuple[float, int]] = {}  # unfit newcomers: when first, and how often
        self.impersonated: set[str] = set()  # members whose ids impostors have claimed
        self._impostors: list[Impostor] = []
        self.coordinator = Coordinator(self.setting, self.network, self.new_clock(random), random, self)
        self._launchers: dict[str, Launcher] = {}
        if self.setting.launchers:
            for host in self.hosts:
                self._add_launcher(host, restarts=self.setting.restarts)
        for number in range(self.setting.start):
            host = self.hosts[number % len(self.hosts)]
            wish = number if self.setting.launchers else None
            self.timeline.after(self.random.uniform(0.0, 0.2), partial(self.start_worker, host, wish))

    # -- who is there -------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Worker]:
        return [worker for worker in self._by_name.values() if worker.alive]

    def names(self) -> list[str]:
        return [worker.name for worker in self.workers]

    def worker(self, name: str) -> Worker:
        return self._by_name[name]

    def listens(self, member: Member) -> bool:
        """False if it is certain that nobody listens any more where this member did; no answer is no proof."""
        worker = self._by_name[member.id]
        return worker.host in self._dark or (worker.alive and worker.address == member.address)

    def has_launcher(self, host: str) -> bool:
        return host in self._launchers

    def launchers_of(self, names: list[str]) -> list[str]:
        hosts = {self._by_name[name].host for name in names}
        return [launcher.name for host, launcher in self._launchers.items() if host in hosts]

    def spoken_for(self, names: list[str]) -> list[str]:
        """The workers whose launchers are among these: their leases hang on them."""
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
        """Workers on a host of their own join with a join token; their launcher has nothing but the token, too."""
        host = self.new_host()
        if self.setting.launchers:
            self._add_launcher(host, ticket=ticket)
        for _ in range(count):
            self.start_worker(host, profile=Profile(ticket))

    def add_impostor(self, random: Random, ticket: bytes) -> None:
        self._impostors.append(Impostor(self, f"x{len(self._impostors)}", self.new_clock(random), random, ticket))

    def start_worker(self, host: str, wish: int | None = None, profile: Profile = NORMAL) -> None:
        if host in self._dark:
            return
        number, random = len(self._by_name), self.random
        worker = Worker(self, number, host, self.new_clock(random), Random(random.getrandbits(32)), wish, profile)
        name = worker.name
        self._by_name[name] = worker
        self.note(worker, "starts on %s", host)
        if host in self._launchers:
            launcher = self._launchers[host]
            launcher.watch(worker)
            if launcher.name in self._touched:  # nobody may hear of its lease
                self._touched[name] = self._touched[launcher.name]
            if launcher.name in self.lost:
                self.lost.add(name)

    def end_worker(self, worker: Worker, power: bool = False) -> None:
        worker.crash(power)
        self.touch(worker.name, 0.0)
        if worker.host in self._launchers:
            self._launchers[worker.host].lost(worker)

    def end_host(self, host: str) -> None:
        self.hosts = [other for other in self.hosts if other != host] or self.hosts
        if host not in self.hosts:
            self._dark.add(host)
        if host in self._launchers:
            self._launchers[host].crash(power=True)
        for worker in [worker for worker in self.workers if worker.host == host]:
            self.end_worker(worker, power=True)

    def new_host(self) -> str:
        """A host that no launcher with the job's secret looks after."""
        return f"guest{len(self._by_name)}"

    def new_clock(self, random: Random) -> Clock:
        return Clock(self.timeline, random.uniform(0.0, 1e6), random.uniform(0.999, 1.001))

    # -- what is told -------------------------------------------------------------------------------------------------

    def note(self, process: Process | None, text: str, *facts: object) -> None:
        """A line of history."""
        self.history.append((self.timeline.now, process.name if process is not None else "network", text, facts))

    def touch(self, name: str, seconds: float) -> None:
        """Something happens to a member for some seconds: if others give it up, that is why."""
        self._touched[name] = max(self._touched.get(name, 0.0), self.timeline.now + seconds)

    def changed(self, change: Change) -> None:
        """The coordinator tells of a change."""
        self.note(self.coordinator, "%s: %s %s", change.kind, change.member or "", change.text)
        if change.member is not None:
            worker = self._by_name[change.member]
            if worker.alive and (change.kind == "gone" or (change.kind == "left" and not worker.leaving)):
                self.fail(f"{worker.name} was struck off because it {_WHY[change.kind]}, and it is still there")
            if change.kind == "silent" and self._is_untouched(worker):
                self.fail(f"{worker.name} was not heard of for the time of its lease, and nothing had happened to it")
            if change.kind in get_args(Cause):
                self._struck[change.member] = change.kind
            elif change.kind == "returned":
                self._struck.pop(change.member, None)

    def committed(self, worker: Worker, version: Version) -> None:
        """A member has learned that a step is committed."""
        self.ledger_of(worker.run).commit(worker.name, version, worker.state)
        if self.timeline.now >= self.quiet_at and worker.run == self.coordinator.run:
            if self.recovered_at is None:
                self.recovered_at = self.timeline.now
            self._commits_after.add(version[0])
            if len(self._commits_after) >= STEPS_AFTER and self.timeline.now >= self._watched_until:
                self.ending = "went on"

    @property
    def ledger(self) -> Invariants:
        """Of the run that the coordinator serves."""
        return self.ledger_of(self.coordinator.run)

    def ledger_of(self, run: bytes) -> Invariants:
        if run not in self._ledgers:
            previous = self._ledgers.get(self.coordinator.previous_run) if run == self.coordinator.run else None
            self._ledgers[run] = Invariants(self.seed, self.fail, len(self._ledgers) + 1, previous)
        return self._ledgers[run]

    def state_is_held(self, run: bytes) -> bool:
        """Whether a living member of a run has a sound copy of what was committed last, or of something later."""
        return bool(self._holders(run))

    def _holders(self, run: bytes) -> list[str]:
        ledger = self.ledger_of(run)
        able = [worker for worker in self.workers if worker.name not in self.lost and worker.run == run]
        return [one.name for one in able if ledger.holds(one.protocol.version, one.state)]

    def state_lost(self, worker: Worker, members: list[str], error: StateLost) -> None:
        """A generation has found that none of its members has a sound copy of what was committed."""
        holders = self._holders(worker.run)
        if any(name in members for name in holders):
            self.fail(f"{worker.name} gives the state up as lost, and {holders} have it: {error}")
        self.ending = "state lost, but held by one outside" if holders else "state lost"

    def refused(self, worker: Worker, reason: str) -> None:
        """The coordinator has turned a worker away for good: it ends with an error that says why."""
        of_another_run = worker.run not in (b"", self.coordinator.run)
        if worker.name in self.impersonated and worker.generation == 0:  # its id was free, and is taken now
            self.ending = "an impostor has taken a free id"
            return
        if not worker.profile.refusable and not of_another_run and "requires transport 'shm'" not in reason:
            self.fail(f"{worker.name} was refused: {reason}")
        self.note(worker, "is refused: %s", reason)

    def broke_down(self, process: Process) -> Callable[[BaseException], None]:
        """What becomes of an error that a program of a process did not expect."""

        def failed(error: BaseException) -> None:
            if isinstance(error, Violation):
                raise error
            raise self._violation(f"{process.name} broke down: {type(error).__name__}: {error}") from error

        return failed

    def fail(self, reason: str) -> NoReturn:
        raise self._violation(reason)

    def _violation(self, reason: str) -> Violation:
        lines = [f"  {time:9.4f}  {who:14} {text % facts}" for time, who, text, facts in self.history]
        head = [f"  {self.setting}"]
        return Violation(self.seed, f"{reason} (at {self.timeline.now:.4f} s)", "\n".join(head + lines), self._again)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def formed(self, number: int, ids: tuple[str, ...]) -> None:
        """The coordinator has formed a generation, and that is in its journal."""
        run, ledger = self.coordinator.run, self.ledger
        self.note(self.coordinator, "generation %d: %s", number, ids)
        ledger.formed(number, ids, self._struck.keys(), self.setting.minimum, self.setting.maximum)
        self._formed = number
        if self.coordinator.previous_run:  # its members' leases must be kept in the new run, too
            self._watched_until = self.timeline.now + self.setting.lease + 5.0
        for name in ids:
            self._check_fitness(self._by_name[name], run)
        for name in ledger.generations.get(number - 1, ()):
            if name not in ids and self._struck.get(name) != "replaced":
                self._check_eviction(name)
        self._struck = {}

    def resumed(self) -> None:
        """The coordinator was started again."""
        number, known = self.coordinator.membership.generation, max(self.ledger.generations, default=0)
        self.note(self.coordinator, "is back with run %d, and knows generation %d", self.ledger.run, number)
        if number < known:
            self.fail(f"the coordinator goes on with run {self.ledger.run} and knows generation {number} of {known}")
        if known != self._formed:  # it is another run
            self._struck, self._formed = {}, known
        if number > known:
            self.formed(number, self.coordinator.member_ids)

    def _check_fitness(self, worker: Worker, run: bytes) -> None:
        """A generation may only have members that it can work with."""
        first = self._formed == min(self.ledger.generations)  # of this run: there was nobody to compare it with
        founder = first and worker.run == self.coordinator.previous_run
        if worker.run not in (b"", run) and worker.name in self.impersonated:
            self.ending = "an impostor took a free id"  # a token holder may choose any id that nobody has
            return
        if worker.run not in (b"", run) and not founder:
            theirs, ours = self.ledger_of(worker.run).run, self.ledger.run
            self.fail(f"{worker.name} is a member of run {theirs}, and was taken into run {ours}")
        began = worker.name in self.ledger.generations[min(self.ledger.generations)]
        if worker.profile.refusable and not (began and worker.profile.unfit == "memory of another host"):
            self.fail(f"{worker.name} is unfit ({worker.profile.unfit}), and was taken into generation {self._formed}")
        if worker.profile.unfit:
            self._check_rests(worker.name)

    def _check_rests(self, name: str) -> None:
        """A newcomer that breaks each generation it is let into has to wait twice as long each time."""
        first, times = self.let_in.get(name, (self.timeline.now, 0))
        self.let_in[name] = first, times + 1
        waited = self.timeline.now - first
        if times > 2 + math.log2(1 + waited / BACKOFF):
            self.fail(f"{name} is unfit, and was let in {times + 1} times in {waited:.1f} s")

    def _check_eviction(self, name: str) -> None:
        worker = self._by_name[name]
        # Who leaves while all still find each other may close a link before its goodbye is through.
        found_each_other = self._formed - 1 in self.ledger.bases
        if found_each_other and not worker.leaving and self._is_untouched(worker):
            self.fail(f"{name} was evicted, and nothing had happened to it")

    def _is_untouched(self, worker: Worker) -> bool:
        """Whether a worker lives, and nothing happened to it lately for which others could give it up."""
        launcher = self._launchers.get(worker.host)
        if launcher is not None and not launcher.alive:
            return False
        lately = self.timeline.now <= self._touched.get(worker.name, -LINGER) + LINGER
        return worker.alive and self.setting.smooth and not lately
