"""Tests arrays, numbers and buffers as arguments: which are accepted, the results, and the errors for the others."""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import DType, as_array, dtype_of, number_as_array, parse_dtype, view
from gradwire.topology import Topology
from support.crews import Crew, crew_of


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    with crew_of("local", Topology.single(2)) as crew:
        yield crew


class Foreign:
    """A tensor of another library, which supports DLPack and nothing else."""

    def __init__(self, values: Any, device: int = 1) -> None:
        self.values = np.asarray(values)
        self.device = device

    def __dlpack__(self, **named: Any) -> Any:
        return self.values.__dlpack__(**named)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


# -- layouts and buffers -----------------------------------------------------------------------------------------------


def base() -> Any:
    return np.arange(24, dtype=np.float32)


def unaligned() -> Any:
    memory = np.zeros(6 * 4 + 1, np.uint8)
    x = memory[1:].view(np.float32)
    x[:] = np.arange(6)
    assert not x.flags.aligned
    return x


LAYOUTS: dict[str, Callable[[], Any]] = {
    "contiguous": base,
    "zero-dimensional": lambda: np.array(3.0),
    "empty": lambda: np.empty((0, 3)),
    "strided": lambda: base()[::3],
    "negative strides": lambda: base()[::-2],
    "transposed": lambda: base().reshape(2, 3, 4).transpose(2, 0, 1),
    "Fortran order": lambda: np.asfortranarray(base().reshape(4, 6)),
    "a column": lambda: base().reshape(4, 6)[:, 2],
    "reversed rows": lambda: base().reshape(4, 6)[::-1],
    "unaligned": unaligned,
    "a matrix": lambda: np.matrix([[1.0, 2.0], [3.0, 4.0]]),
    "a matrix's column": lambda: np.matrix([[1.0, 2.0], [3.0, 4.0]])[:, 0],
    "half": lambda: base().astype(np.float16)[::2],
    "bfloat16": lambda: base().astype(ml_dtypes.bfloat16)[::2],
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_all_reduce_of_an_array_of_any_layout_is_in_place(two: Crew, make: Callable[[], Any]) -> None:
    def reduce(group: gw.Group) -> None:
        x = make()
        before = np.array(x)
        assert group.all_reduce(x) is x
        assert (x.shape, x.dtype) == (before.shape, before.dtype)
        assert np.array_equal(np.asarray(x), before * 2)

    two.run(reduce)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_collectives_with_a_separate_result_leave_x_of_any_layout_unchanged(two: Crew, make: Callable[[], Any]) -> None:
    def call(group: gw.Group) -> None:
        x, before = make(), np.array(make())
        out = np.zeros_like(np.array(x))
        assert group.all_reduce(x, out=out) is out
        assert np.array_equal(out, before * 2)
        result = group.reduce(x, root=1)
        assert result is None if group.rank == 0 else np.array_equal(result, before * 2)
        joined = group.all_gather(x)
        assert np.array_equal(joined, np.concatenate([before, before] if before.ndim else [[before], [before]]))
        assert np.array_equal(np.asarray(x), before)

    two.run(call)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_all_reduce_and_broadcast_write_into_an_array_of_any_layout(two: Crew, make: Callable[[], Any]) -> None:
    def call(group: gw.Group) -> None:
        x, out = np.array(make()), make()
        assert group.all_reduce(x, out=out) is out
        assert np.array_equal(np.asarray(out), x * 2)
        y = make()
        y[...] = y if group.rank == 0 else 0
        assert group.broadcast(y) is y
        assert np.array_equal(np.asarray(y), np.array(make()))

    two.run(call)


BUFFERS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(b"\1\2\3"),
    "memoryview": lambda: memoryview(bytearray(b"\1\2\3")),
    "a strided memoryview": lambda: memoryview(bytearray(b"\1\2\3\4"))[::2],
    "array.array": lambda: array.array("d", [1.0, 2.0]),
    "ctypes": lambda: (ctypes.c_int32 * 3)(1, 2, 3),
    "mmap": lambda: mmap.mmap(-1, 5),
    "DLPack": lambda: Foreign([1.0, 2.0]),
}


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_all_reduce_of_buffers_and_dlpack_tensors_is_in_place(two: Crew, make: Callable[[], Any]) -> None:
    if not as_array(make()).flags.writeable:
        pytest.skip("DLPack arrays are read-only in this version of NumPy")

    def reduce(group: gw.Group) -> None:
        x = make()
        before = as_array(x).copy()
        assert group.all_reduce(x) is x
        assert np.array_equal(as_array(x), before * 2)

    two.run(reduce)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "int8"])
def test_parse_dtype_of_a_name_returns_its_row(dtype: str) -> None:
    row = parse_dtype(dtype)
    assert isinstance(row, DType)
    assert row.name == dtype
    assert dtype_of(np.zeros(1, row.storage)) is row


