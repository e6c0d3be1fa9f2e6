"""Checks for finite arrays and sums of squares: the native core and pure Python give the same results."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.arrays import parse_dtype
from gradwire.training import finite, norms


@pytest.fixture(params=["core", "pure"], autouse=True, name="mode")
def mode_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pure":
        monkeypatch.setenv("GRADWIRE_PURE", "1")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_all_finite_one_non_finite_element_is_found_at_any_position(dtype: str) -> None:
    array = np.ones(3 * finite.CHUNK // 2, parse_dtype(dtype).storage)
    assert finite.all_finite(array)
    for at in (0, finite.CHUNK - 1, finite.CHUNK, -1):
        for bad in (np.nan, np.inf, -np.inf):
            faulty = array.copy()
            faulty[at] = bad
            assert not finite.all_finite(faulty)
            assert not finite.copy_finite(array.copy(), faulty)


def test_finite_empty_array_is_finite_and_copy_may_overlap() -> None:
    assert finite.all_finite(np.zeros((0, 3)))
    place = np.arange(6.0)
    finite.copy_finite(place[1:], place[:-1])
    assert place.tolist() == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_squares_are_summed_in_double_precision(dtype: str) -> None:
    array = np.full(2 * norms.CHUNK + 5, 3, parse_dtype(dtype).storage)
    assert norms.squares(array) == 9 * array.size
    assert norms.squares(np.full(2, 1e30, np.float32)) == pytest.approx(2e60)
