"""The description of a checkpoint and of its parts, as JSON.

Each file ends with the digest of its own text. So a truncated or changed file is recognized before it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash

from gradwire import arrays
from gradwire.errors import ConfigError
from gradwire.training.fence import Fence
from gradwire.training.state import MAX_ARRAYS, MAX_SKELETON
from gradwire.wire import parse_json

FORMAT = 1  # of the manifest; a reader refuses later formats
MAX_RANKS = 1 << 16
_MAX_STEP = 1 << 62
_LONGEST = 1 << 48  # elements of one axis
_AXES = 64  # NumPy's limit
_HEX = 32  # digits of a digest
_SEAL = ',"checksum":"'
_END = '"}\n'
_T = TypeVar("_T")


class OtherFormat(ValueError):
    """Another version of gradwire wrote the file, in a format that this version does not know."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a part file: its name in the state, gradwire's name of its dtype, and the xxh3_128 of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * arrays.dtype_by_name(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """The state that only one rank has: its skeleton, and its arrays in the order of the skeleton."""

    structure: bytes
    arrays: tuple[StoredArray, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The part file of one rank: some arrays of the replicated state, and the rank's shard if it has one."""

    rank: int
    file: str
    nbytes: int
    arrays: tuple[StoredArray, ...]
    shard: Shard | None

    def to_json(self) -> bytes:
        """Return the text of the description `rank-N.json`."""
        return _seal({"format": FORMAT, "part": _pack_part(self)})

    @classmethod
    def from_json(cls, data: bytes) -> Part:
        """Parse a description; raise ValueError if anything is malformed."""
        found = _unseal(data)
        _check_format(found)
        return _parse_part(found.get("part"))


@dataclass(frozen=True, slots=True)
class Head:
    """What rank 0 knows about a checkpoint before it reads the descriptions of the parts.

    Attributes:
        step: The index of the last completed step.
        fence: The run and the generation that wrote it.
        size: The number of ranks, and of parts.
        structure: The skeleton of the replicated state (JSON, from `State.take_apart`).
        names: The names of the arrays of the replicated state, in the order of the skeleton.
        digest: The digest of the whole replicated state, from `State.digest`.
    """

    step: int
    fence: Fence
    size: int
    structure: bytes
    names: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The complete description of a checkpoint.

    `created` is the time in seconds since 1970, for people only. `version` is that of gradwire.
    """

    head: Head
    parts: tuple[Part, ...]
    created: float
    version: str

    def __post_init__(self) -> None:
        if not self.parts or [part.rank for part in self.parts] != list(range(self.head.size)):
            raise ValueError(f"{len(self.parts)} parts do not fit {self.head.size} ranks")
        names = [array.name for part in self.parts for array in part.arrays]
        if len(names) != len(set(names)):
            raise ValueError(f"several parts have array {_first_duplicate(names)!r}")
        if len(self.head.names) != len(set(self.head.names)):
            raise ValueError(f"the state has several arrays {_first_duplicate(list(self.head.names))!r}")
        if lost := set(self.head.names) - set(names):
            raise ValueError(f"no part has array {min(lost)!r}")
        if unknown := set(names) - set(self.head.names):
            raise ValueError(f"array {min(unknown)!r} of a part is not in the state")

    @property
    def nbytes(self) -> int:
        """The size of all part files."""
        return sum(part.nbytes for part in self.parts)

    def to_json(self) -> bytes:
        """Return the text of `manifest.json`."""
        head = self.head
        return _seal(
            {
                "format": FORMAT,
                "version": self.version,
                "created": self.created,
                "step": head.step,
                "fence": str(head.fence),
                "size": head.size,
                "digest": head.digest,
                "structure": head.structure.decode(),  # as a string: parsing and writing could change its bytes
                "names": list(head.names),
                "parts": [_pack_part(part) for part in self.parts],
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Parse a manifest; raise ValueError if anything is malformed."""
        found = _unseal(data)
        _check_format(found)
        created = _checked(found.get("created"), float, math.isfinite)
        parts = tuple(map(_parse_part, _list(found.get("parts"), MAX_RANKS)))
        return cls(_parse_head(found), parts, created, _text(found.get("version")))


