"""What the verifier proves is what happens: schedules carried out on numbers, in the simplest way there is.

Each rank's three buffers are laid over each other, as an executor may do, and messages are matched as the words of
`schedule.py` say. This knows nothing of expressions; it only computes.
"""

from __future__ import annotations

import random

import pytest

from gradwire.collectives import REDUCING, Copy, Finish, Fold, From, Operation, Recv, Schedule, Send, placement
from support.schedule_table import CELLS, schedules

Memory = dict[tuple[str, int], int]


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7])
@pytest.mark.parametrize(("collective", "algorithm"), CELLS)
def test_schedule_executed_on_numbers_gives_the_collectives_result(collective: str, algorithm: str, size: int) -> None:
    for schedule in schedules(collective, algorithm, size, roots=2):
        inputs, outputs = carry_out(schedule, random.Random(size))
        for rank, out in enumerate(outputs):
            for segment, value in out.items():
                given = [held[segment] for held in inputs if segment in held]
                assert value == (sum(given) if collective in REDUCING else given[0]), (rank, segment)


def carry_out(schedule: Schedule, numbers: random.Random) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
    """Every rank's inputs and outputs by segment."""
    ranks = range(schedule.size)
    places = [placement(schedule.collective, schedule.size, schedule.segments, schedule.root, rank) for rank in ranks]
    inputs = [{segment: numbers.randrange(1 << 40) for segment in brought} for brought, _ in places]
    machine = _Machine(schedule, inputs)
    for number in range(schedule.rounds):
        machine.send(number)
        machine.receive(number)
    return inputs, [{s: machine.memories[rank]["shared", s] for s in places[rank][1]} for rank in ranks]


class _Machine:
    def __init__(self, schedule: Schedule, inputs: list[dict[int, int]]) -> None:
        self.schedule = schedule
        self.memories: list[Memory] = [{("shared", s): value for s, value in held.items()} for held in inputs]
        self.links: dict[tuple[int, int], list[list[int]]] = {}

    def place(self, buffer: str, segment: int) -> tuple[str, int]:
        return "acc" if buffer == "acc" and self.schedule.separate_acc else "shared", segment

    def send(self, number: int) -> None:
        for rank, memory in enumerate(self.memories):
            for op in self.schedule.program(rank)[number]:
                if isinstance(op, Send):
                    values = [memory[self.place(op.slice.buffer, s)] for s in op.slice.segments]
                    for to in op.to:
                        self.links.setdefault((rank, to), []).append(values)

    def receive(self, number: int) -> None:
        for rank, memory in enumerate(self.memories):
            for op in self.schedule.program(rank)[number]:
                self.apply(rank, memory, op)
        assert not any(self.links.values())

    def apply(self, rank: int, memory: Memory, op: Operation) -> None:
        match op:
            case Recv(dst, source):
                values = self.links[source, rank].pop(0)
            case Copy(dst, src) | Finish(dst, src):
                values = [memory[self.place(src.buffer, s)] for s in src.segments]
            case Fold(dst, terms):
                values = [0] * dst.count
                for term in terms:
                    more = (
                        self.links[term.rank, rank].pop(0)
                        if isinstance(term, From)
                        else [memory[self.place(term.buffer, s)] for s in term.segments]
                    )
                    values = [a + b for a, b in zip(values, more, strict=True)]
            case Send():
                return
        for segment, value in zip(dst.segments, values, strict=True):
            memory[self.place(dst.buffer, segment)] = value
