"""What happens to a simulated job: drawn from the seed beforehand, and done to whoever is there when it is time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from gradwire.simulate.simulated_coordinator import run_id
from gradwire.simulate.strangers import UNFIT, Profile, ticket

if TYPE_CHECKING:
    from gradwire.simulate.simulated_worker import Worker
    from gradwire.simulate.world import World


ENDLESS = 1e6  # seconds, for all we simulate


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens `at` a time and lasts for some `seconds`; `seed` decides to whom."""

    kind: str
    at: float
    seconds: float
    seed: int

    @property
    def over_at(self) -> float:
        """When the job must do without more of it: if it never ends, with what it has done."""
        return self.at + (self.seconds if self.seconds < ENDLESS else 0.0)


# By kind: how often it is drawn, and the shortest and longest time that it lasts.
USUAL: dict[str, tuple[int, float, float]] = {
    "crash": (4, 0.0, 0.0),
    "power": (1, 0.0, 0.0),
    "freeze": (4, 0.05, 8.0),
    "stall": (2, 0.5, 5.0),
    "stick": (2, 0.5, 5.0),
    "cut": (4, 0.05, 6.0),
    "split": (2, 0.5, 6.0),
    "exile": (4, 0.5, 14.0),
    "isolate": (3, 0.2, 8.0),
    "slow": (2, 0.5, 5.0),
    "skew": (2, 1.0, 8.0),
    "restart": (4, 0.1, 5.0),
    "join": (5, 0.0, 0.0),
    "leave": (2, 0.0, 0.0),
}
RARE: dict[str, tuple[int, float, float]] = {
    "unfit": (3, 0.0, 0.0),
    "token": (2, 0.0, 0.0),
    "impostor": (3, 0.0, 0.0),
    "stale": (3, 0.0, 0.0),
    "no-journal": (3, 0.1, 5.0),
    "outage": (1, 72.0, 90.0),
    "blackout": (2, 0.1, 5.0),
    "slow-disk": (3, 2.0, 10.0),
    "full-disk": (2, 1.0, 10.0),
}
KINDS = USUAL | RARE

LASTING = ("freeze", "cut", "exile", "isolate")  # what may never end; the rest of the job must not mind


def chosen(text: str) -> frozenset[str]:
    """The kinds that a command line names: "usual", "rare", "all", or kinds with commas in between."""
    sets = {"usual": USUAL.keys(), "rare": RARE.keys(), "all": KINDS.keys()}
    kinds = frozenset(kind for name in text.split(",") for kind in sets.get(name, {name}))
    if not kinds <= KINDS.keys():
        raise ValueError(f"no such faults: {', '.join(sorted(kinds - KINDS.keys()))}")
    return kinds


def named(kinds: Collection[str]) -> str:
    """How a command line names kinds."""
    for name in ("usual", "rare", "all"):
        if chosen(name) == frozenset(kinds):
            return name
    return ",".join(sorted(kinds))


def command(seed: int, members: int | None, kinds: Collection[str]) -> str:
    """How to simulate this very job again."""
    command = f"python -m gradwire.simulate --first {seed} --seeds 1"
    if members:
        command += f" --members {members}"
    name = named(kinds)
    return command if name == "usual" else f"{command} --faults {name}"


def draw(
    random: Random,
    table: Mapping[str, tuple[int, float, float]],
    chosen: Collection[str],
    most: int,
    first: float,
    last: float,
    fewest: int = 0,
) -> list[Fault]:
    """Up to `most` faults of a table between two times, in order. Some come in quick succession, which is hardest."""
    kinds = [kind for kind in table if kind in chosen]
    if not kinds:
        return []
    weights = [table[kind][0] for kind in kinds]
    faults: list[Fault] = []
    for kind in random.choices(kinds, weights, k=random.randint(fewest, most)):
        near = faults and random.random() < 0.6
        at = faults[-1].at + random.expovariate(3.0) if near else random.uniform(first, last)
        _, shortest, longest = table[kind]
        seconds = shortest * (longest / shortest) ** random.random() if shortest else 0.0
        faults.append(Fault(kind, min(at, last), seconds, random.getrandbits(32)))
    lasting = [index for index, fault in enumerate(faults) if fault.kind in LASTING]
    if lasting and random.random() < 0.2:
        index = random.choice(lasting)
        faults[index] = replace(faults[index], seconds=ENDLESS)
    return sorted(faults, key=lambda fault: fault.at)


