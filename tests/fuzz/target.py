"""What a target of fuzzing is: something that takes bytes of anybody's, and what it must not do with them.

The same targets are run on inputs that Hypothesis draws (test_targets.py, part of the usual tests) and on inputs that
atheris finds by watching which branches they reach (atheris/, a few minutes at a time).
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
    """`run` feeds bytes to a parser: True if they were believed, False if refused with the error that is documented.

    Whatever else is raised, an AssertionError about what became of the parser's surroundings included, is a bug.
    """

    name: str
    run: Callable[[bytes], bool]
    seeds: tuple[bytes, ...]  # that are believed, to begin with
    inputs: st.SearchStrategy[bytes] | None = None  # closer to the truth than what `inputs_of` makes of the seeds
    memory: int = MIB  # that may be taken at any moment, for any input
    examples: int = 100  # that Hypothesis draws within a second, with room to spare


def inputs_of(target: Target) -> st.SearchStrategy[bytes]:
    """Noise, damaged seeds, and what the target itself knows to ask."""
    known = [target.inputs] if target.inputs is not None else []
    return st.one_of(*known, damaged(target.seeds), st.binary(max_size=300))


@st.composite
def damaged(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A seed with something changed, lost, repeated or put in."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, 80)))
        how = draw(st.sampled_from(("change", "lose", "repeat", "number", "noise")))
        match how:
            case "change" if start < len(data):
                data[start] ^= draw(st.integers(1, 255))
            case "lose":
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
    """A JSON-like value in which something is of another kind, missing, or there twice."""
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
