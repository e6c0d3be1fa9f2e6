"""Arrays in the format of safetensors: a writer with digests and a bounded reader.

A file has the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and place of each array),
and the bytes of the arrays without gaps. The package `safetensors` can read and write the same files.
docs/decisions/100-checkpoint-format.md says why gradwire does not use it here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.training.checkpoints.files import write_all
from gradwire.wire import parse_json

MAX_HEADER = 100_000_000  # bytes; the package safetensors has the same limit
METADATA = "__metadata__"
CHUNK = 4 << 20  # bytes that are written or read at once: a cancelled write ends after this many
_PREFIX = 8  # bytes of the header's length
_ALIGNMENT = 8  # of the first array; the header is padded with spaces
_LONGEST = 1 << 48  # elements of one axis
_AXES = 64  # NumPy's limit

_CODES = {  # of gradwire's dtypes; safetensors has no complex numbers, so these are pairs of floats
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "F32",
    "complex128": "F64",
}
_BYTES = {code: int("".join(filter(str.isdigit, code)) or 8) // 8 for code in _CODES.values()}


Described = tuple[str, str, tuple[int, ...]]  # the name of an array, gradwire's name of its dtype, and its shape


class Cancelled(Exception):
    """The caller has cancelled the write."""


def never_cancelled() -> bool:
    """Return False: the default for writes that nobody cancels."""
    return False


class Digest(Protocol):
    """What gets all bytes that are read: a digest, or a counter of progress."""

    def update(self, data: memoryview, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """An array in a file: the dtype code of safetensors, the shape, and the place of its bytes after the header."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header of a file. `length` is the number of bytes before the first array."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    length: int

    @property
    def nbytes(self) -> int:
        """The size of the whole file."""
        return self.length + max((entry.stop for entry in self.entries.values()), default=0)


def stored_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the dtype code and the shape with which an array of a gradwire dtype is stored.

    >>> stored_form("bfloat16", (3,)), stored_form("complex64", (3,))
    (('BF16', (3,)), ('F32', (3, 2)))
    """
    return _CODES[dtype], (*shape, 2) if dtype.startswith("complex") else shape


def pack_header(described: Sequence[Described], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header, with its length, for arrays that follow in this order."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name, dtype, form in described:
        code, shape = stored_form(dtype, form)
        if name in header or name == METADATA:
            raise ValueError(f"the name {name[:200]!r} of an array is used twice or reserved")
        stop = start + math.prod(shape) * _BYTES[code]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ValueError(f"the header of {len(described)} arrays has {len(text)} bytes, more than {MAX_HEADER}")
    return len(text).to_bytes(_PREFIX, "little") + text


def write(
    path: Path,
    described: Sequence[Described],
    load: Callable[[int], Array],
    metadata: Mapping[str, str] | None = None,
    cancelled: Callable[[], bool] = never_cancelled,
) -> tuple[int, list[str]]:
    """Write a file, flush it to the disk, and return its size and the digest of each array.

    `load` returns the array at a place in `described`; it is called once for each. The file is removed if an error
    occurs. Raise `Cancelled` soon after `cancelled()` returns True.
    """
    # The longest elements come first, so that every array is aligned when a reader maps the file into memory.
    order = sorted(range(len(described)), key=lambda at: -arrays.dtype_by_name(described[at][1]).itemsize)
    header = pack_header([described[at] for at in order], metadata)
    digests = [""] * len(described)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, header)
        for at in order:
            digests[at] = _write_array(descriptor, load(at), cancelled)
        size = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()  # gives the space back to a full disk
        raise
    finally:
        os.close(descriptor)
    return size, digests


def _write_array(descriptor: int, array: Array, cancelled: Callable[[], bool]) -> str:
    digest = xxhash.xxh3_128()
    data = arrays.raw(np.ascontiguousarray(array).reshape(-1))
    for start in range(0, len(data), CHUNK):
        if cancelled():
            raise Cancelled
        chunk = data[start : start + CHUNK]
        write_all(descriptor, chunk)
        digest.update(chunk)
    return digest.hexdigest()


def parse_header(prefix: bytes, text: bytes) -> Header:
    """Parse a header: its first 8 bytes and the rest; raise ValueError if it is malformed."""
    if len(prefix) != _PREFIX or len(text) != int.from_bytes(prefix, "little"):
        raise ValueError("the file ends inside its header")
    header = parse_json(text)
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the metadata in the header is malformed")
    entries = {name: _parse_entry(name, entry) for name, entry in header.items()}
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            raise ValueError(f"the arrays overlap or have gaps at byte {end} after the header")
        end = entry.stop
    return Header(entries, metadata, _PREFIX + len(text))


def _parse_entry(name: str, entry: Any) -> Entry:
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [start, stop]} if (
            code in _BYTES and len(shape) <= _AXES and all(type(n) is int and 0 <= n < _LONGEST for n in shape)
        ):
            if type(start) is type(stop) is int and stop - start == math.prod(shape) * _BYTES[code]:
                return Entry(code, tuple(shape), start, stop)
    raise ValueError(f"array {name[:200]!r} is malformed in the header: {str(entry)[:200]}")


def read_header(opened: BufferedReader) -> Header:
    """Read and check the header of an open file; raise ValueError if it is malformed or the file has another size."""
    size = os.fstat(opened.fileno()).st_size
    opened.seek(0)
    prefix = opened.read(_PREFIX)
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER, size):
        raise ValueError(f"a file of {size} bytes cannot have a header of {length} bytes")
    header = parse_header(prefix, opened.read(length))
    if header.nbytes != size:
        raise ValueError(f"the file has {size} bytes, but its header describes {header.nbytes}")
    return header


def read_array(opened: BufferedReader, header: Header, name: str, out: Array, *totals: Digest) -> str:
    """Read an array into `out`, which is contiguous, and return the digest of its bytes. The digests `totals` grow too.

    Raise ValueError if the file has no such array, or one with another dtype or shape.
    """
    entry = _entry(header, name, arrays.dtype_of(out).name, out.shape)
    opened.seek(header.length + entry.start)
    digest, data = xxhash.xxh3_128(), arrays.raw(out.reshape(-1))
    for start in range(0, len(data), CHUNK):
        _read_chunk(opened, name, data[start : start + CHUNK], (digest, *totals))
    return digest.hexdigest()


def digest_array(
    opened: BufferedReader, header: Header, name: str, dtype: str, shape: tuple[int, ...], *totals: Digest
) -> str:
    """Return the digest of an array's bytes as `read_array` does, without memory for the whole array."""
    entry = _entry(header, name, dtype, shape)
    opened.seek(header.length + entry.start)
    digest, memory = xxhash.xxh3_128(), memoryview(bytearray(min(CHUNK, entry.stop - entry.start)))
    for start in range(entry.start, entry.stop, CHUNK):
        _read_chunk(opened, name, memory[: min(CHUNK, entry.stop - start)], (digest, *totals))
    return digest.hexdigest()


def _entry(header: Header, name: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    entry = header.entries.get(name)
    if entry is None:
        raise ValueError(f"there is no array {name!r}")
    expected = stored_form(dtype, shape)
    if (entry.code, entry.shape) != expected:
        found = arrays.shape_text(entry.code, entry.shape)
        raise ValueError(f"array {name!r} is {found}, expected {arrays.shape_text(*expected)}")
    return entry


def _read_chunk(opened: BufferedReader, name: str, chunk: memoryview, digests: Sequence[Digest]) -> None:
    if opened.readinto(chunk) != len(chunk):
        raise ValueError(f"the file ends inside array {name!r}")
    for digest in digests:
        digest.update(chunk)
