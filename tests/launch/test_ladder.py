from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM

import pytest

from gradwire.launch.ladder import Ladder


def climb(ladder: Ladder) -> list[tuple[float, int]]:
    steps = []
    while (time := ladder.next_due) is not None:
        steps += [(time, int(number)) for number in ladder.due(time)]
    return steps


def test_nothing_is_due_while_all_is_well() -> None:
    ladder = Ladder(grace=3, kill_after=10)
    assert ladder.next_due is None
    assert ladder.due(1e9) == []


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (SIGINT, [(100, SIGINT), (110, SIGTERM), (113, SIGKILL)]),
        (SIGTERM, [(100, SIGTERM), (110, SIGKILL)]),
        (SIGHUP, [(100, SIGHUP), (110, SIGKILL)]),
        (SIGKILL, [(100, SIGKILL)]),
    ],
)
def test_a_request_begins_with_its_signal(number: int, expected: list[tuple[float, int]]) -> None:
    ladder = Ladder(grace=3, kill_after=10)
    ladder.asked(number, now=100)
    assert climb(ladder) == expected


def test_a_failure_leaves_a_grace_and_a_second_failure_changes_nothing() -> None:
    ladder = Ladder(grace=3, kill_after=10)
    ladder.failed(now=100)
    ladder.failed(now=102)
    assert climb(ladder) == [(103, SIGTERM), (113, SIGKILL)]
    ladder.failed(now=200)
    assert climb(ladder) == []


def test_no_request_moves_the_kill_to_later() -> None:
    ladder = Ladder(grace=3, kill_after=10)
    ladder.failed(now=100)
    ladder.asked(SIGINT, now=102)
    assert climb(ladder) == [(102, SIGINT), (112, SIGTERM), (113, SIGKILL)]


def test_a_request_to_kill_comes_at_once() -> None:
    ladder = Ladder(grace=3, kill_after=10)
    ladder.asked(SIGTERM, now=100)
    assert ladder.due(100) == [SIGTERM]
    ladder.asked(SIGKILL, now=101)
    assert climb(ladder) == [(101, SIGKILL)]
