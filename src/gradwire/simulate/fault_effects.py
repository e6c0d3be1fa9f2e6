"""What each kind of fault does to a simulated job, at the time that was drawn for it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from gradwire.simulate.faults import ENDLESS, Fault
from gradwire.simulate.simulated_coordinator import run_id
from gradwire.simulate.simulated_job import SimulatedJob
from gradwire.simulate.simulated_worker import Worker
from gradwire.simulate.worker_profile import UNFIT, Profile, ticket


def strike(job: SimulatedJob, fault: Fault) -> None:
    """Let a fault happen now; what lasts is undone when its time is over."""
    _STRIKES[fault.kind](job, fault, Random(fault.seed))


def _some(job: SimulatedJob, random: Random) -> Worker | None:
    """A worker that runs."""
    running = [worker for worker in job.workers if worker.alive and not worker.frozen]
    return random.choice(running) if running else None


def _crash(job: SimulatedJob, fault: Fault, random: Random) -> None:
    worker = _some(job, random)
    if worker is not None:
        job.note(worker, "crashes")
        job.end_worker(worker)


def _power(job: SimulatedJob, fault: Fault, random: Random) -> None:
    worker = _some(job, random)
    if worker is not None:
        job.note(worker, "crashes: its host %s has no power any more", worker.host)
        job.end_host(worker.host)


def _freeze(job: SimulatedJob, fault: Fault, random: Random) -> None:
    worker = _some(job, random)
    if worker is not None:
        worker.stopped = True
        job.touch(worker.name, fault.seconds)
        if fault.seconds >= ENDLESS:
            job.lost.add(worker.name)
        job.note(worker, "is stopped for %.2f s", fault.seconds)
        worker.freeze()
        job.timeline.after(fault.seconds, lambda: _thaw(job, worker))


def _thaw(job: SimulatedJob, worker: Worker) -> None:
    if worker.alive:
        job.note(worker, "goes on")
        worker.stopped = False
        worker.thaw()


def _stall(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """A call holds the interpreter's lock: nothing moves but the lifeline. That is no reason to give the rank up."""
    worker = _some(job, random)
    if worker is not None:
        job.note(worker, "holds its lock for %.2f s", fault.seconds)
        worker.freeze()
        job.timeline.after(fault.seconds, lambda: _thaw(job, worker))


