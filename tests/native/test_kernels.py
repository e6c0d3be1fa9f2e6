"""Tests that the kernels of the core give the bits of the Python rules, in every build that this processor can run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradwire.arrays import Array, DType, parse_dtype
from gradwire.executors import numerics

native = pytest.importorskip("gradwire._native", reason="the native core is not built")
kernels: Any = native.kernels

OPS = native.ReduceOp.__members__
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES = ["float16", "bfloat16", "float32", "float64", *INTEGERS, "bool", "complex64", "complex128"]
COUNTS = [0, 1, 7, 1023, 1024, 1025, 5000]  # a block has 256 to 4096 elements
FEW = [7, 1025, 5000]
TERMS = [1, 2, 3, 4, 5, 8]
CASES = [(dtype, op) for dtype in DTYPES for op in OPS if op in parse_dtype(dtype).ops]

builds = pytest.mark.parametrize("build", kernels.builds())


def code_of(dtype: DType) -> Any:
    return native.DType[dtype.name]


def random_values(count: int, dtype: np.dtype[Any], generator: np.random.Generator) -> Array:
    """Return random bits, mixed with small numbers and special values such as NaN and denormals."""
    if dtype == np.bool_:
        return generator.integers(0, 2, count).astype(bool)
    if dtype.kind == "c":
        part = np.empty(0, dtype).real.dtype
        return random_values(2 * count, part, generator).view(dtype)
    values = generator.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    if dtype.kind in "iu":
        return values
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    least = info.smallest_subnormal
    edges = [np.nan, np.inf, 0.0, 1.0, info.max, info.tiny, least, info.tiny - least]
    special = np.array([sign * np.float64(edge) for edge in edges for sign in (1, -1)]).astype(dtype)
    chosen = generator.integers(0, 3, count)
    small = generator.normal(size=count).astype(dtype)
    return np.where(chosen == 0, values, np.where(chosen == 1, generator.choice(special, count), small))


def unaligned(array: Array, offset: int) -> Array:
    """Return a copy as bytes, at an address with this offset from a multiple of 64."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    copy: Array = memory[begin : begin + array.nbytes]
    copy[:] = array.view(np.uint8)
    return copy


def folded(op: str, dtype: DType, terms: list[Array]) -> Array:
    """Return the fold by the Python rules."""
    combine = numerics.combiner(op, dtype.accumulator)
    value = terms[0].astype(dtype.accumulator)
    for term in terms[1:]:
        combine(value, term.astype(dtype.accumulator), value)
    return value


def finished(dtype: DType, partial: Array, divisor: int | None) -> Array:
    result = np.empty(partial.size, dtype.storage)
    numerics.finish(result, partial.copy(), divisor)
    return result


def assert_same(got: Array, expected: Array) -> None:
    """Assert that the bits are equal; all NaNs count as equal."""
    assert got.dtype == expected.dtype
    if got.dtype.kind == "c":
        got, expected = got.view(got.real.dtype), expected.view(expected.real.dtype)
    bits = f"u{got.dtype.itemsize}"
    same = got.view(bits) == expected.view(bits)
    if got.dtype.kind not in "iub":
        same |= (got != got) & (expected != expected)
    wrong = np.flatnonzero(~same)
    assert not wrong.size, f"{wrong.size} differ, first at {wrong[0]}: {got[wrong[0]]!r}, not {expected[wrong[0]]!r}"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with numerics.quiet():
        yield


# --- folds


def shapes(dtype: DType, counts: list[int]) -> Iterator[tuple[int, tuple[bool, ...]]]:
    """Yield (number of elements, which terms are partial): none, and if partial terms are possible, other patterns."""
    for count, number in itertools.product(counts, TERMS):
        patterns = {(False,) * number}
        if dtype.widens:
            patterns |= {(True,) * number, (True, *[False] * (number - 1)), (*[False] * (number - 1), True)}
            patterns |= {tuple(index % 2 == 1 for index in range(number))}
        for pattern in sorted(patterns):
            yield count, pattern


def some_terms(dtype: DType, count: int, partial: tuple[bool, ...]) -> list[Array]:
    generator = np.random.default_rng([dtype.code, count, *partial])
    return [random_values(count, dtype.accumulator if wide else dtype.storage, generator) for wide in partial]


