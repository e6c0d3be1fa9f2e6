"""Runs random histories of an elastic job: processes register, vanish, report others and return; coordinators restart.

After each event, invariants are checked from the answers and the changes. At the end all processes behave well, and
every live one must be in the current generation or have a reason to wait.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gradwire.membership.coordinator.clock import LONGEST_STEP
from gradwire.membership.coordinator.roster import LAPSE, LONGEST_BACKOFF
from gradwire.membership.coordinator.state_machine import NEWCOMER_SECONDS, Membership
from gradwire.membership.types import Assembly, Change, Claim, Outcome, Refusal, Waiting
from support.membership_claims import RUN, worker

LEASE = 10.0
NAMES = "abcdef"
name_of = st.sampled_from(NAMES)
names_of = st.sets(name_of)


@dataclass
class Process:
    name: str
    pid: int
    generation: int = 0
    run: bytes = b""
    claim: Claim | None = None  # with which it waits

    @property
    def at_work(self) -> bool:
        return self.generation > 0 and self.claim is None


class AnyHistory(RuleBasedStateMachine):
    @initialize(
        minimum=st.integers(1, 3),
        more=st.integers(0, 2),
        most=st.integers(0, 2),
        settle=st.sampled_from([0.0, 0.1, 0.7]),
    )
    def begin(self, minimum: int, more: int, most: int, settle: float) -> None:
        self.minimum, start, self.maximum = minimum, minimum + more, minimum + more + most
        self.state = Membership(
            "job", RUN, start=start, minimum=self.minimum, maximum=self.maximum, lease=LEASE, settle=settle
        )
        self.now = self.counted = 0.0
        self.checking = False
        self.processes: dict[str, Process] = {}
        self.sessions = 0
        self.sent: list[Claim] = []
        self.generations: dict[int, tuple[str, ...]] = {0: ()}
        self.out: dict[int, dict[str, str]] = defaultdict(dict)
        self.causes: dict[str, set[str]] = defaultdict(set)  # reported about an id since it last joined a generation
        self.reports: set[tuple[int, str]] = set()  # generation, and sender or subject of a report
        self.heard: dict[str, float] = {}

    # -- events

    @rule(name=name_of, lost=names_of)
    def come(self, name: str, lost: set[str]) -> None:
        """A process is started, asks again, or registers for the next generation."""
        process = self.processes.get(name)
        if process is None:
            self.sessions += 1
            process = self.processes[name] = Process(name, pid=self.sessions)
        self.ask(process, lost)

    @rule(names=names_of)
    def be_healthy(self, names: set[str]) -> None:
        """Some processes are started, and for a while all behave well."""
        for name in sorted(names - self.processes.keys()):
            self.come(name, set())
        for _ in range(3):
            self.half_a_second()

    @rule(name=name_of)
    def give_up_and_ask_anew(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and process.claim is not None:
            process.claim = None
            self.ask(process, ())

    @rule(names=names_of)
    def break_apart(self, names: set[str]) -> None:
        """All members return, and those of each side report the other side as lost."""
        for process in [process for process in self.processes.values() if process.at_work]:
            self.ask(process, set(NAMES) - names if process.name in names else names)

    @rule(index=st.integers(0, 1000))
    def deliver_late(self, index: int) -> None:
        """A message arrives whose sender, dead or alive, no longer waits for the answer."""
        if self.sent:
            claim = self.sent[index % len(self.sent)]
            process = self.processes.get(claim.member.id)
            if process is None or process.pid == claim.member.pid:
                self.register(claim)

    @rule(name=name_of, how=st.sampled_from(["silently", "seen", "disconnected"]))
    def die(self, name: str, how: str) -> None:
        process = self.processes.pop(name, None)
        if process is None:
            return
        if how == "seen":
            self.causes[name].add("gone")
            self.event(0.0)
            self.state.gone([name], self.now)
        elif how == "disconnected" and process.claim is not None:
            self.state.withdraw(process.claim)

    @rule(name=name_of)
    def leave(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is not None:
            self.causes[name].add("left")
            self.event(0.0)
            self.state.leave(worker(name, pid=process.pid).member, self.now)

    @rule(names=names_of)
    def beat(self, names: set[str]) -> None:
        self.renew_leases(names)
        self.event(0.0)
        self.state.heartbeat(sorted(names), self.now)

    @rule(seconds=st.sampled_from([0.05, 0.1, 0.5, 1.0, 3.0, LAPSE, LEASE, NEWCOMER_SECONDS]))
    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            due = self.state.due()
            assert due is None or due > self.now, "a tick must not be due again at once"
            self.event(min(until, self.now + 1.0 if due is None else due) - self.now)
            self.state.tick(self.now)
            self.check_changes()

    @rule(seconds=st.sampled_from([3.0, 30.0, 3000.0]))
    def pause(self, seconds: float) -> None:
        """The coordinator's own process is stopped."""
        self.event(seconds)
        self.state.tick(self.now)

    @rule()
    def restart(self) -> None:
        """The coordinator is restarted from its journal, and waiting processes ask again."""
        self.check_changes()
        kept = json.loads(json.dumps(self.state.snapshot()))
        news = self.state.news()
        self.state = Membership.restore(kept, self.now)
        assert self.state.snapshot() == kept
        assert replace(self.state.news(), joiners=0, over=False) == replace(news, joiners=0, over=False)
        self.heard = dict.fromkeys(self.heard, self.counted)

    # -- helpers

    def event(self, seconds: float) -> None:
        self.now += seconds
        self.counted += min(seconds, LONGEST_STEP)

    def renew_leases(self, names: Iterable[str]) -> None:
        self.heard.update(dict.fromkeys(names, self.counted))

    def ask(self, process: Process, lost: Iterable[str]) -> None:
        if process.claim is None:
            self.sessions += 1
            claim = worker(process.name, process.generation, sorted(lost), session=str(self.sessions), pid=process.pid)
            process.claim = claim = replace(claim, run=process.run)
            self.sent.append(claim)
        else:
            process.claim = replace(process.claim, sequence=process.claim.sequence + 1)
        outcome = self.register(process.claim)
        if isinstance(outcome, Assembly):
            assert outcome.generation > process.generation, "an Assembly was sent twice, or is of an old generation"
            assert outcome.members[outcome.rank].id == process.name
            assert outcome.members[outcome.rank].pid == process.pid
            assert process.run in (b"", outcome.run, outcome.previous_run), "the member was moved to another run"
            process.generation, process.run, process.claim = outcome.generation, outcome.run, None
        elif isinstance(outcome, Refusal):
            superseded = process.run not in (b"", self.state.terms.run)
            assert superseded or process.generation == 0, f"a member is refused: {outcome.reason}"
            said = "is a member of run" if superseded else f"the id {process.name!r} is taken"
            assert said in outcome.reason
            del self.processes[process.name]
        else:
            assert outcome.reason

    def register(self, claim: Claim) -> Outcome:
        name = claim.member.id
        self.event(0.0)
        if claim.generation < self.state.generation:
            self.causes[name].add("replaced")
        self.reports.update((claim.generation, other) for other in claim.lost)
        if set(claim.lost) - {name}:
            self.reports.add((claim.generation, name))  # the sender may be the one that cannot reach others
        outcome = self.state.register(claim, self.now)
        if not isinstance(outcome, Refusal):
            self.renew_leases([name])
        self.check_changes()
        return outcome

    # -- invariants

    @invariant()
    def check_changes(self) -> None:
        self.checking = True
        for change in self.state.changes():
            if change.kind == "formed":
                self.check_formed(change)
            elif change.kind == "returned":
                assert self.out[change.generation].pop(change.member or "") == "silent"
            elif change.kind not in ("came", "went", "checkpoint"):
                self.check_removed(change)
        self.checking = False

    def check_formed(self, change: Change) -> None:
        number, members = change.generation, tuple(member.id for member in self.state.members)
        assert number == self.state.generation == max(self.generations) + 1, "generations grow by one"
        assert len(set(members)) == len(members)
        assert self.minimum <= len(members) <= self.maximum
        before, out = self.generations[number - 1], self.out[number - 1]
        survivors = tuple(name for name in before if name not in out)
        assert members[: len(survivors)] == survivors, "survivors keep their order, and none is dropped silently"
        self.generations[number] = members
        for name in members:
            self.causes[name].clear()
        self.renew_leases(members)

    def check_removed(self, change: Change) -> None:
        name, kind = change.member or "", change.kind
        assert name in self.generations[change.generation]
        assert self.out[change.generation].get(name, "silent") == "silent", "removed twice"
        self.out[change.generation][name] = kind
        if kind == "silent":
            assert self.counted - self.heard[name] >= LEASE - 0.01, "its lease has not expired"
        elif kind == "accused":
            assert (change.generation, name) in self.reports, "no member reported it"
        else:
            assert kind in self.causes[name], f"no report of '{kind}' about it"

    @invariant()
    def one_membership_for_each_generation(self) -> None:
        assert self.state.generation == max(self.generations)
        assert tuple(member.id for member in self.state.members) == self.generations[self.state.generation]

    @invariant()
    def no_member_waits_while_in_the_generation(self) -> None:
        roster = self.state.roster
        assert not roster.queue.keys() & roster.live().keys()
        assert roster.returning.keys() <= roster.live().keys()

    def teardown(self) -> None:
        """Unless the test has failed, let all processes behave well until each is in the generation or must wait."""
        if not hasattr(self, "state") or self.checking:
            return
        seconds = 0.0
        while seconds < LONGEST_BACKOFF + NEWCOMER_SECONDS + 2 * LEASE:
            self.half_a_second()
            seconds += 0.5
            if seconds > NEWCOMER_SECONDS + 2 * LEASE and not self.unsettled():
                return
        raise AssertionError(f"still not settled: {self.unsettled()}; {self.processes}")

    def half_a_second(self) -> None:
        for process in list(self.processes.values()):
            self.be_calm(process)
        self.pass_time(0.5)

    def be_calm(self, process: Process) -> None:
        """Do what a healthy worker does: claim, or send a heartbeat and read the news. It notices members that left."""
        if process.claim is not None:
            self.ask(process, ())
            return
        self.renew_leases([process.name])
        self.event(0.0)
        news = self.state.heartbeat([process.name], self.now)
        self.check_changes()
        left = self.out[process.generation]
        if news.generation > process.generation or news.joiners or news.evicted or news.over or left:
            self.ask(process, ())

    def unsettled(self) -> list[str]:
        """Return the processes that are not in the current generation but could be."""
        present = self.state.generation
        waiting = [process for process in self.processes.values() if process.claim is not None]
        if len(self.processes) < self.minimum:
            return [process.name for process in self.processes.values() if process.claim is None]
        if len(self.processes) > self.maximum and len(self.state.members) == self.maximum:
            for process in waiting:
                assert process.claim is not None
                outcome = self.state.outcome(process.claim, self.now)
                reason = outcome.reason if isinstance(outcome, Waiting) else ""
                if "the job is full" not in reason and "may join again" not in reason:
                    return [process.name]
            waiting = []
        old = [process.name for process in self.processes.values() if process.at_work and process.generation != present]
        return old + [process.name for process in waiting]


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
