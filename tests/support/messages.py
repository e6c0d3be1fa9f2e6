"""Builds parts of point-to-point messages as they travel between ranks."""

from __future__ import annotations

from gradwire.arrays import parse_dtype
from gradwire.generation.message_format import Description


def described(nbytes: int, *, waits: bool = False) -> bytes:
    """Return the description of a message of this many bytes."""
    return Description(parse_dtype("uint8"), (nbytes,), waits).pack()