def strike(world: World, fault: Fault) -> None:
    """Let a fault happen now; what lasts is undone when its time is over."""
    _STRIKES[fault.kind](world, fault, Random(fault.seed))


def _some(world: World, random: Random) -> Worker | None:
    """A worker that runs."""
    running = [worker for worker in world.workers if worker.alive and not worker.frozen]
    return random.choice(running) if running else None


def _crash(world: World, fault: Fault, random: Random) -> None:
    worker = _some(world, random)
    if worker is not None:
        world.note(worker, "crashes")
        world.end_worker(worker)


def _power(world: World, fault: Fault, random: Random) -> None:
    worker = _some(world, random)
    if worker is not None:
        world.note(worker, "crashes: its host %s has no power any more", worker.host)
        world.end_host(worker.host)


def _freeze(world: World, fault: Fault, random: Random) -> None:
    worker = _some(world, random)
    if worker is not None:
        worker.stopped = True
        world.touch(worker.name, fault.seconds)
        if fault.seconds >= ENDLESS:
            world.lost.add(worker.name)
        world.note(worker, "is stopped for %.2f s", fault.seconds)
        worker.freeze()
        world.timeline.after(fault.seconds, lambda: _thaw(worker))


def _thaw(worker: Worker) -> None:
    if worker.alive:
        worker.world.note(worker, "goes on")
        worker.stopped = False
        worker.thaw()


def _stall(world: World, fault: Fault, random: Random) -> None:
    """A call holds the interpreter's lock: nothing moves but the lifeline. That is no reason to give the rank up."""
    worker = _some(world, random)
    if worker is not None:
        world.note(worker, "holds its lock for %.2f s", fault.seconds)
        worker.freeze()
        world.timeline.after(fault.seconds, lambda: _thaw(worker))


def _stick(world: World, fault: Fault, random: Random) -> None:
    """The program hangs, and the rest of the process does not."""
    worker = _some(world, random)
    if worker is not None:
        world.note(worker, "is stuck for %.2f s", fault.seconds)
        worker.thread.hold()
        world.timeline.after(fault.seconds, lambda: worker.do(worker.thread.release))


def _apart(world: World, fault: Fault, ones: list[str], others: list[str]) -> None:
    world.note(None, "cut for %.2f s: %s | %s", fault.seconds, ones, others)
    for name in (*ones, *others, *world.spoken_for(ones)):
        world.touch(name, fault.seconds)
    if fault.seconds >= ENDLESS:
        world.lost.update(ones)
    world.network.cut(ones, others)
    world.timeline.after(fault.seconds, lambda: _together(world, ones, others))


def _together(world: World, ones: list[str], others: list[str]) -> None:
    world.note(None, "healed: %s | %s", ones, others)
    world.network.heal(ones, others)


def _cut(world: World, fault: Fault, random: Random) -> None:
    """Two members do not reach each other; everybody else reaches both."""
    names = world.names()
    if len(names) > 1:
        one, other = random.sample(names, 2)
        _apart(world, fault, [one], [other])


def _split(world: World, fault: Fault, random: Random) -> None:
    """Two halves; both may reach the coordinator."""
    names = world.names()
    if len(names) > 1:
        random.shuffle(names)
        middle = random.randrange(1, len(names))
        _apart(world, fault, names[:middle], names[middle:])


def _exile(world: World, fault: Fault, random: Random) -> None:
    """Some members do not reach the coordinator."""
    names = world.names()
    if names:
        most = len(names) if fault.seconds < ENDLESS else max(1, len(names) - 1)
        some = random.sample(names, random.randint(1, most))
        _apart(world, fault, [*some, *world.launchers_of(some)], [world.coordinator.name])


def _isolate(world: World, fault: Fault, random: Random) -> None:
    """A member reaches nobody."""
    names = world.names()
    if names:
        one = random.choice(names)
        rest = [name for name in names if name != one]
        _apart(world, fault, [one, *world.launchers_of([one])], [*rest, world.coordinator.name])


def _slow(world: World, fault: Fault, random: Random) -> None:
    worker = _some(world, random)
    if worker is not None:
        seconds = random.uniform(0.01, 0.4)
        world.note(worker, "sends up to %.2f s late for %.2f s", seconds, fault.seconds)
        world.touch(worker.name, fault.seconds + 1)
        world.network.slow(worker.name, seconds)
        world.timeline.after(fault.seconds, lambda: world.network.slow(worker.name, 0.0))


