"""Tests that each target accepts any input or refuses it with the documented error, with bounded memory."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from fuzz.catalogue import TARGETS
from fuzz.target import MIB, inputs_of

ARGUMENTS = pytest.mark.parametrize("name", TARGETS)


@pytest.fixture(autouse=True)
def nothing_logged() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@ARGUMENTS
def test_target_accepts_its_seeds(name: str) -> None:
    """Otherwise the other test would only reach the first check of each parser."""
    for seed in TARGETS[name].seeds:
        assert TARGETS[name].run(seed), seed


@ARGUMENTS
def test_target_any_input_is_accepted_or_refused_within_limits(name: str) -> None:
    target = TARGETS[name]
    target.run(target.seeds[0])  # so that imports and caches do not count

    @settings(max_examples=target.examples, database=None)
    @given(inputs_of(target))
    def feed(data: bytes) -> None:
        tracemalloc.start()
        try:
            target.run(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= target.memory + 64 * len(data), f"{peak / MIB:.1f} MiB for {len(data)} bytes"

    feed()
