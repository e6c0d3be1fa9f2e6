"""`group.empty`: arrays in memory that the ranks of a host share."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from gradwire.arrays import Array, parse_dtype
from gradwire.errors import InvalidSize
from gradwire.transports.shm.shared_memory import SharedMemory

_NOTHING = np.dtype([])  # elements without a byte: NumPy says what it thinks of a shape, and takes no memory


def empty(shape: int | tuple[int, ...], dtype: Any, shared: SharedMemory | None) -> Array:
    """An uninitialised array, in shared memory if there is any."""
    row = parse_dtype(dtype)
    if shape is None:  # which NumPy used to take for ()
        raise InvalidSize("no array of shape None")
    try:
        lengths = np.empty(shape, _NOTHING).shape
        nbytes = math.prod(lengths) * row.storage.itemsize
        if shared is not None and nbytes:
            with contextlib.suppress(MemoryError):  # the arena is full: any memory will do
                return shared.own.array(nbytes).view(row.storage).reshape(lengths)
        return np.empty(shape, row.storage)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise InvalidSize(f"no array of shape {shape!r}: {error}") from error
