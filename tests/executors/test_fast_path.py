"""Tests the part of the fast path that works without the native core."""

from __future__ import annotations

import pytest

from gradwire.executors.fast_path import FastPath
from gradwire.operations.registry import result_layouts


@pytest.mark.parametrize("name", result_layouts())
def test_fast_path_without_the_core_sends_every_call_to_the_general_path(name: str) -> None:
    assert getattr(FastPath(result_layouts()), name)(1.0, "sum", None, None, "auto", None) is None
