"""Apply each kind of fault to a simulated job."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from gradwire.simulate.faults import ENDLESS, Fault
from gradwire.simulate.simulated_coordinator import run_id
from gradwire.simulate.simulated_job import SimulatedJob
from gradwire.simulate.simulated_worker import Worker
from gradwire.simulate.worker_profile import UNFIT, Profile, ticket


def apply_fault(job: SimulatedJob, fault: Fault) -> None:
    """Apply a fault now, and schedule its end if it has a duration."""
    _EFFECTS[fault.kind](job, fault, Random(fault.seed))


def _running_worker(job: SimulatedJob, random: Random) -> Worker | None:
    """Choose a running worker, or return None if there is none."""
    running = [worker for worker in job.workers if worker.alive and not worker.frozen]
    return random.choice(running) if running else None


def _crash(job: SimulatedJob, fault: Fault, random: Random) -> None:
    worker = _running_worker(job, random)
    if worker is not None:
        job.note(worker, "crashes")
        job.end_worker(worker)


def _power(job: SimulatedJob, fault: Fault, random: Random) -> None:
    worker = _running_worker(job, random)
    if worker is not None:
        job.note(worker, "crashes: its host %s lost its power", worker.host)
        job.end_host(worker.host)


def _freeze(job: SimulatedJob, fault: Fault, random: Random) -> None:
    worker = _running_worker(job, random)
    if worker is not None:
        worker.stopped = True
        job.disturb(worker.name, fault.seconds)
        if fault.seconds >= ENDLESS:
            job.lost.add(worker.name)
        job.note(worker, "is stopped for %.2f s", fault.seconds)
        worker.freeze()
        job.timeline.after(fault.seconds, lambda: _resume(job, worker))


def _resume(job: SimulatedJob, worker: Worker) -> None:
    if worker.alive:
        job.note(worker, "resumes")
        worker.stopped = False
        worker.resume()


def _stall(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Let a call hold the GIL: only the lifeline runs. The other ranks must not report this rank as lost."""
    worker = _running_worker(job, random)
    if worker is not None:
        job.note(worker, "holds its GIL for %.2f s", fault.seconds)
        worker.freeze()
        job.timeline.after(fault.seconds, lambda: _resume(job, worker))


