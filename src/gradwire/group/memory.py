"""Arrays in memory that ranks share."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from gradwire.arrays import Array, parse_dtype
from gradwire.errors import InvalidSize
from gradwire.transports.shm import SharedMemory


def empty(shape: int | tuple[int, ...], dtype: Any, shared: SharedMemory | None) -> Array:
    """An uninitialised array, in shared memory if there is any."""
    row = parse_dtype(dtype)
    if shape is None:  # which NumPy used to take for ()
        raise InvalidSize("no array of shape None")
    try:
        plain = np.empty(shape, row.storage)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise InvalidSize(f"no array of shape {shape!r}: {error}") from error
    if shared is None or not plain.nbytes:
        return plain
    with contextlib.suppress(MemoryError):  # the arena is full: any memory will do
        return shared.own.array(plain.nbytes).view(row.storage).reshape(plain.shape)
    return plain
