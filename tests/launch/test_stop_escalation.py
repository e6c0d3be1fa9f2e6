"""Which signals are due when a job is stopped."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM

import pytest

from gradwire.launch.stop_escalation import StopEscalation


def all_signals(escalation: StopEscalation) -> list[tuple[float, int]]:
    steps = []
    while (time := escalation.next_due) is not None:
        steps += [(time, int(number)) for number in escalation.due(time)]
    return steps


def test_escalation_without_a_failure_has_nothing_due() -> None:
    escalation = StopEscalation(grace=3, kill_after=10)
    assert escalation.next_due is None
    assert escalation.due(1e9) == []


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (SIGINT, [(100, SIGINT), (110, SIGTERM), (113, SIGKILL)]),
        (SIGTERM, [(100, SIGTERM), (110, SIGKILL)]),
        (SIGHUP, [(100, SIGHUP), (110, SIGKILL)]),
        (SIGKILL, [(100, SIGKILL)]),
    ],
)
def test_escalation_request_begins_with_its_signal(number: int, expected: list[tuple[float, int]]) -> None:
    escalation = StopEscalation(grace=3, kill_after=10)
    escalation.asked(number, now=100)
    assert all_signals(escalation) == expected


def test_escalation_failure_leaves_a_grace_and_a_second_failure_changes_nothing() -> None:
    escalation = StopEscalation(grace=3, kill_after=10)
    escalation.failed(now=100)
    escalation.failed(now=102)
    assert all_signals(escalation) == [(103, SIGTERM), (113, SIGKILL)]
    escalation.failed(now=200)
    assert all_signals(escalation) == []


def test_escalation_request_never_delays_the_kill() -> None:
    escalation = StopEscalation(grace=3, kill_after=10)
    escalation.failed(now=100)
    escalation.asked(SIGINT, now=102)
    assert all_signals(escalation) == [(102, SIGINT), (112, SIGTERM), (113, SIGKILL)]


def test_escalation_request_to_kill_is_due_at_once() -> None:
    escalation = StopEscalation(grace=3, kill_after=10)
    escalation.asked(SIGTERM, now=100)
    assert escalation.due(100) == [SIGTERM]
    escalation.asked(SIGKILL, now=101)
    assert all_signals(escalation) == [(101, SIGKILL)]
