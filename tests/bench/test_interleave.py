"""The order of measurements: engines take fair turns, and an engine that cannot run a case is left out."""

from __future__ import annotations

from collections import Counter

import pytest

from gradwire.bench.cases import Case
from gradwire.bench.engine_processes import Block, block_of
from gradwire.bench.engines.base import Unsupported
from gradwire.bench.interleave import MAX_ITERATIONS, MIN_ITERATIONS, PILOT_ITERATIONS, Plan, measure_case, turns

CASE = Case("all_reduce", "float32", "sum", 2, 2)


class FakeEngine:
    """Records each request for a block."""

    def __init__(self, name: str, journal: list[tuple[str, int]], pace: float = 0.01, can: bool = True) -> None:
        self.name, self._journal, self._pace, self._can = name, journal, pace, can

    def block(self, case: Case, iterations: int) -> Block:
        if not self._can:
            raise Unsupported("not today")
        self._journal.append((self.name, iterations))
        return Block(us=1.0, longest_us=1.0, wrong=0, iterations=iterations, pace=self._pace)


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcde"])
def test_turns_over_all_rounds_give_each_engine_each_place_equally_often(names: str) -> None:
    rounds = [turns(names, number) for number in range(2 * len(names))]
    for place in range(len(names)):
        assert set(Counter(order[place] for order in rounds).values()) == {2}


def test_measure_case_with_two_engines_alternates_their_blocks_after_the_pilots() -> None:
    journal: list[tuple[str, int]] = []
    engines = [FakeEngine("gradwire", journal), FakeEngine("gloo", journal)]
    result = measure_case(engines, CASE, Plan(2, blocks=3, iterations=50))
    assert journal[:2] == [("gradwire", PILOT_ITERATIONS), ("gloo", PILOT_ITERATIONS)]
    assert [name for name, _ in journal[2:]] == ["gradwire", "gloo", "gloo", "gradwire", "gloo", "gradwire"]
    assert {iterations for _, iterations in journal[2:]} == {50}
    assert {name: len(blocks) for name, blocks in result.blocks.items()} == {"gradwire": 3, "gloo": 3}


def test_measure_case_by_seconds_gives_each_engine_the_iterations_that_fit() -> None:
    journal: list[tuple[str, int]] = []
    paces = {"fast": 1e-6, "medium": 0.01, "slow": 10.0}
    engines = [FakeEngine(name, journal, pace) for name, pace in paces.items()]
    measure_case(engines, CASE, Plan(2, blocks=1, seconds=0.5))
    assert dict(journal[3:]) == {"fast": MAX_ITERATIONS, "medium": 50, "slow": MIN_ITERATIONS}


def test_measure_case_with_an_unable_engine_omits_it_and_records_the_reason() -> None:
    journal: list[tuple[str, int]] = []
    able, unable = FakeEngine("gradwire", journal), FakeEngine("mpich", journal, can=False)
    result = measure_case([able, unable], CASE, Plan(2, blocks=2))
    assert list(result.blocks) == ["gradwire"]
    assert result.unsupported == {"mpich": "not today"}
    assert not measure_case([unable], CASE, Plan(2)).blocks


def test_block_of_ranks_times_from_the_last_call_to_the_last_return() -> None:
    answers = [
        {"begins": [0, 100_000], "ends": [9_000, 107_000], "wrong": 1},
        {"begins": [4_000, 102_000], "ends": [8_000, 109_000], "wrong": 2},
    ]
    block = block_of(answers, CASE)
    assert (block.us, block.longest_us, block.wrong, block.iterations) == (6.0, 8.0, 3, 2)
    assert block.pace == pytest.approx(107_000 / 2 / 1e9)


def test_block_of_a_barrier_that_returns_early_counts_it_as_wrong() -> None:
    answers = [{"begins": [0, 0], "ends": [9, 3], "wrong": 0}, {"begins": [4, 4], "ends": [8, 8], "wrong": 0}]
    assert block_of(answers, Case("barrier", "float32", "none", 0, 2)).wrong == 1
