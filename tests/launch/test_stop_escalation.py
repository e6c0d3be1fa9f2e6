"""Which signals are due when a job is stopped."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR2

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
        (SIGUSR2, [(100, SIGUSR2), (110, SIGKILL)]),
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


@pytest.mark.parametrize("number", [SIGTERM, SIGUSR2])
def test_escalation_request_to_workers_that_watch_has_the_stop_timeout(number: int) -> None:
    escalation = StopEscalation(grace=3, kill_after=0, stop_timeout=120)
    escalation.asked(number, now=100, watching=True)
    assert all_signals(escalation) == [(100, number), (220, SIGKILL)]


@pytest.mark.parametrize("number", [SIGTERM, SIGUSR2])
@pytest.mark.parametrize("agreed", [False, True])
def test_escalation_workers_that_leave_after_a_request_have_the_stop_timeout(number: int, agreed: bool) -> None:
    escalation = StopEscalation(grace=3, kill_after=10, stop_timeout=120)
    escalation.asked(number, now=100)
    escalation.leaving(now=100, agreed=agreed)
    assert escalation.due(100) == [number]
    escalation.leaving(now=105, agreed=True)
    assert all_signals(escalation) == [(220, SIGKILL)]


def test_escalation_without_a_request_waits_for_the_agreement() -> None:
    escalation = StopEscalation(grace=3, kill_after=10, stop_timeout=120)
    escalation.leaving(now=100, agreed=False)
    assert escalation.next_due is None
    escalation.leaving(now=130, agreed=True)
    assert all_signals(escalation) == [(250, SIGKILL)]


def test_escalation_request_while_workers_leave_moves_the_kill_to_no_later_time() -> None:
    escalation = StopEscalation(grace=3, kill_after=10, stop_timeout=120)
    escalation.leaving(now=100, agreed=True)
    escalation.asked(SIGTERM, now=150)
    assert all_signals(escalation) == [(150, SIGTERM), (220, SIGKILL)]


@pytest.mark.parametrize("number", [SIGINT, SIGHUP, SIGKILL])
def test_escalation_other_requests_leave_no_time_for_a_checkpoint(number: int) -> None:
    escalation, expected = StopEscalation(3, 10, 120), StopEscalation(3, 10, 120)
    for one in (escalation, expected):
        one.asked(number, now=100, watching=one is escalation)
    escalation.leaving(now=101, agreed=True)
    assert all_signals(escalation) == all_signals(expected)


def test_escalation_interrupt_while_workers_leave_keeps_its_schedule() -> None:
    escalation = StopEscalation(grace=3, kill_after=10, stop_timeout=120)
    escalation.leaving(now=100, agreed=True)
    escalation.asked(SIGINT, now=110)
    assert all_signals(escalation) == [(110, SIGINT), (120, SIGTERM), (123, SIGKILL)]


def test_escalation_hangup_while_workers_leave_keeps_its_schedule() -> None:
    escalation = StopEscalation(grace=3, kill_after=10, stop_timeout=120)
    escalation.leaving(now=100, agreed=True)
    escalation.asked(SIGHUP, now=110)
    assert all_signals(escalation) == [(110, SIGHUP), (120, SIGKILL)]


def test_escalation_failure_while_workers_leave_sends_no_sigterm_and_ends_sooner() -> None:
    escalation = StopEscalation(grace=3, kill_after=10, stop_timeout=120)
    escalation.leaving(now=100, agreed=True)
    escalation.failed(now=110)
    assert all_signals(escalation) == [(123, SIGKILL)]


def test_escalation_after_a_failure_waits_for_the_agreement() -> None:
    escalation = StopEscalation(grace=3, kill_after=10, stop_timeout=120)
    escalation.failed(now=100)
    escalation.leaving(now=101, agreed=False)
    assert escalation.next_due == 103
    escalation.leaving(now=102, agreed=True)
    assert all_signals(escalation) == [(222, SIGKILL)]
