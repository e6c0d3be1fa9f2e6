"""The fast path's table, which needs no core."""

from __future__ import annotations

import pytest

import gradwire as gw
from gradwire.executors.fast_path import NO_FAST_PATH, RESULT_LAYOUTS, FastPath


def test_fast_path_has_one_call_per_collective_of_its_table() -> None:
    calls = set(FastPath.__annotations__)
    assert calls == set(RESULT_LAYOUTS)
    assert all(callable(getattr(gw.Group, name)) for name in calls)


@pytest.mark.parametrize("name", RESULT_LAYOUTS)
def test_fast_path_without_the_core_sends_every_call_to_the_general_path(name: str) -> None:
    assert getattr(NO_FAST_PATH, name)(1.0, "sum", None, None, "auto", None) is None