@builds
@pytest.mark.parametrize(("name", "op"), CASES)
def test_fold_gives_the_bits_of_the_python_rules(build: str, name: str, op: str) -> None:
    dtype = parse_dtype(name)
    for count, partial in shapes(dtype, COUNTS):
        terms = some_terms(dtype, count, partial)
        expected = folded(op, dtype, terms)
        for shift in (0, 1):
            copies = [unaligned(term, shift * (2 * index + 1)) for index, term in enumerate(terms)]
            result = unaligned(np.zeros(count, dtype.accumulator), shift * 3)
            kernels.fold(build, code_of(dtype), OPS[op], result, list(zip(copies, partial, strict=True)))
            assert_same(result.copy().view(dtype.accumulator), expected)
            assert all((copy == term.view(np.uint8)).all() for copy, term in zip(copies, terms, strict=True))


@builds
@pytest.mark.parametrize(("name", "op"), CASES)
def test_fold_into_one_of_its_terms_gives_the_same_bits(build: str, name: str, op: str) -> None:
    dtype = parse_dtype(name)
    for count, partial in shapes(dtype, FEW):
        terms = some_terms(dtype, count, partial)
        expected = folded(op, dtype, terms)
        result_type = [index for index, wide in enumerate(partial) if wide or not dtype.widens]
        for target in result_type:
            copies = [unaligned(term, 0) for term in terms]
            kernels.fold(build, code_of(dtype), OPS[op], copies[target], list(zip(copies, partial, strict=True)))
            assert_same(copies[target].copy().view(dtype.accumulator), expected)


@builds
def test_fold_of_bool_treats_any_nonzero_byte_as_true(build: str) -> None:
    dtype = parse_dtype("bool")
    a = np.arange(256, dtype=np.uint8).repeat(3)
    b = np.tile(np.array([0, 1, 128], np.uint8), 256)
    for op, expected in {"sum": (a != 0) | (b != 0), "prod": (a != 0) & (b != 0)}.items():
        result = np.empty_like(a)
        kernels.fold(build, code_of(dtype), OPS[op], result, [(a, False), (b, False)])
        assert (result == expected.astype(np.uint8)).all()


# --- finishes


@builds
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("divisor", [None, 1, 2, 3, 7, 2**24 + 1])
def test_finish_gives_the_bits_of_the_python_rules(build: str, name: str, divisor: int | None) -> None:
    dtype = parse_dtype(name)
    if divisor is not None and "mean" not in dtype.ops:
        return
    for count, shift in itertools.product(COUNTS, (0, 1)):
        partial = random_values(count, dtype.accumulator, np.random.default_rng([dtype.code, count]))
        result = unaligned(np.zeros(count, dtype.storage), shift)
        kernels.finish(build, code_of(dtype), OPS["sum"], result, unaligned(partial, shift * 3), divisor or 0)
        assert_same(result.copy().view(dtype.storage), finished(dtype, partial, divisor))
        if not dtype.widens:
            in_place = unaligned(partial, shift)
            kernels.finish(build, code_of(dtype), OPS["sum"], in_place, in_place, divisor or 0)
            assert_same(in_place.copy().view(dtype.storage), finished(dtype, partial, divisor))


@builds
@pytest.mark.parametrize(("name", "op"), CASES)
def test_reduce_gives_the_bits_of_fold_and_finish(build: str, name: str, op: str) -> None:
    dtype = parse_dtype(name)
    divisor = 3 if "mean" in dtype.ops and op == "sum" else None
    for count, partial in shapes(dtype, FEW):
        terms = some_terms(dtype, count, partial)
        expected = finished(dtype, folded(op, dtype, terms), divisor)
        separate = unaligned(np.zeros(count, dtype.storage), 1)
        inputs = list(zip(map(raw, terms), partial, strict=True))
        kernels.reduce(build, code_of(dtype), OPS[op], separate, inputs, divisor or 0)
        assert_same(separate.copy().view(dtype.storage), expected)
        for target in [index for index, wide in enumerate(partial) if not wide]:
            copies = [unaligned(term, 0) for term in terms]
            inputs = list(zip(copies, partial, strict=True))
            kernels.reduce(build, code_of(dtype), OPS[op], copies[target], inputs, divisor or 0)
            assert_same(copies[target].copy().view(dtype.storage), expected)


def raw(array: Array) -> Array:
    return array.view(np.uint8)


# --- 16-bit floats


