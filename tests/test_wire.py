"""Tests the wire format: packing and parsing of headers, invalid headers, fingerprints and group identities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.wire import HEADER_BYTES, MAGIC, Header, Kind, WireError, fingerprint, group_identity, parse

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
HEADERS = st.builds(Header, st.sampled_from(Kind).map(int), U64, U32, U32, U64, U64, U64, U32, U32, U64)


@given(HEADERS)
def test_header_packed_and_parsed_is_equal_and_has_64_bytes(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES == 64
    assert packed.startswith(MAGIC)
    assert parse(packed) == header
    assert parse(memoryview(bytearray(packed))) == header


def test_header_layout_is_as_documented() -> None:
    packed = Header(1, 0x0807060504030201, 2, 3, 4, 5, 6, 7, 8, 9).pack()
    assert packed.hex(" ", 4).split() == [
        *("47575231", "01000000", "01020304", "05060708", "02000000", "03000000"),
        *("04000000", "00000000", "05000000", "00000000", "06000000", "00000000"),
        *("07000000", "08000000", "09000000", "00000000"),
    ]


@given(st.binary(max_size=200))
def test_parse_of_random_bytes_raises_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        parse(data)


@given(HEADERS, st.integers(0, 4), st.integers(1, 255))
def test_parse_of_a_header_with_a_wrong_magic_or_kind_raises_wire_error(
    header: Header, position: int, change: int
) -> None:
    packed = bytearray(header.pack())
    packed[position] ^= change
    if position == 4 and packed[4] in set(Kind):
        assert parse(packed).kind == packed[4]
    else:
        with pytest.raises(WireError, match="not a gradwire message"):
            parse(packed)


@given(HEADERS, st.integers(0, 63))
def test_parse_of_a_truncated_header_raises_wire_error(header: Header, cut: int) -> None:
    with pytest.raises(WireError, match=f"a header has 64 bytes, got {cut}"):
        parse(header.pack()[:cut])


def test_fingerprint_and_group_identity_differ_for_different_inputs() -> None:
    assert fingerprint("sum", 3) == fingerprint("sum", 3)
    assert len({fingerprint("sum", 3), fingerprint("sum", "3"), fingerprint("sum3"), fingerprint("sum", (3,))}) == 4
    assert group_identity(1, [0, 2], 1) == group_identity(1, (0, 2), 1)
    assert len({group_identity(1, [0, 2], 1), group_identity(1, [0, 2], 2), group_identity(2, [0, 2], 1)}) == 3