def _stick(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Let the training thread hang while the other threads of the process run."""
    worker = _running_worker(job, random)
    if worker is not None:
        job.note(worker, "is stuck for %.2f s", fault.seconds)
        worker.thread.hold()
        job.timeline.after(fault.seconds, lambda: worker.do(worker.thread.release))


def _cut_between(job: SimulatedJob, fault: Fault, ones: list[str], others: list[str]) -> None:
    job.note(None, "cut for %.2f s: %s | %s", fault.seconds, ones, others)
    for name in (*ones, *others, *job.workers_of(ones)):
        job.disturb(name, fault.seconds)
    if fault.seconds >= ENDLESS:
        job.lost.update(ones)
    job.network.cut(ones, others)
    job.timeline.after(fault.seconds, lambda: _heal_between(job, ones, others))


def _heal_between(job: SimulatedJob, ones: list[str], others: list[str]) -> None:
    job.note(None, "healed: %s | %s", ones, others)
    job.network.heal(ones, others)


def _cut(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Cut two members off from each other. All other processes reach both."""
    names = job.names()
    if len(names) > 1:
        one, other = random.sample(names, 2)
        _cut_between(job, fault, [one], [other])


def _split(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Cut the members into two parts. Both parts reach the coordinator."""
    names = job.names()
    if len(names) > 1:
        random.shuffle(names)
        middle = random.randrange(1, len(names))
        _cut_between(job, fault, names[:middle], names[middle:])


def _exile(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Cut some members and their launchers off from the coordinator."""
    names = job.names()
    if names:
        most = len(names) if fault.seconds < ENDLESS else max(1, len(names) - 1)
        some = random.sample(names, random.randint(1, most))
        _cut_between(job, fault, [*some, *job.launchers_of(some)], [job.coordinator.name])


def _isolate(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Cut one member and its launcher off from all other members and from the coordinator."""
    names = job.names()
    if names:
        one = random.choice(names)
        rest = [name for name in names if name != one]
        _cut_between(job, fault, [one, *job.launchers_of([one])], [*rest, job.coordinator.name])


def _slow(job: SimulatedJob, fault: Fault, random: Random) -> None:
    worker = _running_worker(job, random)
    if worker is not None:
        seconds = random.uniform(0.01, 0.4)
        job.note(worker, "sends up to %.2f s late for %.2f s", seconds, fault.seconds)
        job.disturb(worker.name, fault.seconds + 1)
        job.network.slow(worker.name, seconds)
        job.timeline.after(fault.seconds, lambda: job.network.slow(worker.name, 0.0))


def _skew(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Let a clock run up to 10 % too fast or too slow. The job must not lose a member because of it."""
    process = random.choice([*job.workers, job.coordinator])
    rate = random.uniform(0.9, 1.1)
    job.note(process, "has a clock that runs at %.2f for %.2f s", rate, fault.seconds)
    process.clock.skew(rate)
    job.timeline.after(fault.seconds, lambda: process.clock.skew(1.0))


def _restart(job: SimulatedJob, fault: Fault, random: Random) -> None:
    job.coordinator.crash_at(random.choice(("now", "unwritten", "unreported")))
    job.timeline.after(fault.seconds, lambda: job.coordinator.restart(job.new_clock(random)))


def _join(job: SimulatedJob, fault: Fault, random: Random) -> None:
    job.start_worker(random.choice(job.hosts))


def _leave(job: SimulatedJob, fault: Fault, random: Random) -> None:
    worker = _running_worker(job, random)
    if worker is not None and len(job.names()) > job.scenario.minimum:
        job.note(worker, "is about to leave")
        worker.leaving = True


# -- rare faults ------------------------------------------------------------------------------------------------------


def _unfit(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Start a worker that the members cannot work with."""
    if job.coordinator.membership.generation:  # before the first generation nothing shows which worker is at fault
        job.start_worker(job.new_host(), profile=Profile(unfit=random.choice(UNFIT)))


def _token(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Start workers that hold a join token instead of the job's secret."""
    count = random.randint(1, 2)
    job.invite(count, ticket(random, count, job.timeline.now))


def _impostor(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Start a process with a join token that claims the ids of other members and reports those members as gone."""
    job.add_impostor(random, ticket(random, random.randint(1, 4), job.timeline.now))


def _stale(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Start a member of another run of the same job, with more completed steps than this run has."""
    known = max(1, job.coordinator.membership.generation)
    job.start_worker(job.new_host(), profile=Profile(b"", None, run_id(99), random.randint(1, known), 1000))


def _no_journal(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Restart the coordinator without its journal, and start workers that begin a new run."""
    job.coordinator.crash_at("now")
    job.timeline.after(fault.seconds, lambda: _start_new_run(job, random))


def _start_new_run(job: SimulatedJob, random: Random) -> None:
    job.coordinator.restart(job.new_clock(random), without_journal=True)
    for _ in range(job.scenario.start):
        delay = random.uniform(0.0, 1.0)
        job.timeline.after(delay, lambda: job.start_worker(random.choice(job.hosts)))


def _outage(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Cut all members off from the coordinator for longer than it waits for silent members. New workers may start."""
    names = job.names()
    if names:
        _cut_between(job, fault, [*names, *job.launchers_of(names)], [job.coordinator.name])
        for _ in range(random.randint(0, 3)):
            job.timeline.after(random.uniform(0.0, fault.seconds), lambda: job.start_worker(job.new_host()))


def _blackout(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Cut the power of the coordinator's host for a while. If the journal is damaged, an operator moves it away."""
    job.coordinator.lose_power(random)

    def restart() -> None:
        job.coordinator.restart(job.new_clock(random))
        if not job.coordinator.alive:
            _start_new_run(job, random)

    job.timeline.after(fault.seconds, restart)


def _slow_disk(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Let each fsync of the journal take 0.5 to 8 s."""
    disk = job.coordinator.disk
    disk.fsync_seconds = random.uniform(0.5, 8.0)
    job.timeline.after(fault.seconds, lambda: setattr(disk, "fsync_seconds", 0.0))


def _full_disk(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Let the journal's disk be full, so that writing fails."""
    disk = job.coordinator.disk
    disk.full = True
    job.timeline.after(fault.seconds, lambda: setattr(disk, "full", False))


_EFFECTS: dict[str, Callable[[SimulatedJob, Fault, Random], None]] = {
    "crash": _crash,
    "power": _power,
    "freeze": _freeze,
    "stall": _stall,
    "stick": _stick,
    "cut": _cut,
    "split": _split,
    "exile": _exile,
    "isolate": _isolate,
    "slow": _slow,
    "skew": _skew,
    "restart": _restart,
    "join": _join,
    "leave": _leave,
    "unfit": _unfit,
    "token": _token,
    "impostor": _impostor,
    "stale": _stale,
    "no-journal": _no_journal,
    "outage": _outage,
    "blackout": _blackout,
    "slow-disk": _slow_disk,
    "full-disk": _full_disk,
}
