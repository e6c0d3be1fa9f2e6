"""GroupInternals: the access of training code, adapters and job set-up to a group, beyond its public methods."""

from __future__ import annotations

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import GroupInternals
from gradwire.operations import Declined, Operation
from support.in_process import SOON
from support.in_process import pair_fixture as pair_fixture
from support.ranks import run_ranks


def test_run_of_a_declined_operation_raises_its_error_and_the_group_stays_usable(pair: list[gw.Group]) -> None:
    def program(group: gw.Group) -> float:
        declined = Declined(gw.ArrayError("there is nothing to send"))
        with pytest.raises(gw.ArrayError, match="nothing to send"):
            GroupInternals(group).run(Operation("all_reduce", lambda exchange: declined))
        return float(group.all_reduce(1.0))

    assert run_ranks(pair, program) == [2.0, 2.0]


def test_queue_runs_after_the_calls_before_it(pair: list[gw.Group]) -> None:
    def program(group: gw.Group) -> int:
        internals = GroupInternals(group)
        group.barrier()
        made = internals.queue(Operation("count", lambda exchange: internals.calls_made)).wait(SOON)
        group.barrier()
        assert internals.calls_made == 2
        return int(made)

    assert run_ranks(pair, program) == [1, 1]


def test_set_timeout_applies_to_collectives_without_a_timeout(pair: list[gw.Group]) -> None:
    GroupInternals(pair[0]).set_timeout(0.01)
    assert GroupInternals(pair[0]).timeout == 0.01
    with pytest.raises(gw.Timeout) as collective:
        pair[0].barrier()
    assert collective.value.seconds == 0.01


def test_set_timeout_applies_to_recv_without_a_timeout(pair: list[gw.Group]) -> None:
    GroupInternals(pair[0]).set_timeout(0.01)
    with pytest.raises(gw.Timeout) as message:
        pair[0].recv(np.zeros(1))
    assert message.value.seconds == 0.01


def test_form_makes_a_group_in_the_order_of_its_ranks(pair: list[gw.Group]) -> None:
    def program(group: gw.Group) -> tuple[int, list[int]]:
        with GroupInternals(group).form([1, 0], instance=-1) as turned:
            return turned.rank, turned.all_gather_values(group.rank)

    assert run_ranks(pair, program) == [(1, [1, 0]), (0, [1, 0])]


def test_gather_returns_values_by_rank_and_is_counted(pair: list[gw.Group]) -> None:
    def program(group: gw.Group) -> tuple[list[int], int]:
        internals = GroupInternals(group)
        before = internals.gathers
        return internals.gather(group.rank, "counting"), internals.gathers - before

    assert run_ranks(pair, program) == [([0, 1], 1)] * 2


def test_internals_of_an_aborted_then_closed_group_report_its_state(pair: list[gw.Group]) -> None:
    internals = GroupInternals(pair[0])
    internals.check()
    assert (internals.is_broken, internals.is_closed, internals.is_left_behind) == (False, False, False)
    pair[0].abort("enough")
    assert (internals.is_broken, internals.is_closed) == (True, False)
    with pytest.raises(gw.Aborted):
        internals.check("step")
    pair[0].close()
    assert internals.is_closed
