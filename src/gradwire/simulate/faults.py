"""Define the kinds of faults of a simulated job, and draw faults from the seed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from random import Random

ENDLESS = 1e6  # seconds; longer than any simulated job


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that begins `at` a time and lasts for `seconds`. `seed` decides which processes it affects."""

    kind: str
    at: float
    seconds: float
    seed: int

    @property
    def over_at(self) -> float:
        """Return when the fault ends. An endless fault counts as over at once: the job must continue in spite of it."""
        return self.at + (self.seconds if self.seconds < ENDLESS else 0.0)


# By kind: its weight in the draw, its shortest and its longest duration in seconds.
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

LASTING = ("freeze", "cut", "exile", "isolate")  # kinds that may be endless; the other members must continue


def chosen(text: str) -> frozenset[str]:
    """Return the kinds that a text names: "usual", "rare", "all", or kinds separated by commas."""
    sets = {"usual": USUAL.keys(), "rare": RARE.keys(), "all": KINDS.keys()}
    kinds = frozenset(kind for name in text.split(",") for kind in sets.get(name, {name}))
    if not kinds <= KINDS.keys():
        raise ValueError(f"unknown kinds of faults: {', '.join(sorted(kinds - KINDS.keys()))}")
    return kinds


def named(kinds: Collection[str]) -> str:
    """Return the text that names these kinds on a command line: the inverse of `chosen`."""
    for name in ("usual", "rare", "all"):
        if chosen(name) == frozenset(kinds):
            return name
    return ",".join(sorted(kinds))


def command(seed: int, members: int | None, kinds: Collection[str]) -> str:
    """Return the command that simulates this job again."""
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
    """Return `fewest` to `most` faults of a table between two times, in order.

    With probability 0.6 a fault follows the previous one closely (0.3 s on average): overlapping faults are the
    hardest case.
    """
    kinds = [kind for kind in table if kind in chosen]
    if not kinds:
        return []
    weights = [table[kind][0] for kind in kinds]
    faults: list[Fault] = []
    for kind in random.choices(kinds, weights, k=random.randint(fewest, most)):
        follows = faults and random.random() < 0.6
        at = faults[-1].at + random.expovariate(3.0) if follows else random.uniform(first, last)
        _, shortest, longest = table[kind]
        seconds = shortest * (longest / shortest) ** random.random() if shortest else 0.0
        faults.append(Fault(kind, min(at, last), seconds, random.getrandbits(32)))
    lasting = [index for index, fault in enumerate(faults) if fault.kind in LASTING]
    if lasting and random.random() < 0.2:
        index = random.choice(lasting)
        faults[index] = replace(faults[index], seconds=ENDLESS)
    return sorted(faults, key=lambda fault: fault.at)
