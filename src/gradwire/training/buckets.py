"""Buckets: gradients side by side in one flat array, in memory that the group reduces without a copy.

Backward makes gradients ready in about the reverse of the forward pass, so the first bucket holds the last tensors: it
is full first, and travels while the rest is still computed. Which tensor lies where follows from names, shapes, dtypes
and sizes alone, so all ranks find the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from gradwire import arrays
from gradwire.arrays import Array, DType, check_reduction
from gradwire.errors import ArrayError, ConfigError, UnsupportedOp
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.training.bucket_writer import BucketWriter

ALIGNMENT = 64  # bytes: each gradient begins on a cache line, whatever lies before it


@dataclass(frozen=True, slots=True)
class Tensor:
    """A gradient to be: what is known of it before there is one."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name!r}: {arrays.shape_text(self.dtype.name, self.shape)}"


def tensors_like(like: Mapping[str, Any]) -> dict[str, Tensor]:
    """Names, dtypes and shapes of what gradients will be like; refuses what has no mean."""
    if not isinstance(like, Mapping):
        raise ArrayError(f"expected a dict of arrays by name, got {type(like).__name__}")
    return {name: _tensor(name, one) for name, one in like.items()}


def _tensor(name: Any, one: Any) -> Tensor:
    if not isinstance(name, str):
        raise ArrayError(f"the key {name!r} is a {type(name).__name__}: gradients are told apart by strings")
    try:
        dtype = arrays.parse_dtype(getattr(one, "dtype", None))
        check_reduction("mean", dtype)
        return Tensor(name, dtype, tuple(int(length) for length in one.shape))
    except (ArrayError, UnsupportedOp) as error:
        error.args = (f"{name!r}: {error.message}", *error.args[1:])
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise ArrayError(f"{name!r}: {type(one).__name__} has no shape and dtype: {error}") from error


def fitting(tensors: Mapping[str, Tensor], gradients: Mapping[str, Any]) -> dict[str, Array]:
    """The gradients that are there (not None), as arrays of the right shapes; an error names the first that is not."""
    given = {}
    for name, gradient in gradients.items():
        if name not in tensors:
            raise ConfigError(f"there is no gradient {name!r}")
        if gradient is None:
            continue
        array = np.asarray(gradient) if isinstance(gradient, np.generic) else arrays.as_array(gradient)
        if array.shape != tensors[name].shape or not _casts(array.dtype, tensors[name].dtype.storage):
            raise ArrayError(f"the gradient {name!r} is {arrays.describe(array)}, not {tensors[name]}")
        given[name] = array
    return given


def _casts(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    return given == wanted or np.can_cast(given, wanted, "same_kind")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors in one flat array."""

    index: int
    dtype: DType
    tensors: tuple[Tensor, ...]
    flat: Array
    places: dict[str, slice]  # of each tensor in the flat array
    contents: str  # in words, and a digest: ranks whose buckets differ find out at the first one
    views: dict[str, Array]  # of each tensor, in its shape

    def clear_gaps(self) -> None:
        """Zeros between the tensors again: nobody writes there but compressions that write in blocks."""
        ends = [place.start for place in self.places.values()][1:]
        for place, end in zip(self.places.values(), [*ends, self.flat.size], strict=True):
            self.flat[place.stop : end] = 0


def parts(order: Iterable[Tensor], bucket_bytes: int, first_bucket_bytes: int) -> list[list[Tensor]]:
    """Tensors that share a bucket, in the order in which buckets are full; a bucket is of one dtype.

    The first is small, so that something is on its way early. One that is larger than a bucket has one for itself.
    """
    filling: dict[DType, list[Tensor]] = {}
    full: list[list[Tensor]] = []
    for tensor in order:
        limit = bucket_bytes if full else first_bucket_bytes
        mine = filling.setdefault(tensor.dtype, [])
        if mine and _nbytes(mine) + _nbytes([tensor]) > limit:
            full.append(filling[tensor.dtype])
            mine = filling[tensor.dtype] = []
        mine.append(tensor)
    place = {tensor.name: at for at, tensor in enumerate(order)}
    rest = sorted(filling.values(), key=lambda part: place[part[-1].name])
    return sorted([*full, *rest], key=lambda part: place[part[-1].name])


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(_room(tensor) * tensor.dtype.itemsize for tensor in tensors)


def _room(tensor: Tensor) -> int:
    """Elements up to the next tensor."""
    line = ALIGNMENT // tensor.dtype.itemsize
    return -(-tensor.count // line) * line


def make(group: Group, order: Sequence[Tensor], bucket_bytes: int, first_bucket_bytes: int) -> list[Bucket]:
    """The buckets for these tensors, in the group's memory, filled with zeros."""
    return [_bucket(group, index, part) for index, part in enumerate(parts(order, bucket_bytes, first_bucket_bytes))]


def _bucket(group: Group, index: int, part: Sequence[Tensor]) -> Bucket:
    dtype = part[0].dtype
    flat = _zeros(group, sum(map(_room, part)), dtype)
    places, at = {}, 0
    for tensor in part:
        places[tensor.name] = slice(at, at + tensor.count)
        at += _room(tensor)
    digest = xxhash.xxh3_64_hexdigest("\n".join(map(str, part)).encode())
    contents = f"{len(part)} tensors from {part[0].name!r} to {part[-1].name!r}, {digest[:8]}"
    views = {tensor.name: flat[places[tensor.name]].reshape(tensor.shape) for tensor in part}
    return Bucket(index, dtype, tuple(part), flat, places, contents, views)


class BucketSet:
    """The gradients of all tensors, in buckets in the memory of one group, in one order.

    Another group, or another order, takes another set; it can begin with the contents of the one `before`.
    """

    def __init__(
        self,
        group: Group,
        tensors: Mapping[str, Tensor],
        order: Sequence[str],
        sizes: tuple[int, int],
        before: BucketSet | None = None,
    ) -> None:
        self.group = group
        self.order = tuple(order)
        self.names = frozenset(tensors)
        self.numbers = {name: number for number, name in enumerate(tensors)}
        self.buckets = make(group, [tensors[name] for name in order], *sizes)
        self.home = {tensor.name: bucket for bucket in self.buckets for tensor in bucket.tensors}
        self.gradients: dict[str, Array] = {name: self.home[name].views[name] for name in tensors}
        self.places = BucketWriter(self.gradients)
        if before is not None:
            for name, view in before.gradients.items():
                self.gradients[name][...] = view

    @property
    def flats(self) -> list[Array]:
        """The memory of all buckets."""
        return [bucket.flat for bucket in self.buckets]


def _zeros(group: Group, count: int, dtype: DType) -> Array:
    """Zeros in the group's memory, which is fresh and so takes no room before it is written."""
    flat = group.empty(count, dtype.storage)
    return flat if GroupInternals(group).is_shared(flat) else np.zeros(count, dtype.storage)


def check_bytes(name: str, nbytes: Any) -> int:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise ConfigError(f"{name} is {nbytes!r}: a bucket has a whole number of bytes, at least 1")
    return nbytes
