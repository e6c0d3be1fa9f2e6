"""Fuzzes the files of checkpoints. A damaged disk or another program may have written them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import xxhash

from fuzz.target import Target, altered, encoded
from gradwire.training.checkpoints.manifest import Head, Manifest, Part, Shard, StoredArray
from gradwire.training.checkpoints.tensor_file import pack_header, parse_header
from gradwire.training.fence import Fence, parse_fences
from gradwire.training.state import State, plain_values

_CHECKSUM = ',"checksum":"'


def tensor_header(data: bytes) -> bool:
    try:
        header = parse_header(data[:8], data[8:])
    except ValueError:
        return False
    places = sorted((entry.start, entry.stop) for entry in header.entries.values())
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))
    assert header.nbytes >= header.length == len(data)
    return True


def read_manifest(data: bytes) -> bool:
    """The input is a manifest without its checksum, which is added: the parser would refuse nearly all inputs."""
    try:
        manifest = Manifest.from_json(_sealed(data))
    except ValueError:
        return False
    assert manifest.nbytes >= 0
    assert manifest.head.size == len(manifest.parts)
    assert Manifest.from_json(manifest.to_json()) == manifest
    return True


def read_part(data: bytes) -> bool:
    try:
        part = Part.from_json(_sealed(data))
    except ValueError:
        return False
    assert Part.from_json(part.to_json()) == part
    assert "/" not in part.file
    return True


def read_unsealed(data: bytes) -> bool:
    """A manifest as it is on the disk, with its checksum."""
    try:
        Manifest.from_json(data)
    except ValueError:
        return False
    return True


def read_claims(data: bytes) -> bool:
    fences = parse_fences(data)
    assert all(Fence.parse(str(fence)) == fence for fence in fences)
    return bool(fences)


def read_plain_values(data: bytes) -> bool:
    try:
        plain_values(data)
    except ValueError:
        return False
    return True


def _sealed(data: bytes) -> bytes:
    text = data.removesuffix(b"}")
    return text + f'{_CHECKSUM}{xxhash.xxh3_128_hexdigest(text)}"}}\n'.encode()


def _unsealed(data: bytes) -> bytes:
    return data[: data.rindex(_CHECKSUM.encode())] + b"}"


_STORED = StoredArray("w", "float32", (2, 3), "0" * 32)
_PART = Part(0, "rank-0.safetensors", 100, (_STORED,), Shard(b"{}", (_STORED,)))
_MANIFEST = Manifest(Head(7, Fence(bytes(16), 1), 1, b"{}", ("w",), "0" * 32), (_PART,), 1.5, "1.0").to_json()
_HEADER = pack_header([("w", "float64", (2, 3)), ("b", "bool", ())], {"step": "7"})
_ENTRIES = json.loads(_HEADER[8:])
_SKELETON = json.loads(State({"w": np.ones(2), "n": 3, "lr": 0.5, "t": (None, [True])}).take_apart()[0])


def _framed(header: Any) -> bytes:
    text = encoded(header)
    return len(text).to_bytes(8, "little") + text


TARGETS = (
    Target("tensor_header", tensor_header, (_HEADER,), inputs=altered([_ENTRIES]).map(_framed)),
    Target(
        "manifest",
        read_manifest,
        (_unsealed(_MANIFEST),),
        inputs=altered([json.loads(_unsealed(_MANIFEST))]).map(encoded),
    ),
    Target(
        "part_description",
        read_part,
        (_unsealed(_PART.to_json()),),
        inputs=altered([json.loads(_unsealed(_PART.to_json()))]).map(encoded),
    ),
    Target("sealed_manifest", read_unsealed, (_MANIFEST,)),
    Target("claims", read_claims, (f"\n{Fence(bytes(16), 1)}\n\n{Fence(bytes(16), 2)}\n".encode(),)),
    Target("plain_values", read_plain_values, (encoded(_SKELETON),), inputs=altered([_SKELETON]).map(encoded)),
)
