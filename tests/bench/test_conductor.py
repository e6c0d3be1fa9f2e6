"""Whose turn it is: fair, and without those who cannot."""

from __future__ import annotations

from collections import Counter

import pytest

from gradwire.bench.cases import Case
from gradwire.bench.conductor import LEAST, MOST, PILOT, Plan, conduct, turns
from gradwire.bench.crew import Block, Unsupported, block_of

CASE = Case("all_reduce", "float32", "sum", 2, 2)


class Fake:
    """A crew that only notes when it was asked."""

    def __init__(self, name: str, journal: list[tuple[str, int]], pace: float = 0.01, can: bool = True) -> None:
        self.name, self._journal, self._pace, self._can = name, journal, pace, can

    def block(self, case: Case, iterations: int) -> Block:
        if not self._can:
            raise Unsupported("not today")
        self._journal.append((self.name, iterations))
        return Block(us=1.0, longest_us=1.0, wrong=0, iterations=iterations, pace=self._pace)


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcde"])
def test_everybody_has_each_place_equally_often(names: str) -> None:
    rounds = [turns(names, number) for number in range(2 * len(names))]
    for place in range(len(names)):
        assert set(Counter(order[place] for order in rounds).values()) == {2}


def test_blocks_take_turns_after_a_pilot_each() -> None:
    journal: list[tuple[str, int]] = []
    crews = [Fake("gradwire", journal), Fake("gloo", journal)]
    result = conduct(crews, CASE, Plan(2, blocks=3, iterations=50))
    assert journal[:2] == [("gradwire", PILOT), ("gloo", PILOT)]
    assert [name for name, _ in journal[2:]] == ["gradwire", "gloo", "gloo", "gradwire", "gloo", "gradwire"]
    assert {iterations for _, iterations in journal[2:]} == {50}
    assert {name: len(blocks) for name, blocks in result.blocks.items()} == {"gradwire": 3, "gloo": 3}


def test_by_time_each_engine_does_what_it_can() -> None:
    journal: list[tuple[str, int]] = []
    crews = [Fake("quick", journal, 1e-6), Fake("middling", journal, 0.01), Fake("slow", journal, 10.0)]
    conduct(crews, CASE, Plan(2, blocks=1, seconds=0.5))
    assert dict(journal[3:]) == {"quick": MOST, "middling": 50, "slow": LEAST}


def test_who_cannot_is_left_out_and_the_reason_kept() -> None:
    journal: list[tuple[str, int]] = []
    result = conduct([Fake("gradwire", journal), Fake("mpich", journal, can=False)], CASE, Plan(2, blocks=2))
    assert list(result.blocks) == ["gradwire"]
    assert result.unsupported == {"mpich": "not today"}
    assert not conduct([Fake("mpich", journal, can=False)], CASE, Plan(2)).blocks


def test_time_runs_from_the_last_call_to_the_last_return() -> None:
    answers = [
        {"begins": [0, 100_000], "ends": [9_000, 107_000], "wrong": 1},
        {"begins": [4_000, 102_000], "ends": [8_000, 109_000], "wrong": 2},
    ]
    block = block_of(answers, CASE)
    assert (block.us, block.longest_us, block.wrong, block.iterations) == (6.0, 8.0, 3, 2)
    assert block.pace == pytest.approx(107_000 / 2 / 1e9)


def test_a_barrier_that_lets_somebody_through_early_is_wrong() -> None:
    answers = [{"begins": [0, 0], "ends": [9, 3], "wrong": 0}, {"begins": [4, 4], "ends": [8, 8], "wrong": 0}]
    assert block_of(answers, Case("barrier", "float32", "none", 0, 2)).wrong == 1
