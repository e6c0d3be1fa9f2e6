"""Gradients for tests, and groups of threads that synchronise them: over in-process links and over shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import Array
from support.crews import TRANSPORTS
from support.ranks import closing

LIKE = {"a": np.zeros((3, 4), np.float32), "b": np.zeros(7, np.float32), "c": np.zeros((), np.float32)}
SMALL: dict[str, Any] = {"bucket_bytes": 64, "first_bucket_bytes": 64}  # each gradient gets a bucket of its own


@pytest.fixture(params=["local", "shm"], name="three")
def three_fixture(request: pytest.FixtureRequest) -> Iterator[list[gw.Group]]:
    if request.param not in TRANSPORTS:
        pytest.skip(f"the transport {request.param} is not available")
    with closing(TRANSPORTS[request.param](gw.Topology.single(3))) as groups:
        yield groups


@pytest.fixture(name="pair")
def pair_fixture() -> Iterator[list[gw.Group]]:
    with closing(gw.local_group(2)) as groups:
        yield groups


def some(rank: int, like: dict[str, Array] = LIKE) -> dict[str, Array]:
    """Return random gradients of a rank."""
    random = np.random.default_rng(rank)
    return {name: np.asarray(random.normal(size=one.shape)).astype(one.dtype) for name, one in like.items()}


def copied(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: array.copy() for name, array in arrays.items()}


def bits(arrays: dict[str, Array]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}