@builds
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_fold_and_finish_of_every_half_value_return_it_unchanged(build: str, name: str) -> None:
    dtype = parse_dtype(name)
    halves = np.arange(2**16, dtype=np.uint16).view(dtype.storage)
    for offset in (0, 1):  # so that each value is converted with the vector unit and without it
        wide = np.empty(halves.size - offset, np.float32)
        kernels.fold(build, code_of(dtype), OPS["sum"], raw(wide), [(raw(halves[offset:]), False)])
        assert_same(wide, halves[offset:].astype(np.float32))
        for begin in (0, wide.size - 7):
            back = np.empty(wide.size - begin, np.uint16)
            kernels.finish(build, code_of(dtype), OPS["sum"], back, raw(wide[begin:]), 0)
            assert_same(back.view(dtype.storage), halves[offset + begin :])


@builds
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_finish_rounds_floats_to_the_nearest_half_and_ties_to_even(build: str, name: str) -> None:
    dtype = parse_dtype(name)
    for wide in (around_halves(dtype), around_rounding_bits()):
        narrow = np.empty(wide.size, np.uint16)
        kernels.finish(build, code_of(dtype), OPS["sum"], narrow, raw(wide), 0)
        assert_same(narrow.view(dtype.storage), wide.astype(dtype.storage))
        few = np.empty(7, np.uint16)  # too few for the vector unit
        for begin in range(0, wide.size - 7, wide.size // 5000 or 1):
            kernels.finish(build, code_of(dtype), OPS["sum"], few, raw(wide[begin : begin + 7]), 0)
            assert_same(few.view(dtype.storage), narrow[begin : begin + 7].view(dtype.storage))


def around_halves(dtype: DType) -> Array:
    """Return each 16-bit value, the midpoint between it and the next, and the floats just below and above these."""
    halves = np.arange(2**16, dtype=np.uint16).view(dtype.storage).astype(np.float64)
    middles = (halves[:-1] + halves[1:]) / 2
    points = np.concatenate([halves, middles]).astype(np.float32)
    bits = points[np.isfinite(points)].view(np.uint32)
    return np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1]).view(np.float32)


def around_rounding_bits() -> Array:
    """Return floats with all values of the upper 16 bits, and lower bits around each bit that may decide a rounding."""
    edges = [0, *(1 << position for position in range(16))]
    lower = np.unique([(edge + step) % 2**16 for edge in edges for step in (-1, 0, 1)]).astype(np.uint32)
    upper = np.arange(2**16, dtype=np.uint32) << 16
    result: Array = (upper[:, None] | lower).ravel().view(np.float32)
    return result


# --- the state of the processor


@contextmanager
def processor(change: int) -> Iterator[None]:
    before = kernels.float_state()
    kernels.set_float_state(before | change)
    try:
        yield
        assert kernels.float_state() == before | change, "the kernel changed the state"
    finally:
        kernels.set_float_state(before)