def test_dtype_of_platform_aliases_is_the_same_row() -> None:
    assert dtype_of(np.zeros(1, "longlong")) is dtype_of(np.zeros(1, "long")) is parse_dtype(int)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "op", "expected"),
    [
        (3, "sum", 6),
        (2.5, "mean", 2.5),
        (-0.0, "min", -0.0),
        (True, "sum", True),
        (1 + 2j, "sum", 2 + 4j),
        (2**62, "max", 2**62),
        (-(2**63), "min", -(2**63)),
        (np.float32(1.5), "sum", np.float32(3)),
        (np.int8(100), "sum", np.int8(-56)),
        (np.float16(1), "mean", np.float16(1)),
        (ml_dtypes.bfloat16(2), "prod", ml_dtypes.bfloat16(4)),
        (np.bool_(False), "max", np.bool_(False)),
    ],
)
def test_all_reduce_of_a_number_returns_a_number_of_its_type(two: Crew, number: Any, op: str, expected: Any) -> None:
    for result in two.run(lambda group: group.all_reduce(number, op)):
        assert type(result) is type(number)
        assert result == expected
        assert repr(result) == repr(expected)


def test_all_reduce_max_with_a_nan_returns_nan(two: Crew) -> None:
    for result in two.run(lambda group: group.all_reduce(float("nan") if group.rank else 1.0, "max")):
        assert result != result


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30])
def test_number_as_array_of_an_integer_beyond_64_bits_raises_array_error(number: int) -> None:
    with pytest.raises(gw.ArrayError, match="does not fit into a 64-bit integer"):
        number_as_array(number)


@pytest.mark.parametrize("number", [Decimal("2.5"), Fraction(5, 2)])
def test_all_reduce_of_a_decimal_or_fraction_raises_array_error(single_rank: gw.Group, number: Any) -> None:
    with pytest.raises(gw.ArrayError, match=r"pass float\(x\)"):
        single_rank.all_reduce(number)


# -- unsupported arguments ---------------------------------------------------------------------------------------------


@pytest.fixture
def single_rank() -> Iterator[gw.Group]:
    with gw.init() as group:
        yield group


def read_only(x: Any) -> Any:
    x = np.array(x)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("x", [read_only([1.0]), b"abc", memoryview(b"abc")], ids=["array", "bytes", "memoryview"])
def test_all_reduce_of_a_read_only_array_needs_out(single_rank: gw.Group, x: Any) -> None:
    with pytest.raises(gw.ArrayError, match="out="):
        single_rank.all_reduce(x)
    assert np.array_equal(single_rank.all_reduce(x, out=np.zeros_like(as_array(x))), as_array(x))
    assert single_rank.broadcast(x) is x  # the root only reads it
    assert np.array_equal(single_rank.all_gather(x), as_array(x))


def test_broadcast_into_a_read_only_array_raises_array_error(two: Crew) -> None:
    def call(group: gw.Group) -> None:
        if group.rank == 1:
            with pytest.raises(gw.ArrayError, match="read-only: pass a copy"):
                group.broadcast(read_only([1.0]))

    two.run(call)


REFUSED: dict[str, tuple[Any, str]] = {
    "objects": (np.array([object()]), "dtype object cannot be exchanged; supported dtypes: float16, bfloat16"),
    "strings": (np.array(["a"]), "cannot be exchanged"),
    "bytes": (np.array([b"a"]), "cannot be exchanged"),
    "dates": (np.array(["2020-01-01"], "datetime64[D]"), "cannot be exchanged"),
    "durations": (np.array([1], "timedelta64[s]"), "cannot be exchanged"),
    "records": (np.zeros(2, "i4,f4"), "cannot be exchanged"),
    "a recarray": (np.zeros(2, "i4,f4").view(np.recarray), "cannot be exchanged"),
    "long doubles": (np.zeros(2, np.longdouble), "cannot be exchanged"),
    "big-endian": (np.zeros(2, ">f4"), r"native byte order: pass x.astype\('float32'\)"),
    "masked": (np.ma.masked_array([1.0, 2.0], [True, False]), "mask would be lost"),
    "None": (None, "expected an array, got NoneType"),
    "a string": ("text", "expected an array, got str"),
    "a list": ([1.0, 2.0], r"pass numpy.asarray\(x\)"),
    "a set": ({1}, r"pass numpy.asarray\(x\)"),
    "a released buffer": (memoryview(b"x"), "neither"),
    "a tensor on a device": (Foreign([1.0], device=2), r"not in CPU memory \(DLPack device type 2\)"),
}
REFUSED["a released buffer"][0].release()


@pytest.mark.parametrize(("x", "words"), REFUSED.values(), ids=REFUSED)
def test_collectives_of_an_unsupported_object_or_dtype_raise_array_error(
    single_rank: gw.Group, x: Any, words: str
) -> None:
    for call in (
        single_rank.all_reduce,
        single_rank.broadcast,
        single_rank.reduce,
        single_rank.all_gather,
        single_rank.all_to_all,
    ):
        with pytest.raises(gw.ArrayError, match=words):
            call(x)
    with pytest.raises(gw.ArrayError, match=words):
        single_rank.all_reduce_named({"w": x})


