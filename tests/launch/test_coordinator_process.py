"""When a coordinator process that has ended is restarted."""

from __future__ import annotations

from gradwire.launch.coordinator_process import RestartSchedule


def test_coordinator_process_that_was_killed_restarts_at_once() -> None:
    schedule = RestartSchedule()
    assert [schedule.delay(2.0, killed=True, answered=True) for _ in range(20)] == [0.0] * 20


def test_coordinator_process_that_keeps_dying_restarts_after_growing_delays() -> None:
    schedule = RestartSchedule()
    delays = [schedule.delay(0.1, killed=True, answered=True) for _ in range(10)]
    assert delays[:4] == [0.0, 0.2, 0.4, 0.8]
    assert delays[-1] == 5.0
    assert schedule.delay(60.0, killed=True, answered=True) == 0.0  # it had recovered


def test_coordinator_process_that_cannot_start_is_not_restarted() -> None:
    assert RestartSchedule().delay(0.1, killed=False, answered=False) is None
    assert RestartSchedule().delay(0.1, killed=True, answered=False) == 0.0


def test_coordinator_process_that_always_fails_is_given_up() -> None:
    schedule = RestartSchedule()
    delays = [schedule.delay(0.1, killed=False, answered=True) for _ in range(6)]
    assert None not in delays[:5]
    assert delays[5] is None