@pytest.mark.skipif(not kernels.FLUSHES, reason="float_state does not support this processor")
@builds
@pytest.mark.parametrize("state", ["FLUSHES", "UPWARDS"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_kernels_under_another_float_state_give_the_same_bits_and_keep_the_state(
    build: str, name: str, state: str
) -> None:
    dtype = parse_dtype(name)
    generator = np.random.default_rng(dtype.code)
    terms = [random_values(1000, dtype.storage, generator) for _ in range(3)]
    ops = [op for op in OPS if op in dtype.ops]
    sums = {op: folded(op, dtype, terms) for op in ops}
    results = {op: np.empty(1000, dtype.accumulator) for op in ops}
    means = {op: np.empty(1000, dtype.storage) for op in ops}
    reduced = {op: np.empty(1000, dtype.storage) for op in ops}
    inputs = [(raw(term), False) for term in terms]
    with processor(getattr(kernels, state)):
        for op in ops:
            kernels.fold(build, code_of(dtype), OPS[op], raw(results[op]), inputs)
            kernels.finish(build, code_of(dtype), OPS[op], raw(means[op]), raw(results[op]), 3)
            kernels.reduce(build, code_of(dtype), OPS[op], raw(reduced[op]), inputs, 3)
    for op in ops:
        assert_same(results[op], sums[op])
        assert_same(means[op], finished(dtype, sums[op], 3))
        assert_same(reduced[op], means[op])


@pytest.mark.skipif(not kernels.FLUSHES, reason="float_state does not support this processor")
def test_set_float_state_changes_how_numpy_computes() -> None:
    tiny, one = np.full(1, np.finfo(np.float32).smallest_subnormal), np.ones(1, np.float32)
    with processor(kernels.FLUSHES):
        flushed = (tiny + tiny).view(np.uint32).item()
    with processor(kernels.UPWARDS):
        above = (one + np.float32(1e-30)).view(np.uint32).item()
    assert flushed == 0
    assert above == one.view(np.uint32).item() + 1


# --- checks of gradients

FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


@builds
@pytest.mark.parametrize("name", FLOATS)
def test_all_finite_and_copy_finite_find_a_nonfinite_value_anywhere(build: str, name: str) -> None:
    dtype = parse_dtype(name)
    part = np.empty(0, dtype.storage).real.dtype
    info: Any = ml_dtypes.finfo(part)  # type: ignore[no-untyped-call]
    good = np.resize(np.array([0.0, -0.0, info.max, info.min, info.smallest_subnormal, 1.0]).astype(part), 5000)
    for count in [*COUNTS, 4, 8, 64, 2048 + 2]:
        count -= count % (dtype.itemsize // part.itemsize)
        for shift in (0, 1):
            source = unaligned(good[:count], shift)
            assert native.all_finite(code_of(dtype), source, build)
            target = unaligned(np.zeros_like(good[:count]), 1 - shift)
            assert native.copy_finite(code_of(dtype), target, source, build)
            assert (target == source).all()
            for at in {0, count // 2, count - 1} if count else ():
                for bad in (np.nan, -np.nan, np.inf, -np.inf):
                    with_bad = good[:count].copy()
                    with_bad[at] = bad
                    assert not native.all_finite(code_of(dtype), unaligned(with_bad, shift), build), (
                        count,
                        at,
                        bad,
                    )
                    assert not native.copy_finite(code_of(dtype), target, unaligned(with_bad, shift), build)
                    assert (target == with_bad.view(np.uint8)).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_all_finite_of_half_values_agrees_with_numpy(name: str) -> None:
    halves = np.arange(2**16, dtype=np.uint16)
    dtype = parse_dtype(name)
    expected = np.isfinite(halves.view(dtype.storage))
    for build in kernels.builds():
        found = [native.all_finite(code_of(dtype), halves[i : i + 1], build) for i in range(0, 2**16, 7)]
        assert found == expected[::7].tolist()


@builds
@pytest.mark.parametrize("name", FLOATS)
def test_sum_squares_adds_in_double_precision(build: str, name: str) -> None:
    dtype = parse_dtype(name)
    for count in COUNTS:
        values = np.random.default_rng(count).normal(size=count).astype(dtype.storage)
        parts = values.view(values.real.dtype).astype(np.float64)
        for shift in (0, 1):
            found = native.sum_squares(code_of(dtype), unaligned(values, shift), build)
            assert found == pytest.approx(math.fsum(parts * parts), rel=1e-14)
    large = np.full(3, 1e30, np.float32)  # the squares would overflow in float32
    assert native.sum_squares(native.DType.float32, raw(large), build) == pytest.approx(3e60)


def test_gradient_kernels_with_wrong_arguments_raise_value_error() -> None:
    with pytest.raises(ValueError, match="no infinity"):
        native.all_finite(native.DType.int32, np.zeros(4, np.uint8))
    with pytest.raises(ValueError, match="differ in their number"):
        native.copy_finite(native.DType.float32, np.zeros(4, np.uint8), np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match="within an element"):
        native.sum_squares(native.DType.float32, np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="no kernels for sse9"):
        native.all_finite(native.DType.float32, np.zeros(4, np.uint8), "sse9")


# --- wrong arguments


def test_kernels_with_wrong_arguments_raise() -> None:
    four, eight = np.zeros(4, np.uint8), np.zeros(8, np.uint8)
    code, op = native.DType.float32, OPS["sum"]
    with pytest.raises(ValueError, match="differ in their number"):
        kernels.fold("base", code, op, four, [(eight, False)])
    with pytest.raises(ValueError, match="needs a term"):
        kernels.fold("base", code, op, four, [])
    with pytest.raises(ValueError, match="within an element"):
        kernels.finish("base", code, op, four[:3], four, 0)
    with pytest.raises(ValueError, match="not defined"):
        kernels.fold("base", native.DType.complex64, OPS["min"], eight, [(eight, False)])
    with pytest.raises(ValueError, match="no kernels for sse9"):
        kernels.fold("sse9", code, op, four, [(four, False)])
    with pytest.raises(BufferError):
        kernels.fold("base", code, op, b"1234", [(four, False)])
