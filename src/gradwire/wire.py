"""The wire format: one header for every message, and the fingerprint that says what a message belongs to.

A message is a 64-byte little-endian header and `nbytes` of payload:

    offset  size  field
         0     4  magic        "GWR1"
         4     1  kind         Kind
         5     3  (zero)
         8     8  job          the first 8 bytes of the job's identity
        16     4  generation
        20     4  source       the sender's rank in the group
        24     8  group        identity of the group
        32     8  sequence     of the operation in the group's order; of the message, point to point
        40     8  fingerprint  of operation, dtype, reduce op, counts, root and algorithm; the tag, point to point
        48     4  tile
        52     4  round
        56     8  nbytes

A receiver of a collective knows the whole header it must see, so it compares 64 bytes; anything else is taken apart
with `parse` and named. Nothing is allocated from what a header claims: control messages are bounded by
`MAX_CONTROL`, point-to-point ones by the buffer offered or `MAX_EAGER`.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

MAGIC = b"GWR1"
_LAYOUT = struct.Struct("<4sB3xQIIQQQIIQ")
HEADER_BYTES = _LAYOUT.size
MAX_CONTROL = 1 << 20
MAX_EAGER = 64 * 1024


class Kind(enum.IntEnum):
    """What a message is."""

    COLLECTIVE = 1
    CONTROL = 2
    EAGER = 3  # point to point: the payload follows at once
    OFFER = 4  # point to point: a payload waits at the sender
    ACCEPT = 5  # the receiver has a buffer for it
    PAYLOAD = 6  # the payload of an accepted offer
    WITHDRAW = 7  # the sender gave up waiting
    BEAT = 8  # of a lifeline: the sender lives


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header; fields as in the module's table."""

    kind: int
    job: int
    generation: int
    source: int
    group: int
    sequence: int
    fingerprint: int
    tile: int
    round: int
    nbytes: int

    def pack(self) -> bytes:
        return _LAYOUT.pack(
            MAGIC,
            self.kind,
            self.job,
            self.generation,
            self.source,
            self.group,
            self.sequence,
            self.fingerprint,
            self.tile,
            self.round,
            self.nbytes,
        )


class WireError(ValueError):
    """Bytes that are not a header of this protocol."""


def parse(data: bytes | bytearray | memoryview) -> Header:
    """Take a header apart; `WireError` if it is none."""
    if len(data) != HEADER_BYTES:
        raise WireError(f"a header has {HEADER_BYTES} bytes, got {len(data)}")
    magic, kind, *fields = _LAYOUT.unpack(data)
    if magic != MAGIC or kind not in Kind._value2member_map_:
        raise WireError(f"not a gradwire message: {bytes(data[:5]).hex()}")
    return Header(kind, *fields)


def parse_json(data: bytes | bytearray) -> Any:
    """A JSON-like value of anybody's; ValueError if it is none, or deeper than the stack."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is too deep") from error


pack_collective = _LAYOUT.pack  # the hot path packs positionally: (MAGIC, kind, job, generation, …) as in Header


def fingerprint(*parts: object) -> int:
    """64 bits that two calls share when they mean the same thing."""
    return xxhash.xxh3_64_intdigest(repr(parts).encode())


def group_identity(parent: int, ranks: Sequence[int], instance: int) -> int:
    """The identity of a subgroup; the same on all members however they listed its ranks."""
    return fingerprint("group", parent, tuple(ranks), instance)
