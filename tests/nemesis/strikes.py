"""Injects the faults of a plan into a job, and undoes each of them when its duration is over."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence

from nemesis.job import Job
from nemesis.machines import COORDINATOR
from nemesis.plan import MACHINES, Fault
from nemesis.progress import Progress

LOOK_EVERY = 0.02  # seconds

Undo = Callable[[], None]


class Nemesis:
    """Strikes unless that could take the last member that has the state: what is promised needs one that is left.

    Only when all workers are killed at once, none is spared. A member can be relied on while neither it nor its machine
    is frozen or cut off.
    """

    def __init__(self, job: Job, front: Progress, faults: Sequence[Fault], write_log: Callable[[str], None]) -> None:
        self._job, self._front, self._write_log = job, front, write_log
        self._coming = collections.deque(faults)
        self._began = time.monotonic()
        self._undoing: list[tuple[float, Undo]] = []
        self._harmed: collections.Counter[int] = collections.Counter()  # machines
        self._frozen: set[str] = set()  # members
        self.abandoned = ""  # the run that has lost its journal, or all of its members, last
        self.done: collections.Counter[str] = collections.Counter()
        self.skipped: collections.Counter[str] = collections.Counter()
        self._deeds: dict[str, Callable[[Fault], Undo | None]] = {
            "kill a worker": self._kill,
            "freeze a worker": self._freeze,
            "freeze a machine": self._freeze_machine,
            "kill a machine": self._kill_machine,
            "kill all workers": self._kill_all,
            "cut two machines": self._cut,
            "cut two machines one way": self._cut_one_way,
            "cut a machine off": self._cut_off,
            "cut a machine from the coordinator": self._cut_from_coordinator,
            "cut all from the coordinator": self._cut_all_from_coordinator,
            "restart the coordinator": self._restart_coordinator,
            "freeze the coordinator": self._freeze_coordinator,
            "fill the disk": self._fill_disk,
            "lose the journal": self._lose_journal,
        }

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def run(self, until: float) -> None:
        """Look after the job and strike, until so many seconds have gone by."""
        while self.elapsed < until:
            self._job.look_after()
            self._undo(self.elapsed)
            while self._coming and self._coming[0].at <= self.elapsed:
                self._strike(self._coming.popleft())
            time.sleep(LOOK_EVERY)  # the pace of the faults, not a wait for something

    def stop(self) -> None:
        """No more faults; everything that lasts ends now."""
        self._coming.clear()
        self._undo(float("inf"))

    def end_abandoned_run(self) -> None:
        """If the run that lost its journal is still at work, it loses a member: then its workers join the next run."""
        holders = self._front.update().holders() if self._front.run == self.abandoned else set()
        at_work = [pid for machine in range(MACHINES) for name, pid in self._job.workers(machine) if name in holders]
        for pid in at_work[:1]:
            _signal(pid, signal.SIGKILL)

    def _strike(self, fault: Fault) -> None:
        self._front.update()
        undo = self._deeds[fault.kind](fault)
        if undo is None:
            self.skipped[fault.kind] += 1
            return
        self.done[fault.kind] += 1
        self._write_log(f"{self.elapsed:.1f} s (step {self._front.step} of run {self._front.run}): {fault}")
        self._undoing.append((self.elapsed + fault.seconds, undo))

    def _undo(self, now: float) -> None:
        due = [undo for at, undo in self._undoing if at <= now]
        self._undoing = [(at, undo) for at, undo in self._undoing if at > now]
        for undo in due:
            undo()

    def _leaves_enough(self, machines: Iterable[int] = (), members: Iterable[str] = ()) -> bool:
        """Whether a member that can be relied on is left when these are not."""
        bad = {*self._harmed.keys(), *machines}
        left = {name for machine in set(range(MACHINES)) - bad for name, _ in self._job.workers(machine)}
        left -= self._frozen.union(members)
        return bool(left & self._front.holders()) or (not self._front.holders() and len(left) > 1)

    def _harm(self, *machines: int) -> Undo:
        """These machines cannot be relied on until that is undone."""
        self._harmed.update(machines)

        def heal() -> None:
            self._harmed -= collections.Counter(machines)

        return heal

    # -- workers ------------------------------------------------------------------------------------------------------

    def _victim(self, fault: Fault) -> tuple[str, int] | None:
        workers = [one for one in self._job.workers(fault.machine) if one[0] not in self._frozen]
        if not workers:
            return None
        name, pid = workers[fault.worker % len(workers)]
        return (name, pid) if self._leaves_enough(members=[name]) else None

    def _kill(self, fault: Fault) -> Undo | None:
        victim = self._victim(fault)
        if victim is None:
            return None
        _signal(victim[1], signal.SIGKILL)
        return _nothing

    def _kill_all(self, fault: Fault) -> Undo | None:
        """Nobody has the state any more: another run begins."""
        for machine in range(MACHINES):
            for _, pid in self._job.workers(machine):
                _signal(pid, signal.SIGKILL)
        self.abandoned = self._front.run
        return _nothing

    def _freeze(self, fault: Fault) -> Undo | None:
        victim = self._victim(fault)
        if victim is None:
            return None
        name, pid = victim
        self._frozen.add(name)
        _signal(pid, signal.SIGSTOP)

        def thaw() -> None:
            self._frozen.discard(name)
            if (name, pid) in self._job.workers(fault.machine):
                _signal(pid, signal.SIGCONT)

        return thaw

    # -- machines -----------------------------------------------------------------------------------------------------

    def _freeze_machine(self, fault: Fault) -> Undo | None:
        if fault.machine in self._harmed or not self._leaves_enough([fault.machine]):
            return None
        heal = self._harm(fault.machine)
        workers = [one for one in self._job.workers(fault.machine) if one[0] not in self._frozen]
        self._job.signal_launchers(fault.machine, signal.SIGSTOP)
        for _, pid in workers:
            _signal(pid, signal.SIGSTOP)

        def thaw() -> None:
            for worker in set(workers).intersection(self._job.workers(fault.machine)):
                _signal(worker[1], signal.SIGCONT)
            self._job.signal_launchers(fault.machine, signal.SIGCONT)
            heal()

        return thaw

    def _kill_machine(self, fault: Fault) -> Undo | None:
        if fault.machine in self._harmed or not self._leaves_enough([fault.machine]):
            return None
        self._job.kill_machine(fault.machine, fault.seconds)
        return _nothing

    # -- the network --------------------------------------------------------------------------------------------------

    def _cut(self, fault: Fault) -> Undo | None:
        return self._block([fault.machine, fault.other], _both_ways(fault.machine, [fault.other]))

    def _cut_one_way(self, fault: Fault) -> Undo | None:
        return self._block([fault.machine, fault.other], [(fault.machine, fault.other)])

    def _cut_off(self, fault: Fault) -> Undo | None:
        others = [number for number in (*range(MACHINES), COORDINATOR) if number != fault.machine]
        return self._block([fault.machine], _both_ways(fault.machine, others))

    def _cut_from_coordinator(self, fault: Fault) -> Undo | None:
        return self._block([fault.machine], _both_ways(fault.machine, [COORDINATOR]))

    def _cut_all_from_coordinator(self, fault: Fault) -> Undo | None:
        return self._block([], _both_ways(COORDINATOR, list(range(MACHINES))))

    def _block(self, harmed: Sequence[int], pairs: Sequence[tuple[int, int]]) -> Undo | None:
        machines = self._job.machines
        if not machines.can_cut or any(one in self._harmed for one in harmed) or not self._leaves_enough(harmed):
            return None
        mine = [pair for pair in pairs if pair not in machines.blocked]
        heal = self._harm(*harmed)
        for pair in mine:
            machines.block(*pair)

        def unblock() -> None:
            for pair in mine:
                machines.unblock(*pair)
            heal()

        return unblock

    # -- the coordinator ----------------------------------------------------------------------------------------------

    def _restart_coordinator(self, fault: Fault) -> Undo | None:
        if self._job.held:
            return None
        self._job.held = True
        self._job.kill_coordinator()
        return self._release_coordinator

    def _freeze_coordinator(self, fault: Fault) -> Undo | None:
        if not self._job.coordinator:
            return None
        self._job.signal_coordinator(signal.SIGSTOP)
        return lambda: self._job.signal_coordinator(signal.SIGCONT)

    def _fill_disk(self, fault: Fault) -> Undo | None:
        """A worker is killed too, so that there is something to be written."""
        if not self._job.coordinator:
            return None
        self._job.machines.fill_disk(self._job.coordinator)
        self._kill(fault)
        return lambda: self._job.machines.free_disk(self._job.coordinator)

    def _lose_journal(self, fault: Fault) -> Undo | None:
        """A worker is killed too, which ends the run's last generation; or the run stays, and guests begin another."""
        if self._job.held:
            return None
        self._job.held = True
        self._job.kill_coordinator()
        self._job.forget_journal()
        self.abandoned = self._front.run
        if fault.worker % 2 or not self._job.start_guests(fault.machine):
            self._kill(fault)
        return self._release_coordinator

    def _release_coordinator(self) -> None:
        self._job.held = False
        if not self._job.coordinator:
            self._job.start_coordinator()


def _both_ways(machine: int, others: Sequence[int]) -> list[tuple[int, int]]:
    return [pair for other in others for pair in ((machine, other), (other, machine))]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _nothing() -> None:
    """There is nothing to undo."""
