"""Whether a job continues after a loss, replaces the worker, or has failed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradwire.launch.restart_policy import Backoff, EndKind, Restarts, Verdict

GO_ON, REPLACE, GIVE_UP = Verdict.GO_ON, Verdict.REPLACE, Verdict.GIVE_UP
WELL, LOST, ERROR, REFUSED = EndKind.WELL, EndKind.LOST, EndKind.ERROR, EndKind.REFUSED


def job(size: int, minimum: int, restarts: int = 0, *, fixed: bool = False) -> Restarts:
    made = Restarts(minimum=minimum, restarts=restarts, fixed=fixed)
    for number in range(size):
        made.started(number)
    return made


def test_fixed_job_gives_up_after_any_failure() -> None:
    for end in (LOST, ERROR, REFUSED):
        first, last = job(3, 3, fixed=True), job(3, 3, fixed=True)
        assert first.ended(1, end) is GIVE_UP
        assert [last.ended(0, WELL), last.ended(1, WELL), last.ended(2, end)] == [GO_ON, GO_ON, GIVE_UP]


def test_lost_worker_is_replaced_while_restarts_are_left() -> None:
    elastic = job(3, 2, restarts=1)
    assert elastic.ended(1, LOST) is REPLACE
    elastic.started(3)
    assert elastic.ended(3, ERROR) is GO_ON  # two are left, and two are enough
    assert elastic.ended(0, LOST) is GIVE_UP


def test_workers_lost_all_at_once_are_all_replaced() -> None:
    elastic = job(2, 2, restarts=2)
    assert [elastic.ended(number, LOST) for number in (0, 1)] == [REPLACE, REPLACE]


def test_last_worker_lost_without_restarts_fails_the_job() -> None:
    elastic = job(2, 1)
    assert [elastic.ended(number, LOST) for number in (0, 1)] == [GO_ON, GIVE_UP]


def test_worker_that_leaves_is_no_failure() -> None:
    elastic = job(3, 2)
    assert [elastic.ended(number, WELL) for number in range(3)] == [GO_ON, GO_ON, GO_ON]


def test_loss_after_others_finished_does_not_fail_the_job() -> None:
    """Nor is it replaced: a newcomer would begin the work anew."""
    elastic = job(2, 2, restarts=3)
    assert [elastic.ended(0, WELL), elastic.ended(1, LOST)] == [GO_ON, GO_ON]
    assert elastic.used == 0


def test_newcomer_turned_away_too_late_does_not_fail_the_job() -> None:
    elastic = job(2, 2, restarts=1)
    assert elastic.ended(1, LOST) is REPLACE
    elastic.started(2)
    assert [elastic.ended(0, WELL), elastic.ended(2, REFUSED)] == [GO_ON, GO_ON]


def test_worker_that_was_turned_away_is_not_replaced() -> None:
    elastic = job(2, 1, restarts=5)
    assert [elastic.ended(0, REFUSED), elastic.ended(1, REFUSED)] == [GO_ON, GIVE_UP]


def test_error_after_others_finished_fails_the_job() -> None:
    """Think of the rank that writes the model and finds the disk full."""
    elastic = job(3, 1, restarts=3)
    assert [elastic.ended(1, WELL), elastic.ended(2, WELL), elastic.ended(0, ERROR)] == [GO_ON, GO_ON, GIVE_UP]


def test_error_counts_unless_the_others_regrouped() -> None:
    elastic = job(4, 1)
    assert elastic.ended(0, ERROR, failed=10.0) is GO_ON
    assert elastic.errors == [0]
    elastic.regrouped(11.0)
    assert elastic.errors == []
    assert elastic.ended(1, ERROR, failed=10.5) is GO_ON  # its process took its time to end
    assert elastic.errors == []
    assert elastic.ended(2, ERROR, failed=12.0) is GO_ON
    assert elastic.errors == [2]


def test_worker_that_left_before_a_regrouping_has_not_finished_the_job() -> None:
    elastic = job(3, 2)
    assert elastic.ended(0, WELL) is GO_ON
    elastic.regrouped(1.0)
    assert elastic.ended(1, LOST) is GIVE_UP


def test_members_of_other_launchers_count_towards_the_minimum() -> None:
    elastic = job(2, 2)
    elastic.remote = 2
    assert [elastic.ended(0, LOST), elastic.ended(1, LOST)] == [GO_ON, GO_ON]


def test_stopping_job_replaces_no_worker() -> None:
    elastic = job(2, 1, restarts=5)
    elastic.stopping = True
    assert [elastic.ended(0, LOST), elastic.ended(1, LOST)] == [GO_ON, GIVE_UP]


def test_finished_job_replaces_no_worker() -> None:
    """Those that are left wait to join, and learn that there is nothing to join."""
    elastic = job(5, 3, restarts=5)
    assert [elastic.ended(0, WELL), elastic.ended(1, LOST)] == [GO_ON, REPLACE]
    elastic.done = True
    assert [elastic.ended(2, LOST), elastic.ended(3, REFUSED), elastic.ended(4, LOST)] == [GO_ON] * 3


def test_loss_without_a_coordinator_fails_the_job() -> None:
    elastic = job(4, 1, restarts=5)
    elastic.recoverable = False
    assert elastic.ended(0, LOST) is GIVE_UP


@given(st.integers(1, 6), st.data())
def test_any_history_of_a_job_ends(size: int, data: st.DataObject) -> None:
    """It goes on without a verdict to give up only if somebody finished; the restarts are never exceeded."""
    minimum, restarts = data.draw(st.integers(1, size)), data.draw(st.integers(0, 5))
    elastic = job(size, minimum, restarts)
    number, gave_up = size, False
    while elastic.living:
        end = data.draw(st.sampled_from(EndKind))
        verdict = elastic.ended(data.draw(st.sampled_from(sorted(elastic.living))), end)
        assert end is not WELL or verdict is GO_ON
        if verdict is REPLACE:
            assert not gave_up
            elastic.started(number)
            number += 1
        gave_up = gave_up or verdict is GIVE_UP
        elastic.stopping = gave_up
    assert number - size == elastic.used <= restarts
    assert gave_up or elastic.finished >= 1


def test_backoff_of_repeated_early_deaths_grows_to_a_bound() -> None:
    backoff = Backoff(first=1.0, longest=30.0)
    delays = [backoff.delay(3.0, killed=False) for _ in range(2000)]
    assert delays[:7] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert set(delays[7:]) == {30.0}


def test_backoff_after_a_long_life_starts_over() -> None:
    backoff = Backoff(first=1.0, longest=30.0)
    lives = [3.0, 3.0, 60.0, 3.0]
    assert [backoff.delay(lived, killed=False) for lived in lives] == [0.0, 1.0, 0.0, 1.0]


def test_backoff_of_a_killed_process_counts_only_early_deaths() -> None:
    backoff = Backoff(first=1.0, longest=30.0)
    assert [backoff.delay(3.0, killed=True) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert [backoff.delay(0.1, killed=True) for _ in range(2)] == [1.0, 2.0]


def test_delay_counts_by_local_rank() -> None:
    elastic = job(2, 1, restarts=9)
    assert [elastic.delay(0, 1.0, killed=False) for _ in range(3)] == [0.0, 1.0, 2.0]
    assert elastic.delay(1, 1.0, killed=False) == 0.0


def test_pending_replacement_counts_as_a_living_worker() -> None:
    elastic = job(2, 2, restarts=1)
    assert elastic.ended(0, ERROR) is REPLACE
    elastic.pending = 1
    assert elastic.ended(1, LOST) is GIVE_UP  # one of two
    assert not elastic.over
    elastic = job(3, 2, restarts=1)
    assert elastic.ended(0, ERROR) is REPLACE
    elastic.pending = 1
    assert elastic.ended(1, LOST) is GO_ON


def test_pending_replacement_is_not_started_when_the_others_are_done() -> None:
    elastic = job(2, 1, restarts=1)
    assert elastic.ended(0, ERROR) is REPLACE
    elastic.pending = 1
    assert elastic.ended(1, WELL) is GO_ON
    assert elastic.over
