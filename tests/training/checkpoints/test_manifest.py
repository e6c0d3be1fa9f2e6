"""Manifests and descriptions of parts: round trips, and refusal of everything malformed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from gradwire.arrays import DTYPES
from gradwire.training.checkpoints.manifest import (
    Head,
    Manifest,
    OtherFormat,
    Part,
    Shard,
    StoredArray,
    part_file,
    replicated_key,
    shard_key,
)
from support.checkpoints import fence_of

DIGEST = "0123456789abcdef" * 2
TEXTS = st.text(max_size=10)
STORED = st.builds(
    StoredArray,
    TEXTS,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, (1 << 48) - 1), max_size=5).map(tuple),
    st.binary(min_size=16, max_size=16).map(bytes.hex),
)
SHARDS = st.none() | st.builds(Shard, TEXTS.map(str.encode), st.lists(STORED, max_size=3).map(tuple))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    size = draw(st.integers(1, 4))
    stored = draw(st.lists(STORED, max_size=6, unique_by=lambda array: array.name))
    parts = [
        Part(rank, part_file(rank), draw(st.integers(0, 1 << 61)), tuple(stored[rank::size]), draw(SHARDS))
        for rank in range(size)
    ]
    head = Head(
        draw(st.integers(0, (1 << 62) - 1)),
        fence_of(draw(st.integers(0, 1 << 127)), draw(st.integers(0, 1 << 50))),
        size,
        draw(TEXTS).encode(),
        tuple(draw(st.permutations([array.name for array in stored]))),
        draw(st.binary(min_size=16, max_size=16)).hex(),
    )
    return Manifest(head, tuple(parts), draw(st.floats(0, 1e12)), draw(TEXTS))


@given(manifests())
def test_manifest_round_trip_is_equal(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert [Part.from_json(part.to_json()) for part in manifest.parts] == list(manifest.parts)


@given(manifests(), st.data())
def test_manifest_truncated_or_changed_is_refused(manifest: Manifest, data: st.DataObject) -> None:
    text = manifest.to_json()
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + bytes([text[at] ^ data.draw(st.integers(1, 255))]) + text[at + 1 :]
    for damaged in (text[:at], changed, text + b"x"):
        with pytest.raises(ValueError, match="checksum"):
            Manifest.from_json(damaged)


def stored(name: str = "w") -> StoredArray:
    return StoredArray(name, "float32", (2, 3), DIGEST)


def part(rank: int = 0, *names: str) -> Part:
    return Part(rank, part_file(rank), 100, tuple(map(stored, names)), Shard(b"{}", (stored("s"),)))


MANIFEST = Manifest(Head(7, fence_of(), 2, b"{}", ("b", "a"), DIGEST), (part(0, "a"), part(1, "b")), 1.5, "1.0")


def sealed(fields: Any) -> bytes:
    """The text of a file with these fields and a right checksum."""
    text = json.dumps(fields, separators=(",", ":")).removesuffix("}")
    return f'{text},"checksum":"{xxhash.xxh3_128_hexdigest(text.encode())}"}}\n'.encode()


def fields_of(text: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    del found["checksum"]
    return found


def test_manifest_with_other_fields_too_is_accepted() -> None:
    """A later version may add fields without changing the format's number."""
    assert Manifest.from_json(sealed(fields_of(MANIFEST.to_json()) | {"later": [1]})) == MANIFEST


def test_manifest_of_another_format_is_reported_as_such() -> None:
    with pytest.raises(OtherFormat, match="has format 2, and this version of gradwire reads format 1"):
        Manifest.from_json(sealed(fields_of(MANIFEST.to_json()) | {"format": 2}))


MALFORMED: dict[str, list[Any]] = {
    "step": [-1, 1 << 62, 10**400, 1.0, True, None, "7"],
    "size": [0, 1, 3, -2, 1 << 16, 2.0],
    "created": [float("nan"), float("inf"), "now", 1],
    "fence": ["", "00-1", None, f"{bytes(16).hex()}-{1:012d} "],
    "digest": ["", DIGEST.upper(), DIGEST + "0", "g" * 32, None],
    "names": [["a"], ["a", "b", "c"], ["a", "a"], ["a", 1], {"a": "b"}],
    "parts": [[], [[]], None, [{}, {}]],
    "structure": ["\ud800", {}],
    "version": [1],
    "format": ["1", True],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in MALFORMED.items() for value in values])
def test_manifest_malformed_field_raises_value_error(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        Manifest.from_json(sealed(fields_of(MANIFEST.to_json()) | {name: value}))


def test_manifest_of_no_ranks_raises_value_error() -> None:
    with pytest.raises(ValueError, match="0 parts do not fit 0 ranks"):
        Manifest.from_json(sealed(fields_of(MANIFEST.to_json()) | {"size": 0, "parts": [], "names": []}))


@pytest.mark.parametrize("name", sorted(fields_of(MANIFEST.to_json())))
def test_manifest_without_a_field_raises_value_error(name: str) -> None:
    fields = fields_of(MANIFEST.to_json())
    del fields[name]
    with pytest.raises(ValueError, match="malformed value None"):
        Manifest.from_json(sealed(fields))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rank", value) for value in (-1, 1 << 16, None, 0.0)),
        *(("file", value) for value in ("../rank-0.safetensors", "/etc/passwd", "rank-1.safetensors", None)),
        *(("nbytes", value) for value in (-1, 1 << 62, None)),
        *(
            ("arrays", [value])
            for value in (
                ["w", "float32", [1]],
                ["w", "float99", [1], DIGEST],
                ["w", "float32", [-1], DIGEST],
                ["w", "float32", [1 << 48], DIGEST],
                ["w", "float32", [True], DIGEST],
                ["w", "float32", [1] * 65, DIGEST],
                ["w", "float32", [1], DIGEST[1:]],
                [1, "float32", [1], DIGEST],
                None,
            )
        ),
        ("shard", []),
        ("shard", {"structure": "{}"}),
        ("shard", {"structure": "{}", "arrays": [[]]}),
    ],
)
def test_part_malformed_field_raises_value_error(name: str, value: Any) -> None:
    fields = fields_of(part(0, "a").to_json())
    fields["part"][name] = value
    with pytest.raises(ValueError, match=r"malformed|there is no dtype|the file of rank"):
        Part.from_json(sealed(fields))


@pytest.mark.parametrize("text", [b"", b"{}", sealed([]), sealed("x"), b"[" * 100_000])
def test_part_that_is_no_object_raises_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Part.from_json(text)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parts": (part(0, "a"),)}, "1 parts do not fit 2 ranks"),
        ({"parts": (part(1, "a"), part(0, "b"))}, "2 parts do not fit 2 ranks"),
        ({"parts": (part(0, "a"), part(1, "a"))}, "several parts have array 'a'"),
        ({"parts": (part(0, "a"), part(1))}, "no part has array 'b'"),
        ({"parts": (part(0, "a"), part(1, "b", "c"))}, "array 'c' of a part is not in the state"),
        ({"head": dataclasses.replace(MANIFEST.head, names=("a", "b", "a"))}, "the state has several arrays 'a'"),
    ],
)
def test_manifest_whose_parts_do_not_fit_raises_value_error(changes: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(MANIFEST, **changes)


@given(st.lists(st.sampled_from(["w", "shard:w", "replicated:w", "__metadata__", "shard:0:w"]), unique=True))
def test_keys_of_replicated_and_sharded_arrays_are_unique(names: list[str]) -> None:
    keys = [*map(replicated_key, names), *map(shard_key, names)]
    assert len(set(keys)) == len(keys)
    assert "__metadata__" not in keys
