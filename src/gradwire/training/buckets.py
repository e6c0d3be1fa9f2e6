"""Packs gradients into buckets: flat arrays, in memory that the group reduces without a copy where possible.

Backward completes gradients in about the reverse order of the forward pass. So the first bucket holds the last tensors:
it is complete first, and its reduction overlaps with the rest of backward. The layout depends only on names, shapes,
dtypes, the order of the tensors and the bucket sizes, so all ranks compute the same layout.
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

ALIGNMENT = 64  # bytes: each gradient begins on a cache line


@dataclass(frozen=True, slots=True)
class Tensor:
    """The name, dtype and shape of a gradient."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name!r}: {arrays.shape_text(self.dtype.name, self.shape)}"


def tensors_like(like: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the name, dtype and shape of each array in `like`; raise for dtypes that have no mean."""
    if not isinstance(like, Mapping):
        raise ArrayError(f"expected a dict of arrays by name, got {type(like).__name__}")
    return {name: _tensor(name, one) for name, one in like.items()}


def _tensor(name: Any, one: Any) -> Tensor:
    if not isinstance(name, str):
        raise ArrayError(f"the key {name!r} is a {type(name).__name__}: names of gradients are strings")
    try:
        dtype = arrays.parse_dtype(getattr(one, "dtype", None))
        check_reduction("mean", dtype, "all_reduce")
        return Tensor(name, dtype, tuple(int(length) for length in one.shape))
    except (ArrayError, UnsupportedOp) as error:
        error.args = (f"{name!r}: {error.message}", *error.args[1:])
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise ArrayError(f"{name!r}: {type(one).__name__} has no shape and dtype: {error}") from error


def checked_gradients(tensors: Mapping[str, Tensor], gradients: Mapping[str, Any]) -> dict[str, Array]:
    """Return the gradients that are not None as arrays; raise if a name, shape or dtype does not match `tensors`."""
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
    """Tensors of one dtype in one flat array."""

    index: int
    dtype: DType
    tensors: tuple[Tensor, ...]
    flat: Array
    places: dict[str, slice]  # each tensor's range in the flat array
    contents: str  # description and digest: part of each call, so ranks with different buckets get a mismatch error
    views: dict[str, Array]  # each tensor in its own shape, as a view of the flat array

    def clear_gaps(self) -> None:
        """Write zeros between the tensors: a compression that works in blocks may have written there."""
        ends = [place.start for place in self.places.values()][1:]
        for place, end in zip(self.places.values(), [*ends, self.flat.size], strict=True):
            self.flat[place.stop : end] = 0


def partition(order: Iterable[Tensor], bucket_bytes: int, first_bucket_bytes: int) -> list[list[Tensor]]:
    """Distribute tensors over buckets; return the buckets in the order in which they become complete.

    All tensors of a bucket have one dtype. The first bucket is small, so that communication starts early. A tensor that
    is larger than a bucket gets its own bucket.
    """
    filling: dict[DType, list[Tensor]] = {}
    full: list[list[Tensor]] = []
    for tensor in order:
        limit = bucket_bytes if full else first_bucket_bytes
        current = filling.setdefault(tensor.dtype, [])
        if current and _nbytes(current) + _nbytes([tensor]) > limit:
            full.append(filling[tensor.dtype])
            current = filling[tensor.dtype] = []
        current.append(tensor)
    place = {tensor.name: at for at, tensor in enumerate(order)}
    rest = sorted(filling.values(), key=lambda part: place[part[-1].name])
    return sorted([*full, *rest], key=lambda part: place[part[-1].name])


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(_padded_count(tensor) * tensor.dtype.itemsize for tensor in tensors)


def _padded_count(tensor: Tensor) -> int:
    """Return the number of elements that a tensor takes in a bucket, with the padding up to the next cache line."""
    line = ALIGNMENT // tensor.dtype.itemsize
    return -(-tensor.count // line) * line


def make_buckets(group: Group, order: Sequence[Tensor], bucket_bytes: int, first_bucket_bytes: int) -> list[Bucket]:
    """Create the buckets for these tensors in the group's memory, filled with zeros."""
    parts = partition(order, bucket_bytes, first_bucket_bytes)
    return [_bucket(group, index, part) for index, part in enumerate(parts)]


def _bucket(group: Group, index: int, part: Sequence[Tensor]) -> Bucket:
    dtype = part[0].dtype
    flat = _zeros(group, sum(map(_padded_count, part)), dtype)
    places, at = {}, 0
    for tensor in part:
        places[tensor.name] = slice(at, at + tensor.count)
        at += _padded_count(tensor)
    digest = xxhash.xxh3_64_hexdigest("\n".join(map(str, part)).encode())
    contents = f"{len(part)} tensors from {part[0].name!r} to {part[-1].name!r}, {digest[:8]}"
    views = {tensor.name: flat[places[tensor.name]].reshape(tensor.shape) for tensor in part}
    return Bucket(index, dtype, tuple(part), flat, places, contents, views)


class BucketSet:
    """The buckets of all gradients, for one group and one order of tensors.

    Another group or another order needs a new set. `previous` is the set whose contents are copied into the new one.
    """

    def __init__(
        self,
        group: Group,
        tensors: Mapping[str, Tensor],
        order: Sequence[str],
        sizes: tuple[int, int],
        previous: BucketSet | None = None,
    ) -> None:
        self.group = group
        self.order = tuple(order)
        self.names = frozenset(tensors)
        self.numbers = {name: number for number, name in enumerate(tensors)}
        self.buckets = make_buckets(group, [tensors[name] for name in order], *sizes)
        self.bucket_of = {tensor.name: bucket for bucket in self.buckets for tensor in bucket.tensors}
        self.gradients: dict[str, Array] = {name: self.bucket_of[name].views[name] for name in tensors}
        self.writer = BucketWriter(self.gradients)
        if previous is not None:
            for name, view in previous.gradients.items():
                self.gradients[name][...] = view

    @property
    def flats(self) -> list[Array]:
        """The flat arrays of all buckets."""
        return [bucket.flat for bucket in self.buckets]


def _zeros(group: Group, count: int, dtype: DType) -> Array:
    """Allocate zeros. New shared memory of the group is already zero, and uses no physical memory until written."""
    flat = group.empty(count, dtype.storage)
    return flat if GroupInternals(group).is_shared(flat) else np.zeros(count, dtype.storage)


def check_bytes(name: str, nbytes: Any) -> int:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise ConfigError(f"{name} is {nbytes!r}: it must be a whole number of bytes, at least 1")
    return nbytes
