"""Tests small tiles: arrays of a few thousand elements have more tiles than are in flight, and short last tiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.cases import Case
from conformance.conftest import HOSTS
from conformance.strategies import cases
from conformance.test_drawn import FEW, check_call
from conformance.test_table import run
from gradwire.collectives import COLLECTIVES, algorithms
from gradwire.executors import native, plan
from gradwire.topology import Topology
from support.crews import Crew, crew_of, sizes

TILE = 256  # bytes


@pytest.fixture(scope="module", params=sizes(2, 3, 5), ids=lambda p: f"{p[0]}-{p[1]}")
def small_tiles(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """A group with tiles of 256 bytes. Its plans are cached in the group, so other tests are not affected."""
    transport, size = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "TILE_BYTES", TILE)
        patch.setattr(plan, "SMALLEST_TILE", TILE)
        patch.setattr(native, "SHARED_TILE_BYTES", TILE)
        with crew_of(transport, Topology.of(list(HOSTS[size]))) as crew:
            yield crew


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_algorithms_with_small_tiles_agree_with_the_oracle(small_tiles: Crew, collective: str) -> None:
    run(small_tiles, list(tiled(collective, small_tiles.size)))


def tiled(collective: str, size: int) -> Iterator[Case]:
    """Yield calls with less than one tile to dozens of tiles, and with segments of unequal length."""
    for algorithm in ("auto", *algorithms(collective)):
        for turn, dtype in enumerate(("float16", "float32", "int64", "complex128", "uint8", "bfloat16")):
            per_tile = TILE // Case(collective, dtype, ()).kind.itemsize
            lengths = (per_tile - 1, per_tile * size * 3 + 1, per_tile * size, per_tile * size * 10 - 1)
            for length in lengths if size < 5 else lengths[turn % 2 :: 2]:
                rows: tuple[int, ...] = (length,)
                if collective in ("all_gather", "gather", "reduce_scatter", "scatter"):
                    rows = (*(length * (rank + turn) % (2 * per_tile + 3) for rank in range(size - 1)), length)
                elif collective == "all_to_all":
                    rows = tuple(length * (i + turn) % (per_tile + 3) for i in range(size * size))
                yield Case(collective, dtype, rows, "sum", turn % size, algorithm, out=turn % 2 == 0)


@settings(max_examples=FEW)
@given(data=st.data())
def test_random_call_with_small_tiles_agrees_with_the_oracle(small_tiles: Crew, data: st.DataObject) -> None:
    check_call(small_tiles, tuple(range(small_tiles.size)), data.draw(cases(small_tiles.size)))


def test_small_tiles_fixture_splits_an_array_into_many_tiles(small_tiles: Crew) -> None:
    """Checks the fixture: the arrays of the tests above really have many tiles."""
    bounds = plan.even_bounds(10_000, 1, 4)
    from gradwire.arrays import parse_dtype
    from gradwire.collectives import build
    from gradwire.liveness.call_log import CallDescription

    tiled_plan = plan.Plan(
        build("all_reduce", "tree", 2), 0, parse_dtype("float32"), "sum", bounds, CallDescription("", "", 0)
    )
    assert tiled_plan.tiles > 10 * plan.IN_FLIGHT