def test_all_gather_of_a_number_and_out_for_a_number_raise_array_error(single_rank: gw.Group) -> None:
    for x in (1, 2.5, np.float32(1), np.bool_(True)):
        with pytest.raises(gw.ArrayError, match="broadcast_value and all_gather_values take plain values"):
            single_rank.all_gather(x)
    with pytest.raises(gw.ArrayError, match="no out="):
        single_rank.all_reduce(1.0, out=np.zeros(1))


def test_all_reduce_of_a_read_only_dlpack_tensor_needs_out(single_rank: gw.Group) -> None:
    class Old(Foreign):
        def __dlpack__(self, **named: Any) -> Any:
            return self.values.__dlpack__()  # the unversioned capsule, which NumPy treats as read-only

    with pytest.raises(gw.ArrayError, match=r"read-only through DLPack .*: pass out="):
        single_rank.all_reduce(Old([1.0]))
    assert single_rank.all_reduce(Old([1.0]), out=np.zeros(1)).tolist() == [1.0]


def test_all_reduce_of_a_tensor_that_refuses_dlpack_raises_array_error(single_rank: gw.Group) -> None:
    class Graph(Foreign):
        def __dlpack__(self, **named: Any) -> Any:
            raise BufferError("it requires grad")

    with pytest.raises(gw.ArrayError, match="Graph cannot be viewed through DLPack: it requires grad"):
        single_rank.all_reduce(Graph([1.0]))


# -- out ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "out", [np.zeros(2), np.zeros((2, 2)), np.zeros(3, np.float32), np.zeros(3, int)], ids=lambda out: str(out.dtype)
)
def test_out_of_another_size_or_dtype_raises_array_error(single_rank: gw.Group, out: Any) -> None:
    for call in (single_rank.all_reduce, single_rank.reduce):
        with pytest.raises(gw.ArrayError, match=r"out is .*, which does not fit float64\[3\]"):
            call(np.zeros(3), out=out)


def test_out_that_is_read_only_raises_array_error(single_rank: gw.Group) -> None:
    with pytest.raises(gw.ArrayError, match="read-only"):
        single_rank.all_reduce(np.zeros(3), out=read_only(np.zeros(3)))


def test_out_may_be_x_itself_or_a_view_of_all_of_it(two: Crew) -> None:
    def call(group: gw.Group) -> None:
        for x in (np.arange(4.0), np.arange(8.0)[::2], np.arange(6.0).reshape(2, 3).T):
            before = x.copy()
            assert group.all_reduce(x, out=x) is x
            assert np.array_equal(x, before * 2)
            same = x[:]
            assert group.all_reduce(x, out=same) is same
            assert np.array_equal(x, before * 4)
            root = group.reduce(x, out=x, root=0)
            assert (root is x) == (group.rank == 0)

    two.run(call)


def test_out_that_partly_overlaps_x_raises_array_error(single_rank: gw.Group) -> None:
    memory = np.zeros(12)
    square = np.zeros((3, 3))
    pairs = [
        (memory[:8], memory[1:9]),
        (memory[::2], memory[:6]),
        (memory[:6], memory[5::-1]),
        (square, square.T),
        (memory[::2][:3], memory[2::2][:3]),
    ]
    for x, out in pairs:
        with pytest.raises(gw.ArrayError, match="out overlaps x"):
            single_rank.all_reduce(x, out=out)


def test_out_may_lie_between_the_elements_of_x(two: Crew) -> None:
    def call(group: gw.Group) -> None:
        columns = np.arange(6.0).reshape(3, 2)
        group.all_reduce(columns[:, 0], out=columns[:, 1])
        assert columns.tolist() == [[0, 0], [2, 4], [4, 8]]

    two.run(call)


def test_out_may_have_another_shape_of_as_many_elements(single_rank: gw.Group) -> None:
    out = np.zeros((2, 3))
    assert single_rank.all_reduce(np.arange(6.0), out=out) is out
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


# -- views -------------------------------------------------------------------------------------------------------------


def test_view_of_a_contiguous_array_shares_its_memory() -> None:
    for x in (np.arange(6.0), np.arange(6.0).reshape(2, 3), np.array(1.0), np.asfortranarray(np.arange(3))):
        assert np.shares_memory(view(x, writable=True).flat, x)


def test_view_of_a_strided_array_is_read_by_load_and_written_by_store() -> None:
    x = np.arange(6)[::2]
    seen = view(x, writable=True)
    x += 1
    assert seen.load().tolist() == [1, 3, 5]
    seen.flat[:] = 7
    seen.store()
    assert x.tolist() == [7, 7, 7]
