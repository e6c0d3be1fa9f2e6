"""Defines fuzz targets: parsers of bytes that other processes send, with their limits.

The same targets are run on inputs that Hypothesis draws (test_targets.py, part of the usual tests) and on inputs that
atheris finds by observing which branches they reach (atheris/, a few minutes at a time).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

MIB = 1 << 20


@dataclass(frozen=True)
class Target:
    """`run` feeds bytes to a parser. It returns True if they were accepted, False if refused with the documented error.

    Any other exception is a bug. That includes an AssertionError from the checks after the parser.
    """

    name: str
    run: Callable[[bytes], bool]
    seeds: tuple[bytes, ...]  # inputs that are accepted
    inputs: st.SearchStrategy[bytes] | None = None  # more realistic inputs than damaged seeds
    memory: int = MIB  # the most that may be allocated at any moment, for any input
    examples: int = 100  # that Hypothesis draws, in clearly less than a second


def inputs_of(target: Target) -> st.SearchStrategy[bytes]:
    """Return a strategy for a target: its own inputs, damaged seeds, and random bytes."""
    own = [target.inputs] if target.inputs is not None else []
    return st.one_of(*own, damaged(target.seeds), st.binary(max_size=300))


@st.composite
def damaged(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """Draw a seed in which bytes are changed, removed, repeated or inserted."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, 80)))
        how = draw(st.sampled_from(("change", "remove", "repeat", "number", "noise")))
        match how:
            case "change" if start < len(data):
                data[start] ^= draw(st.integers(1, 255))
            case "remove":
                del data[start:stop]
            case "repeat":
                data[start:start] = data[start:stop]
            case "number":
                number = draw(st.sampled_from((0, 1, 0x7F, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)))
                part = number.to_bytes(8, "little")[: draw(st.sampled_from((1, 2, 4, 8)))]
                data[start : start + len(part)] = part
            case "noise":
                data[start:stop] = draw(st.binary(max_size=80))
    return bytes(data)


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.integers(),
    st.sampled_from((1 << 62, 1 << 64, -(1 << 64), 10**400)),
    st.floats(),
    st.text(max_size=20),
)
VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@st.composite
def altered(draw: st.DrawFn, samples: Sequence[Any]) -> Any:
    """Draw a JSON-like value in which parts have another type, are missing, or are duplicated."""
    value = draw(st.sampled_from(samples))
    for _ in range(draw(st.integers(1, 3))):
        value = _alter(draw, value)
    return value


def _alter(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        rest = {name: entry for name, entry in value.items() if name != key}
        match draw(st.integers(0, 5)):
            case 0:
                return rest
            case 1:
                return rest | {draw(st.text(max_size=5)): value[key]}
        return rest | {key: _alter(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(value) - 1))
        match draw(st.integers(0, 5)):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + value[at:] * 2
        return [*value[:at], _alter(draw, value[at]), *value[at + 1 :]]
    return draw(VALUES)
