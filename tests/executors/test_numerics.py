"""Tests the numeric rules: wrap-around, NaN and signed zeros, true means, 16-bit floats summed in float32."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradwire.arrays import Array
from gradwire.collectives import algorithms
from gradwire.topology import Topology
from support.array_bits import bits
from support.crews import Crew, crew_of

EVERY = ("auto", *algorithms("all_reduce"))
HALVES = [np.float16, ml_dtypes.bfloat16]
MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}


@pytest.fixture(scope="module")
def three() -> Iterator[Crew]:
    with crew_of("local", Topology.of(["a", "b", "a"])) as crew:
        yield crew


def reduced(crew: Crew, op: str, *rows: Any, dtype: Any = np.float32, algorithm: str = "auto") -> Array:
    """Return the result, which is the same on all ranks. rows[i] is the input of rank i."""
    inputs = [np.array(row, dtype) for row in rows]
    results = crew.run(lambda group: group.all_reduce(inputs[group.rank].copy(), op, algorithm=algorithm))
    assert len({bits(result) for result in results}) == 1
    result: Array = results[0]
    return result


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_integer_sum_and_product_wrap_around(three: Crew, dtype: str, algorithm: str) -> None:
    info = np.iinfo(dtype)
    top = [info.max, info.max, info.min]
    wrapped = [np.array([value], dtype) for value in top]
    assert reduced(three, "sum", *wrapped, dtype=dtype, algorithm=algorithm) == sum(wrapped)
    assert reduced(three, "prod", *wrapped, dtype=dtype, algorithm=algorithm) == wrapped[0] * wrapped[1] * wrapped[2]


@pytest.mark.parametrize("dtype", [*HALVES, np.float32, np.float64])
@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("op", ["min", "max"])
def test_min_max_of_nan_and_signed_zeros_in_every_order(three: Crew, op: str, algorithm: str, dtype: Any) -> None:
    special = [np.nan, 0.0, -0.0, np.inf, -np.inf, 1.0, 5e-324 if dtype is np.float64 else 6e-8]
    columns = np.array(list(itertools.product(special, repeat=3)), dtype).T
    result = reduced(three, op, *columns, dtype=dtype, algorithm=algorithm)
    for got, given in zip(result, columns.T, strict=True):
        if np.isnan(given.astype(float)).any():
            assert np.isnan(float(got))
            continue
        best = min(given, key=order) if op == "min" else max(given, key=order)
        assert order(got) == order(best), given


def order(value: Any) -> tuple[float, bool]:
    """Return a sort key in which −0 is less than +0."""
    return float(value), not np.signbit(value)


@pytest.mark.parametrize("algorithm", EVERY)
def test_mean_is_a_true_division(three: Crew, algorithm: str) -> None:
    rows = [[1.0, 10.0, 1e300], [0.0, 0.0, 1e300], [0.0, 0.0, 1e300]]
    result = reduced(three, "mean", *rows, dtype=np.float64, algorithm=algorithm)
    assert result.tolist() == [1 / 3, 10 / 3, 3e300 / 3]
    third = reduced(three, "mean", [1 + 10j], [0], [0], dtype=np.complex128, algorithm=algorithm)
    assert third.tolist() == [complex(1 / 3, 10 / 3)]


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("dtype", HALVES)
def test_half_types_accumulate_in_single_precision(three: Crew, dtype: Any, algorithm: str) -> None:
    """The result of each column would be less exact if a partial sum were rounded to 16 bits."""
    big, one = (2048.0, 1.0) if dtype is np.float16 else (256.0, 1.0)  # big + one is not representable
    rows = np.array([[big, one, one], [one, big, one], [one, one, big], [big, -big, one], [one, big, -big]]).T
    assert reduced(three, "sum", *rows, dtype=dtype, algorithm=algorithm).astype(float).tolist() == [
        *[big + 2] * 3,
        *[1.0] * 2,
    ]


@pytest.mark.parametrize("algorithm", EVERY)
def test_partial_sum_beyond_the_half_type_does_not_overflow(three: Crew, algorithm: str) -> None:
    rows = np.array([[60000.0, 60000.0, -60000.0], [60000.0, -60000.0, 60000.0], [30000.0, 40000.0, -10000.0]]).T
    result = reduced(three, "mean", *rows, dtype=np.float16, algorithm=algorithm)
    assert result.tolist() == [20000.0, 20000.0, 20000.0]


def largest_of(dtype: np.dtype[Any]) -> float:
    infinity = np.array([np.inf], dtype)
    return float((infinity.view(f"u{dtype.itemsize}") - 1).view(dtype)[0])


@pytest.mark.parametrize("dtype", [*HALVES, np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("op", ["sum", "prod", "mean"])
def test_overflow_is_a_result_and_not_a_warning(three: Crew, op: str, dtype: Any) -> None:
    largest = largest_of(np.dtype(dtype).type(0).real.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = reduced(three, op, [largest, np.inf], [largest, -np.inf], [largest, np.inf], dtype=dtype)
    if op == "mean" and dtype is np.float16:  # the sum is in float32 and does not overflow
        assert float(result[0]) == largest
    else:
        assert not np.isfinite(result[0])


@pytest.mark.parametrize("algorithm", EVERY)
def test_denormals_are_kept(three: Crew, algorithm: str) -> None:
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    assert reduced(three, "sum", [tiny], [tiny], [tiny], algorithm=algorithm)[0] == 3 * tiny
    assert reduced(three, "mean", [tiny], [tiny], [tiny], algorithm=algorithm)[0] == tiny
    half = float(np.finfo(np.float16).smallest_subnormal)
    assert reduced(three, "sum", [half], [half], [half], dtype=np.float16, algorithm=algorithm)[0] == 3 * half


@pytest.mark.parametrize("algorithm", EVERY)
def test_booleans_reduce_by_or_and_and(three: Crew, algorithm: str) -> None:
    rows = [[False, True, False, True], [False, False, True, True], [False, False, False, True]]
    for op, expected in {"sum": any, "max": any, "prod": all, "min": all}.items():
        result = reduced(three, op, *rows, dtype=bool, algorithm=algorithm)
        assert result.tolist() == [expected(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 33])
def test_complex_products_have_the_same_bits_at_any_length(three: Crew, count: int) -> None:
    """NumPy's complex product uses fused multiply-add for some elements and not for others."""
    generator = np.random.default_rng(count)
    for dtype in (np.complex64, np.complex128):
        rows = (generator.normal(size=(3, count)) + 1j * generator.normal(size=(3, count))).astype(dtype)
        elementwise = [reduced(three, "prod", *rows[:, i : i + 1], dtype=dtype)[0] for i in range(count)]
        assert bits(reduced(three, "prod", *rows, dtype=dtype)) == bits(np.array(elementwise, dtype))


@pytest.mark.parametrize("dtype", [*HALVES, np.float32, np.float64])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
def test_signalling_nans_become_quiet(three: Crew, op: str, dtype: Any) -> None:
    size = np.dtype(dtype).itemsize
    quiet = np.array([np.nan], dtype).view(f"u{size}")
    bit = np.array([2 ** MANTISSA[np.dtype(dtype).name]], quiet.dtype) >> 1
    signalling = ((quiet & ~bit) | 1).view(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = three.run(lambda group: group.all_reduce(np.repeat(signalling, 9), op))
    assert all((result != result).all() for result in results)
