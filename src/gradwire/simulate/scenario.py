"""Draw the size, timings and faults of a simulated job from its seed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random

from gradwire.collectives import algorithms
from gradwire.simulate import faults
from gradwire.simulate.faults import Fault
from gradwire.simulate.network import Quality

FIRST_FAULT, LAST_FAULT = 0.05, 12.0  # seconds
MOST_FAULTS = 8
LAST_RARE = 20.0  # seconds
MOST_RARE = 3


@dataclass(frozen=True, slots=True)
class Scenario:
    """The parameters of a simulated job."""

    start: int = 4
    minimum: int = 2
    maximum: int = 6
    hosts: int = 4
    launchers: bool = False
    restarts: int = 2  # of each launcher
    lease: float = 10.0
    settle: float = 0.1
    step_seconds: float = 0.3
    transfer_seconds: float = 0.0  # the duration of a state transfer
    in_place_every: int = 8  # in each sequence of this many steps, every rank has one step whose body works in place
    reduce_algorithm: str = "ring"
    vote_algorithm: str = "tree"
    gather_algorithm: str = "direct"
    durable: bool = True  # the coordinator's journal survives a power loss
    checkpoints: bool = False
    quality: Quality = field(default_factory=Quality)
    faults: tuple[Fault, ...] = ()

    @property
    def lossless(self) -> bool:
        """Return whether the network loses nothing, so that only a fault can make a member look lost."""
        return self.quality.lost == 0.0 and self.quality.calls_lost == 0.0


def draw_scenario(
    seed: int, random: Random, members: int | None = None, kinds: Collection[str] = faults.USUAL
) -> Scenario:
    """Return the scenario of a seed. `members` overrides the number of members at the start."""
    rare = Random(f"rare faults of {seed}")  # a separate generator: rare faults do not change the rest of the scenario
    start = members or random.randint(3, 6)
    rough = random.random() < 0.2
    quality = Quality(
        latency=random.choice((0.0001, 0.0005, 0.005)),
        jitter=random.choice((0.0001, 0.001, 0.005)),
        bandwidth=random.choice((1e6, 1e8)),
        lost=0.005 if rough else 0.0,
        late=random.choice((0.0, 0.02, 0.1)),
        lateness=0.15,
        calls_lost=random.choice((0.0, 0.0, 0.05)),
        calls_twice=random.choice((0.0, 0.05)),
    )
    return Scenario(
        start=start,
        minimum=random.randint(1, start),
        maximum=start + random.randint(0, 2),
        hosts=random.randint(1, start),
        launchers=random.random() < 0.5,
        restarts=random.randint(0, 2),
        lease=random.choice((6.0, 10.0)),
        settle=0.1,
        step_seconds=random.choice((0.1, 0.3, 0.6)),
        transfer_seconds=random.choice((0.0, 0.2, 1.0)),
        in_place_every=random.choice((8, 16)),
        reduce_algorithm=random.choice(algorithms("all_reduce")),
        vote_algorithm=random.choice(algorithms("all_reduce")),
        gather_algorithm=random.choice(algorithms("all_gather")),
        quality=quality,
        durable=rare.random() < 0.5,
        checkpoints=Random(f"checkpoints of {seed}").random() < 0.3,
        faults=tuple(
            sorted(
                [
                    *faults.draw(random, faults.USUAL, kinds, MOST_FAULTS, FIRST_FAULT, LAST_FAULT),
                    *faults.draw(rare, faults.RARE, kinds, MOST_RARE, FIRST_FAULT, LAST_RARE, fewest=1),
                ],
                key=lambda fault: fault.at,
            )
        ),
    )
