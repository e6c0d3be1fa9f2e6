"""What happens to a simulated job: drawn from the seed beforehand, and done to whoever is there when it is time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.simulate.worker import Worker
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
KINDS: dict[str, tuple[int, float, float]] = {
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


LASTING = ("freeze", "cut", "exile", "isolate")  # what may never end; the rest of the job must not mind


def draw(random: Random, most: int, first: float, last: float) -> list[Fault]:
    """Up to `most` faults between two times, in order. Some come in quick succession: that is where it gets hard."""
    kinds = list(KINDS)
    weights = [KINDS[kind][0] for kind in kinds]
    faults: list[Fault] = []
    for kind in random.choices(kinds, weights, k=random.randint(0, most)):
        near = faults and random.random() < 0.6
        at = faults[-1].at + random.expovariate(3.0) if near else random.uniform(first, last)
        _, shortest, longest = KINDS[kind]
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
}
