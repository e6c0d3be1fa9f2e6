"""Defines the wire format: the header of every message, and the fingerprint that identifies the call it belongs to.

A message is a 64-byte little-endian header and `nbytes` of payload:

    offset  size  field
         0     4  magic        "GWR1"
         4     1  kind         Kind
         5     3  (zero)
         8     8  job          the random half of the run's id
        16     4  generation
        20     4  source       the sender's rank in the group
        24     8  group        identity of the group
        32     8  sequence     number of the operation in the group's order; point to point: number of the message
        40     8  fingerprint  of operation, dtype, reduce op, counts, root and algorithm; point to point: the tag
        48     4  tile
        52     4  round
        56     8  nbytes

The receiver of a collective knows the whole expected header, so it compares 64 bytes. If they differ, it uses `parse`
to report the difference. A header's `nbytes` never causes an unbounded allocation: control messages are bounded by
`MAX_CONTROL`, point-to-point messages by `MAX_EAGER` until a `recv` requests them. `generation/message_format.py` has
the format of an eager message's payload and of an offer's.
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
    """The kind of a message."""

    COLLECTIVE = 1
    CONTROL = 2
    EAGER = 3  # point to point: the payload follows the header immediately
    OFFER = 4  # point to point: the sender has a payload and waits for ACCEPT
    ACCEPT = 5  # the receiver has a buffer for the offered payload
    PAYLOAD = 6  # the payload of an accepted offer
    WITHDRAW = 7  # the sender cancels its offer
    BEAT = 8  # a lifeline's heartbeat: the sender is alive


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. The module's docstring explains the fields."""

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
    """The received bytes are not a valid header."""


def parse(data: bytes | bytearray | memoryview) -> Header:
    """Parse a header; raise `WireError` if the bytes are not a header."""
    if len(data) != HEADER_BYTES:
        raise WireError(f"a header has {HEADER_BYTES} bytes, got {len(data)}")
    magic, kind, *fields = _LAYOUT.unpack(data)
    if magic != MAGIC or kind not in Kind._value2member_map_:
        raise WireError(f"not a gradwire message: {bytes(data[:5]).hex()}")
    return Header(kind, *fields)


def parse_json(data: bytes | bytearray) -> Any:
    """Parse JSON from an untrusted peer; raise ValueError if it is invalid or nested too deeply for the stack."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error


pack_collective = _LAYOUT.pack  # the hot path packs positionally: (MAGIC, kind, job, generation, …) as in Header


def fingerprint(*parts: object) -> int:
    """Return a 64-bit hash of the parts. Calls with equal parts have equal fingerprints on all ranks."""
    return xxhash.xxh3_64_intdigest(repr(parts).encode())


def group_identity(parent: int, ranks: Sequence[int], instance: int) -> int:
    """Return the identity of a subgroup, which is the same on all of its members."""
    return fingerprint("group", parent, tuple(ranks), instance)
