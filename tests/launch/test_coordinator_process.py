"""When a coordinator process that ended is started anew."""

from __future__ import annotations

from gradwire.launch.coordinator_process import RestartSchedule


def test_coordinator_process_that_was_killed_restarts_at_once() -> None:
    revival = RestartSchedule()
    assert [revival.delay(2.0, killed=True, answered=True) for _ in range(20)] == [0.0] * 20


def test_coordinator_process_that_keeps_dying_restarts_after_growing_delays() -> None:
    revival = RestartSchedule()
    delays = [revival.delay(0.1, killed=True, answered=True) for _ in range(10)]
    assert delays[:4] == [0.0, 0.2, 0.4, 0.8]
    assert delays[-1] == 5.0
    assert revival.delay(60.0, killed=True, answered=True) == 0.0  # it had recovered


def test_coordinator_process_that_cannot_begin_is_not_restarted() -> None:
    assert RestartSchedule().delay(0.1, killed=False, answered=False) is None
    assert RestartSchedule().delay(0.1, killed=True, answered=False) == 0.0


def test_coordinator_process_that_always_fails_is_given_up() -> None:
    revival = RestartSchedule()
    delays = [revival.delay(0.1, killed=False, answered=True) for _ in range(6)]
    assert None not in delays[:5]
    assert delays[5] is None
