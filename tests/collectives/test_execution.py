"""Tests schedules by executing them on numbers, independently of the verifier.

The executor here is as simple as possible. The three buffers of a rank share memory, which an executor may do, and
messages match as the docstring of `schedule.py` defines.
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
        inputs, outputs = execute(schedule, random.Random(size))
        for rank, out in enumerate(outputs):
            for segment, value in out.items():
                contributed = [held[segment] for held in inputs if segment in held]
                assert value == (sum(contributed) if collective in REDUCING else contributed[0]), (rank, segment)


def execute(schedule: Schedule, numbers: random.Random) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
    """Execute a schedule on random numbers; return every rank's inputs and outputs by segment."""
    ranks = range(schedule.size)
    segments = [placement(schedule.collective, schedule.size, schedule.segments, schedule.root, rank) for rank in ranks]
    inputs = [{segment: numbers.randrange(1 << 40) for segment in own} for own, _ in segments]
    executor = _Executor(schedule, inputs)
    for number in range(schedule.rounds):
        executor.send(number)
        executor.receive(number)
    return inputs, [{s: executor.memories[rank]["shared", s] for s in segments[rank][1]} for rank in ranks]


class _Executor:
    def __init__(self, schedule: Schedule, inputs: list[dict[int, int]]) -> None:
        self.schedule = schedule
        self.memories: list[Memory] = [{("shared", s): value for s, value in held.items()} for held in inputs]
        self.links: dict[tuple[int, int], list[list[int]]] = {}

    def location(self, buffer: str, segment: int) -> tuple[str, int]:
        return "acc" if buffer == "acc" and self.schedule.separate_acc else "shared", segment

    def send(self, number: int) -> None:
        for rank, memory in enumerate(self.memories):
            for op in self.schedule.program(rank)[number]:
                if isinstance(op, Send):
                    values = [memory[self.location(op.slice.buffer, s)] for s in op.slice.segments]
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
                values = [memory[self.location(src.buffer, s)] for s in src.segments]
            case Fold(dst, terms):
                values = [0] * dst.count
                for term in terms:
                    added = (
                        self.links[term.rank, rank].pop(0)
                        if isinstance(term, From)
                        else [memory[self.location(term.buffer, s)] for s in term.segments]
                    )
                    values = [a + b for a, b in zip(values, added, strict=True)]
            case Send():
                return
        for segment, value in zip(dst.segments, values, strict=True):
            memory[self.location(dst.buffer, segment)] = value
