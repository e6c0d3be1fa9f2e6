from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradwire.launch.restarts import Restarts, Verdict

GO_ON, REPLACE, GIVE_UP = Verdict.GO_ON, Verdict.REPLACE, Verdict.GIVE_UP


def job(size: int, minimum: int, restarts: int = 0) -> Restarts:
    made = Restarts(minimum=minimum, restarts=restarts)
    for number in range(size):
        made.started(number)
    return made


def test_in_a_job_of_fixed_members_any_failure_is_the_end() -> None:
    fixed = job(3, 3)
    assert fixed.ended(0, well=True) is GO_ON
    assert fixed.ended(1, well=False) is GIVE_UP
    last = job(2, 2)
    assert (last.ended(0, well=True), last.ended(1, well=False)) == (GO_ON, GIVE_UP)


def test_who_is_lost_is_replaced_while_there_are_restarts() -> None:
    elastic = job(3, 2, restarts=1)
    assert elastic.ended(1, well=False) is REPLACE
    elastic.started(3)
    assert elastic.ended(3, well=False) is GO_ON  # two are left, and two are enough
    assert elastic.ended(0, well=False) is GIVE_UP


def test_all_may_be_lost_at_once_and_be_replaced() -> None:
    elastic = job(2, 2, restarts=2)
    assert [elastic.ended(number, well=False) for number in (0, 1)] == [REPLACE, REPLACE]


def test_leaving_is_no_failure() -> None:
    elastic = job(3, 2)
    assert [elastic.ended(number, well=True) for number in range(3)] == [GO_ON, GO_ON, GO_ON]


def test_a_loss_among_the_last_does_not_spoil_what_enough_have_finished() -> None:
    elastic = job(4, 2, restarts=3)
    assert [elastic.ended(number, well=True) for number in range(3)] == [GO_ON, GO_ON, GO_ON]
    assert elastic.ended(3, well=False) is GO_ON
    assert elastic.used == 0  # a newcomer would be alone


def test_but_a_leaver_does_not_make_a_failed_job_a_good_one() -> None:
    elastic = job(3, 2)
    assert elastic.ended(0, well=True) is GO_ON
    assert elastic.ended(1, well=False) is GO_ON
    assert elastic.ended(2, well=False) is GIVE_UP


def test_members_elsewhere_count() -> None:
    elastic = job(2, 2)
    elastic.elsewhere = 1
    assert elastic.ended(0, well=False) is GO_ON
    assert elastic.ended(1, well=False) is GIVE_UP


def test_nobody_is_replaced_in_a_job_that_ends() -> None:
    elastic = job(2, 1, restarts=5)
    elastic.stopping = True
    assert elastic.ended(0, well=False) is GO_ON
    assert elastic.ended(1, well=False) is GIVE_UP


def test_without_a_coordinator_a_loss_is_the_end() -> None:
    elastic = job(4, 1, restarts=5)
    elastic.recoverable = False
    assert elastic.ended(0, well=False) is GIVE_UP


@given(st.integers(1, 6), st.data())
def test_every_job_comes_to_an_end(size: int, data: st.DataObject) -> None:
    """And it failed exactly if a verdict said so; the restarts are never exceeded."""
    minimum, restarts = data.draw(st.integers(1, size)), data.draw(st.integers(0, 5))
    elastic = job(size, minimum, restarts)
    number, gave_up = size, False
    while elastic.living:
        well = data.draw(st.booleans())
        verdict = elastic.ended(data.draw(st.sampled_from(sorted(elastic.living))), well=well)
        assert not (well and verdict is not GO_ON)
        if verdict is REPLACE:
            assert not gave_up
            elastic.started(number)
            number += 1
        gave_up = gave_up or verdict is GIVE_UP
        elastic.stopping = gave_up
    assert elastic.used <= restarts
    assert number - size == elastic.used
    assert gave_up or elastic.finished >= 1