def _first_duplicate(names: list[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _seal(fields: dict[str, Any]) -> bytes:
    """Return the fields as JSON whose last field is the digest of the text before it."""
    text = json.dumps(fields, separators=(",", ":")).removesuffix("}")
    return f"{text}{_SEAL}{xxhash.xxh3_128_hexdigest(text.encode())}{_END}".encode()


def _unseal(data: bytes) -> dict[str, Any]:
    tail = len(_SEAL) + _HEX + len(_END)
    text, seal = data[:-tail], data[-tail:]
    if seal != f"{_SEAL}{xxhash.xxh3_128_hexdigest(text)}{_END}".encode():
        raise ValueError("it is truncated or damaged: its checksum is wrong")
    found = parse_json(text + b"}")
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def _check_format(found: dict[str, Any]) -> None:
    number = _checked(found.get("format"), int)
    if number != FORMAT:
        raise OtherFormat(f"it has format {number}, and this version of gradwire reads format {FORMAT}")


def _pack_array(array: StoredArray) -> list[Any]:
    return [array.name, array.dtype, list(array.shape), array.digest]


def _pack_part(part: Part) -> dict[str, Any]:
    packed: dict[str, Any] = {
        "rank": part.rank,
        "file": part.file,
        "nbytes": part.nbytes,
        "arrays": [_pack_array(array) for array in part.arrays],
        "shard": None,
    }
    if part.shard is not None:
        stored = [_pack_array(array) for array in part.shard.arrays]
        packed["shard"] = {"structure": part.shard.structure.decode(), "arrays": stored}
    return packed


def _parse_head(found: dict[str, Any]) -> Head:
    try:
        fence = Fence.parse(_text(found.get("fence")))
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return Head(
        _number(found.get("step"), _MAX_STEP),
        fence,
        _number(found.get("size"), MAX_RANKS),
        _structure(found.get("structure")),
        tuple(map(_text, _list(found.get("names"), MAX_ARRAYS))),
        _digest(found.get("digest")),
    )


def _parse_part(found: Any) -> Part:
    match found:
        case {"rank": rank, "file": file, "nbytes": nbytes, "arrays": stored, "shard": shard}:
            number = _number(rank, MAX_RANKS)
            if file != part_file(number):  # never a path that leaves the folder
                raise ValueError(f"the file of rank {number} is not {part_file(number)}")
            return Part(number, file, _number(nbytes, 1 << 62), _parse_arrays(stored), _parse_shard(shard))
    raise ValueError("the description of a part is malformed")


def _parse_shard(found: Any) -> Shard | None:
    match found:
        case None:
            return None
        case {"structure": structure, "arrays": stored}:
            return Shard(_structure(structure), _parse_arrays(stored))
    raise ValueError("the description of a shard is malformed")


def _parse_arrays(found: Any) -> tuple[StoredArray, ...]:
    return tuple(map(_parse_array, _list(found, MAX_ARRAYS)))


def _parse_array(found: Any) -> StoredArray:
    match found:
        case [str(name), str(dtype), list(shape), digest] if len(shape) <= _AXES:
            sizes = tuple(_number(n, _LONGEST) for n in shape)
            return StoredArray(name, arrays.dtype_by_name(dtype).name, sizes, _digest(digest))
    raise ValueError(f"the description of an array is malformed: {str(found)[:200]}")


def replicated_key(name: str) -> str:
    """Return the name in a part file of an array of the replicated state: its own, unless that has a meaning."""
    return f"replicated:{name}" if name.startswith(("replicated:", "shard:", "__metadata__")) else name


def shard_key(name: str) -> str:
    """Return the name in a part file of an array of the rank's shard."""
    return f"shard:{name}"


def part_file(rank: int) -> str:
    """Return the name of a rank's part file."""
    return f"rank-{rank}.safetensors"


def description_file(rank: int) -> str:
    """Return the name of the description of a rank's part file."""
    return f"rank-{rank}.json"


def _list(value: Any, most: int) -> list[Any]:
    return _checked(value, list, lambda found: len(found) <= most)


def _number(value: Any, end: int) -> int:
    return _checked(value, int, lambda found: 0 <= found < end)


def _text(value: Any) -> str:
    return _checked(value, str)


def _digest(value: Any) -> str:
    return _checked(value, str, lambda found: len(found) == _HEX and set(found) <= set("0123456789abcdef"))


def _structure(value: Any) -> bytes:
    structure = _text(value).encode()  # ValueError for a lone surrogate
    if len(structure) > MAX_SKELETON:
        raise ValueError(f"the structure of the state has more than {MAX_SKELETON} bytes")
    return structure


def _checked(value: Any, kind: type[_T], fits: Callable[[_T], bool] = lambda _: True) -> _T:
    if type(value) is not kind or not fits(value):
        raise ValueError(f"malformed value {str(value)[:100]}")
    return value
