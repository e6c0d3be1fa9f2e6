"""Fault plan: which faults are injected when, from a seed alone and independent of the job. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

MACHINES = 3
WORKERS = 2  # on each machine
# Each kind comes as often as it stands here before any kind comes again.
DECK = (
    *("kill a worker",) * 3,
    *("freeze a worker",) * 3,
    "freeze a machine",
    "kill a machine",
    "kill all workers",
    *("cut two machines",) * 2,
    "cut two machines one way",
    "cut a machine off",
    "cut a machine from the coordinator",
    "cut all from the coordinator",
    *("restart the coordinator",) * 2,
    "freeze the coordinator",
    "fill the disk",
    "lose the journal",
)
FIRST = 1.0  # seconds
GAP = (0.3, 2.7)  # seconds between two faults
SHORT, LONG = (0.05, 1.5), (1.5, 6.0)  # how long a fault lasts, if it does; both are as likely


@dataclass(frozen=True)
class Fault:
    """At a time since the start. Which worker of a machine is hit is found then: `worker` counts round and round."""

    at: float
    kind: str
    machine: int
    other: int  # another machine
    worker: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.at:.1f} s: {self.kind} (machine {self.machine}, {self.other}; {self.seconds:.2f} s)"


def plan(seed: int, seconds: float) -> list[Fault]:
    """The faults of the first `seconds`.

    >>> plan(7, 100.0)[:40] == plan(7, 200.0)[:40]
    True
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    at = FIRST
    while True:
        deck = list(DECK)
        chance.shuffle(deck)
        for kind in deck:
            machine, other = chance.sample(range(MACHINES), 2)
            worker = chance.randrange(1 << 16)
            lasting = chance.uniform(*chance.choice((SHORT, LONG)))
            if at >= seconds:
                return faults
            faults.append(Fault(at, kind, machine, other, worker, lasting))
            at += chance.uniform(*GAP)