def _skew(world: World, fault: Fault, random: Random) -> None:
    """A clock runs up to a tenth too fast or too slow. That is no reason to give anybody up."""
    process = random.choice([*world.workers, world.coordinator])
    rate = random.uniform(0.9, 1.1)
    world.note(process, "has a clock that runs at %.2f for %.2f s", rate, fault.seconds)
    process.clock.skew(rate)
    world.timeline.after(fault.seconds, lambda: process.clock.skew(1.0))


def _restart(world: World, fault: Fault, random: Random) -> None:
    world.coordinator.fall(random.choice(("now", "unwritten", "untold")))
    world.timeline.after(fault.seconds, lambda: world.coordinator.rise(world.new_clock(random)))


def _join(world: World, fault: Fault, random: Random) -> None:
    world.start_worker(random.choice(world.hosts))


def _leave(world: World, fault: Fault, random: Random) -> None:
    worker = _some(world, random)
    if worker is not None and len(world.names()) > world.setting.minimum:
        world.note(worker, "wants to leave")
        worker.leaving = True


# -- rare faults ------------------------------------------------------------------------------------------------------


def _unfit(world: World, fault: Fault, random: Random) -> None:
    """A newcomer that the others cannot work with. At the start of a job nobody could tell who is at fault."""
    if world.coordinator.membership.generation:
        world.start_worker(world.new_host(), profile=Profile(unfit=random.choice(UNFIT)))


def _token(world: World, fault: Fault, random: Random) -> None:
    """Workers join with a join token."""
    count = random.randint(1, 2)
    world.invite(count, ticket(random, count, world.timeline.now))


def _impostor(world: World, fault: Fault, random: Random) -> None:
    """Somebody with a join token claims to be others, and reports them as gone."""
    world.add_impostor(random, ticket(random, random.randint(1, 4), world.timeline.now))


def _stale(world: World, fault: Fault, random: Random) -> None:
    """A member of another run of the same job comes, with more steps than this one has done."""
    known = max(1, world.coordinator.membership.generation)
    world.start_worker(world.new_host(), profile=Profile(b"", None, run_id(99), random.randint(1, known), 1000))


def _no_journal(world: World, fault: Fault, random: Random) -> None:
    """The coordinator is started anew without its journal, and a new run is begun."""
    world.coordinator.fall("now")
    world.timeline.after(fault.seconds, lambda: _begin_anew(world, random))


def _begin_anew(world: World, random: Random) -> None:
    world.coordinator.rise(world.new_clock(random), anew=True)
    for _ in range(world.setting.start):
        delay = random.uniform(0.0, 1.0)
        world.timeline.after(delay, lambda: world.start_worker(random.choice(world.hosts)))


def _outage(world: World, fault: Fault, random: Random) -> None:
    """Nobody reaches the coordinator, for longer than silent members are waited for. Others come meanwhile."""
    names = world.names()
    if names:
        _apart(world, fault, [*names, *world.launchers_of(names)], [world.coordinator.name])
        for _ in range(random.randint(0, 3)):
            world.timeline.after(random.uniform(0.0, fault.seconds), lambda: world.start_worker(world.new_host()))


def _blackout(world: World, fault: Fault, random: Random) -> None:
    """The coordinator's host has no power for a while. A damaged journal is moved away by an operator."""
    world.coordinator.lose_power(random)

    def restart() -> None:
        world.coordinator.rise(world.new_clock(random))
        if not world.coordinator.alive:
            _begin_anew(world, random)

    world.timeline.after(fault.seconds, restart)


def _slow_disk(world: World, fault: Fault, random: Random) -> None:
    """Each entry of the journal takes seconds to be on the disk."""
    disk = world.coordinator.disk
    disk.fsync_seconds = random.uniform(0.5, 8.0)
    world.timeline.after(fault.seconds, lambda: setattr(disk, "fsync_seconds", 0.0))


def _full_disk(world: World, fault: Fault, random: Random) -> None:
    """The journal cannot be written."""
    disk = world.coordinator.disk
    disk.full = True
    world.timeline.after(fault.seconds, lambda: setattr(disk, "full", False))


_STRIKES: dict[str, Callable[[World, Fault, Random], None]] = {
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
