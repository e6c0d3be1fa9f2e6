"""Tests that the table of collectives agrees with the methods of `Group` and `Stream` and with the schedules."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import gradwire as gw
from gradwire import collectives
from gradwire.operations import COLLECTIVES
from gradwire.operations.registry import Collective, result_layouts

EACH = pytest.mark.parametrize(("name", "collective"), COLLECTIVES.items(), ids=COLLECTIVES)


def parameters(function: Any, *, leave_out: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """Return name, kind and default of the parameters after the first, which is the position or `self`."""
    _, *rest = inspect.signature(function).parameters.values()
    return [(other.name, other.kind, other.default) for other in rest if other.name not in leave_out]


@EACH
def test_collective_has_a_method_on_group_with_the_parameters_of_its_builder(name: str, collective: Collective) -> None:
    method = getattr(gw.Group, name)
    assert parameters(method, leave_out=("timeout",)) == parameters(collective.build, leave_out=())
    assert "timeout" in inspect.signature(method).parameters


@EACH
def test_collective_that_takes_an_algorithm_can_be_queued_on_a_stream(name: str, collective: Collective) -> None:
    assert hasattr(gw.Stream, name) is collective.takes_algorithm


@EACH
def test_collective_runs_on_a_known_kind_of_schedule(name: str, collective: Collective) -> None:
    assert collective.schedule in collectives.COLLECTIVES


@EACH
def test_collective_is_supported_by_a_group(name: str, collective: Collective) -> None:
    with gw.init() as group:
        able = group.capabilities
    assert able.supports(name)
    assert able.supports(name, op="sum") is collective.reduces
    assert able.supports(name, algorithm=collectives.algorithms(collective.schedule)[0]) is collective.takes_algorithm


def test_schedule_of_every_kind_belongs_to_a_collective() -> None:
    assert set(collectives.COLLECTIVES) <= set(COLLECTIVES)


def test_result_layouts_lists_the_collectives_with_a_fast_path() -> None:
    assert result_layouts() == {
        "all_reduce": "ELEMENTWISE",
        "broadcast": "ELEMENTWISE",
        "barrier": "NO_ARRAY",
        "all_gather": "JOINED_ROWS",
        "reduce_scatter": "SPLIT_ROWS",
    }
