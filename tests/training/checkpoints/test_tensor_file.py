"""Tensor files: round trips, also with the package safetensors, and malformed headers."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from gradwire.arrays import DTYPES, Array, parse_dtype
from gradwire.training.checkpoints import tensor_file
from gradwire.training.checkpoints.tensor_file import Cancelled
from support.system_calls import Calls

SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
ARRAYS = st.one_of(
    *(npst.arrays(np.dtype(name), SHAPES) for name in DTYPES if name != "bfloat16"),
    npst.arrays(np.float32, SHAPES).map(lambda array: np.asarray(array, parse_dtype("bfloat16").storage)),
)
NAMED = st.dictionaries(st.text(max_size=20).filter(lambda name: name != "__metadata__"), ARRAYS, max_size=6)


def write(path: Path, named: dict[str, Array], **options: Any) -> tuple[int, list[str]]:
    described = [(name, array.dtype.name, array.shape) for name, array in named.items()]
    values = list(named.values())
    return tensor_file.write(path, described, values.__getitem__, **options)


def read(path: Path, like: dict[str, Array]) -> dict[str, Array]:
    with path.open("rb") as opened:
        header = tensor_file.read_header(opened)
        found = {name: np.empty(array.shape, array.dtype) for name, array in like.items()}
        for name, out in found.items():
            tensor_file.read_array(opened, header, name, out)
    return found


@given(NAMED)
def test_tensor_file_round_trip_has_the_same_bytes_and_digests(
    tmp_path_factory: pytest.TempPathFactory, named: dict[str, Array]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.safetensors"
    size, digests = write(path, named)
    found = read(path, named)
    assert size == path.stat().st_size
    for (name, array), digest in zip(named.items(), digests, strict=True):
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
        assert digest == xxhash.xxh3_128_hexdigest(array.tobytes())


@given(NAMED)
def test_safetensors_reads_what_tensor_file_wrote(
    tmp_path_factory: pytest.TempPathFactory, named: dict[str, Array]
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.safetensors"
    write(path, named, metadata={"step": "7"})
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"step": "7"}
        assert sorted(opened.keys()) == sorted(named)
        for name, array in named.items():
            assert opened.get_tensor(name).tobytes() == array.tobytes()


def test_tensor_file_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    named: dict[str, Array] = {
        name: np.arange(6).reshape(2, 3).astype(parse_dtype(name).storage)
        for name in DTYPES
        if not name.startswith("complex")
    }
    named |= {"0-d": np.array(3.5), "empty": np.zeros((0, 4), np.float32), "größe ✓": np.ones(1)}
    safetensors.numpy.save_file(named, tmp_path / "file.safetensors", {"key": "value"})
    found = read(tmp_path / "file.safetensors", named)
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in named.items()
    }


def test_tensor_file_complex_is_stored_as_pairs_of_floats(tmp_path: Path) -> None:
    array = np.array([1 + 2j, 3 - 4j], np.complex64)
    write(tmp_path / "file", {"z": array})
    stored = safetensors.numpy.load_file(tmp_path / "file")["z"]
    assert (stored.dtype.name, stored.tolist()) == ("float32", [[1, 2], [3, -4]])


def test_tensor_file_strided_array_is_stored_in_order(tmp_path: Path) -> None:
    array = np.arange(12.0).reshape(3, 4).T[::2]
    write(tmp_path / "file", {"x": array})
    assert np.array_equal(safetensors.numpy.load_file(tmp_path / "file")["x"], array)


def test_tensor_file_arrays_are_aligned_for_readers_that_map_the_file(tmp_path: Path) -> None:
    write(tmp_path / "file", {name: np.ones(3, parse_dtype(name).storage) for name in reversed(DTYPES)})
    with (tmp_path / "file").open("rb") as opened:
        header = tensor_file.read_header(opened)
    for name, entry in header.entries.items():
        assert (header.length + entry.start) % min(parse_dtype(name).itemsize, 8) == 0


def test_tensor_file_lone_surrogate_in_a_name_is_read_back(tmp_path: Path) -> None:
    named = {"\ud800": np.ones(1)}
    write(tmp_path / "file", named)
    assert list(read(tmp_path / "file", named)) == ["\ud800"]


@pytest.mark.parametrize("names", [["a", "a"], ["__metadata__"]])
def test_write_repeated_or_reserved_name_raises_value_error(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ValueError, match="twice or reserved"):
        tensor_file.write(tmp_path / "file", [(name, "float32", (1,)) for name in names], lambda at: np.ones(1, "f4"))
    assert not list(tmp_path.iterdir())


def test_write_cancelled_between_chunks_removes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK", 8)
    answers = iter([False, False, True])
    with pytest.raises(Cancelled):
        write(tmp_path / "file", {"x": np.ones(10)}, cancelled=lambda: next(answers))
    assert not list(tmp_path.iterdir())


def test_write_failing_at_any_call_removes_the_file(tmp_path: Path) -> None:
    """The calls: open, one write for the header and one for the array, fsync."""
    for call in range(4):
        with pytest.raises(OSError, match="No space"), Calls().failing_at(call, errno.ENOSPC):
            write(tmp_path / "file", {"x": np.ones(10)})
        assert not list(tmp_path.iterdir())


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS = {
    "not an object": [],
    "an unknown dtype": {"x": ENTRY | {"dtype": "F99"}},
    "a negative length": {"x": ENTRY | {"shape": [-2]}},
    "a huge length": {"x": ENTRY | {"shape": [1 << 62]}},
    "a length that is no integer": {"x": ENTRY | {"shape": [True, 2]}},
    "too many axes": {"x": ENTRY | {"shape": [1] * 65}},
    "a place that does not fit the shape": {"x": ENTRY | {"data_offsets": [0, 9]}},
    "places that are no integers": {"x": ENTRY | {"shape": [], "dtype": "U8", "data_offsets": [False, True]}},
    "a gap": {"x": ENTRY | {"data_offsets": [8, 16]}},
    "an overlap": {"x": ENTRY, "y": ENTRY},
    "a negative place": {"x": ENTRY | {"data_offsets": [-8, 0]}},
    "metadata that are no texts": {"__metadata__": {"key": 1}},
}


def file_of(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_read_header_malformed_raises_value_error(tmp_path: Path, header: Any) -> None:
    (tmp_path / "file").write_bytes(file_of(header, bytes(8)))
    with (tmp_path / "file").open("rb") as opened, pytest.raises(ValueError, match=r"malformed|gaps|not a JSON object"):
        tensor_file.read_header(opened)


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 8, file_of({"x": ENTRY}, b""), file_of({}, b"1")])
def test_read_header_truncated_or_longer_file_raises_value_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as opened, pytest.raises(ValueError, match="file"):
        tensor_file.read_header(opened)


@pytest.mark.parametrize(
    ("out", "reason"), [(np.zeros(3, "f4"), "expected F32"), (np.zeros(2, "i4"), "expected I32")], ids=["f4", "i4"]
)
def test_read_array_of_another_shape_or_dtype_raises_value_error(tmp_path: Path, out: Array, reason: str) -> None:
    write(tmp_path / "file", {"x": np.ones(2, np.float32)})
    with (tmp_path / "file").open("rb") as opened:
        header = tensor_file.read_header(opened)
        with pytest.raises(ValueError, match=reason):
            tensor_file.read_array(opened, header, "x", out)
        with pytest.raises(ValueError, match="no array 'y'"):
            tensor_file.read_array(opened, header, "y", out)


def test_digest_array_is_equal_to_that_of_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK", 24)
    array = np.arange(100, dtype=np.int32)
    _, digests = write(tmp_path / "file", {"x": array, "empty": np.empty(0)})
    with (tmp_path / "file").open("rb") as opened:
        header = tensor_file.read_header(opened)
        assert tensor_file.digest_array(opened, header, "x", "int32", (100,)) == digests[0]
        assert tensor_file.digest_array(opened, header, "empty", "float64", (0,)) == digests[1]
