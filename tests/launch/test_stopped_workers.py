"""Which workers that a signal has stopped are given up."""

from __future__ import annotations

from gradwire.launch.elastic_setup import RESUME_SECONDS, StoppedWorkers


def test_stopped_worker_that_continues_in_time_is_kept() -> None:
    frozen = StoppedWorkers()
    for now, paused, generation in [(0.0, True, 1), (3.0, True, 2), (3.5, False, 2), (60.0, True, 2), (61.0, True, 3)]:
        assert not frozen.lost(0, paused=paused, generation=generation, all_paused=False, now=now)


def test_stopped_worker_is_lost_after_a_generation_without_it() -> None:
    frozen = StoppedWorkers()
    assert not frozen.lost(0, paused=True, generation=1, all_paused=False, now=0.0)
    assert not frozen.lost(0, paused=True, generation=2, all_paused=False, now=RESUME_SECONDS - 0.1)
    assert frozen.lost(0, paused=True, generation=2, all_paused=False, now=RESUME_SECONDS)


def test_stopped_workers_are_kept_while_no_generation_forms_without_them() -> None:
    frozen = StoppedWorkers()
    for number in range(3):
        for now in (0.0, RESUME_SECONDS, 3600.0):
            assert not frozen.lost(number, paused=True, generation=1, all_paused=False, now=now)


def test_stopped_worker_is_lost_when_the_others_have_finished() -> None:
    frozen = StoppedWorkers()
    assert not frozen.lost(0, paused=True, generation=1, all_paused=True, now=0.0)
    assert frozen.lost(0, paused=True, generation=1, all_paused=True, now=RESUME_SECONDS)