def _stick(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """The program hangs, and the rest of the process does not."""
    worker = _some(job, random)
    if worker is not None:
        job.note(worker, "is stuck for %.2f s", fault.seconds)
        worker.thread.hold()
        job.timeline.after(fault.seconds, lambda: worker.do(worker.thread.release))


def _apart(job: SimulatedJob, fault: Fault, ones: list[str], others: list[str]) -> None:
    job.note(None, "cut for %.2f s: %s | %s", fault.seconds, ones, others)
    for name in (*ones, *others, *job.spoken_for(ones)):
        job.touch(name, fault.seconds)
    if fault.seconds >= ENDLESS:
        job.lost.update(ones)
    job.network.cut(ones, others)
    job.timeline.after(fault.seconds, lambda: _together(job, ones, others))


def _together(job: SimulatedJob, ones: list[str], others: list[str]) -> None:
    job.note(None, "healed: %s | %s", ones, others)
    job.network.heal(ones, others)


def _cut(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Two members do not reach each other; everybody else reaches both."""
    names = job.names()
    if len(names) > 1:
        one, other = random.sample(names, 2)
        _apart(job, fault, [one], [other])


def _split(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Two halves; both may reach the coordinator."""
    names = job.names()
    if len(names) > 1:
        random.shuffle(names)
        middle = random.randrange(1, len(names))
        _apart(job, fault, names[:middle], names[middle:])


def _exile(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Some members do not reach the coordinator."""
    names = job.names()
    if names:
        most = len(names) if fault.seconds < ENDLESS else max(1, len(names) - 1)
        some = random.sample(names, random.randint(1, most))
        _apart(job, fault, [*some, *job.launchers_of(some)], [job.coordinator.name])


def _isolate(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """A member reaches nobody."""
    names = job.names()
    if names:
        one = random.choice(names)
        rest = [name for name in names if name != one]
        _apart(job, fault, [one, *job.launchers_of([one])], [*rest, job.coordinator.name])


def _slow(job: SimulatedJob, fault: Fault, random: Random) -> None:
    worker = _some(job, random)
    if worker is not None:
        seconds = random.uniform(0.01, 0.4)
        job.note(worker, "sends up to %.2f s late for %.2f s", seconds, fault.seconds)
        job.touch(worker.name, fault.seconds + 1)
        job.network.slow(worker.name, seconds)
        job.timeline.after(fault.seconds, lambda: job.network.slow(worker.name, 0.0))


def _skew(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """A clock runs up to a tenth too fast or too slow. That is no reason to give anybody up."""
    process = random.choice([*job.workers, job.coordinator])
    rate = random.uniform(0.9, 1.1)
    job.note(process, "has a clock that runs at %.2f for %.2f s", rate, fault.seconds)
    process.clock.skew(rate)
    job.timeline.after(fault.seconds, lambda: process.clock.skew(1.0))


def _restart(job: SimulatedJob, fault: Fault, random: Random) -> None:
    job.coordinator.fall(random.choice(("now", "unwritten", "untold")))
    job.timeline.after(fault.seconds, lambda: job.coordinator.rise(job.new_clock(random)))


def _join(job: SimulatedJob, fault: Fault, random: Random) -> None:
    job.start_worker(random.choice(job.hosts))


def _leave(job: SimulatedJob, fault: Fault, random: Random) -> None:
    worker = _some(job, random)
    if worker is not None and len(job.names()) > job.setting.minimum:
        job.note(worker, "wants to leave")
        worker.leaving = True


# -- rare faults ------------------------------------------------------------------------------------------------------


def _unfit(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """A newcomer that the others cannot work with. At the start of a job nobody could tell who is at fault."""
    if job.coordinator.membership.generation:
        job.start_worker(job.new_host(), profile=Profile(unfit=random.choice(UNFIT)))


def _token(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Workers join with a join token."""
    count = random.randint(1, 2)
    job.invite(count, ticket(random, count, job.timeline.now))


def _impostor(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Somebody with a join token claims to be others, and reports them as gone."""
    job.add_impostor(random, ticket(random, random.randint(1, 4), job.timeline.now))


def _stale(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """A member of another run of the same job comes, with more steps than this one has done."""
    known = max(1, job.coordinator.membership.generation)
    job.start_worker(job.new_host(), profile=Profile(b"", None, run_id(99), random.randint(1, known), 1000))


def _no_journal(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """The coordinator is started anew without its journal, and a new run is begun."""
    job.coordinator.fall("now")
    job.timeline.after(fault.seconds, lambda: _begin_anew(job, random))


def _begin_anew(job: SimulatedJob, random: Random) -> None:
    job.coordinator.rise(job.new_clock(random), anew=True)
    for _ in range(job.setting.start):
        delay = random.uniform(0.0, 1.0)
        job.timeline.after(delay, lambda: job.start_worker(random.choice(job.hosts)))


def _outage(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Nobody reaches the coordinator, for longer than silent members are waited for. Others come meanwhile."""
    names = job.names()
    if names:
        _apart(job, fault, [*names, *job.launchers_of(names)], [job.coordinator.name])
        for _ in range(random.randint(0, 3)):
            job.timeline.after(random.uniform(0.0, fault.seconds), lambda: job.start_worker(job.new_host()))


def _blackout(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """The coordinator's host has no power for a while. A damaged journal is moved away by an operator."""
    job.coordinator.lose_power(random)

    def restart() -> None:
        job.coordinator.rise(job.new_clock(random))
        if not job.coordinator.alive:
            _begin_anew(job, random)

    job.timeline.after(fault.seconds, restart)


def _slow_disk(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """Each entry of the journal takes seconds to be on the disk."""
    disk = job.coordinator.disk
    disk.fsync_seconds = random.uniform(0.5, 8.0)
    job.timeline.after(fault.seconds, lambda: setattr(disk, "fsync_seconds", 0.0))


def _full_disk(job: SimulatedJob, fault: Fault, random: Random) -> None:
    """The journal cannot be written."""
    disk = job.coordinator.disk
    disk.full = True
    job.timeline.after(fault.seconds, lambda: setattr(disk, "full", False))


_STRIKES: dict[str, Callable[[SimulatedJob, Fault, Random], None]] = {
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
