"""Tests broadcast_value and all_gather_values: which values can be sent, and the errors for the others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire as gw
from gradwire.arrays import parse_dtype
from gradwire.operations import values
from gradwire.topology import Topology
from support.crews import TRANSPORTS, Crew, crew_of


@pytest.fixture(scope="module", params=list(TRANSPORTS))
def three(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with crew_of(request.param, Topology.single(3)) as crew:
        yield crew


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=30)
@given(value=JSON, root=st.integers(0, 2))
def test_value_of_any_json_type_reaches_all_ranks(three: Crew, value: Any, root: int) -> None:
    received = three.run(lambda group: group.broadcast_value(value if group.rank == root else object(), root=root))
    assert received == [value] * 3
    gathered = three.run(lambda group: group.all_gather_values([group.rank, value]))
    assert gathered == [[[rank, value] for rank in range(3)]] * 3


def test_value_with_odd_text_and_numbers_reaches_all_ranks(three: Crew) -> None:
    value = {"ünï": "☃ \ud800 \0", "big": 10**1000, "tuple": (1, (2,)), "": [], "inf": -math.inf, "nan": math.nan}
    for received in three.run(lambda group: group.broadcast_value(value)):
        assert received.pop("nan") != received.get("nan")
        assert received == {"ünï": "☃ \ud800 \0", "big": 10**1000, "tuple": [1, [2]], "": [], "inf": -math.inf}


def test_value_with_numbers_of_numpy_arrives_with_python_numbers(three: Crew) -> None:
    given = [
        np.float32(0.5),
        np.float64(2),
        np.float16(3),
        parse_dtype("bfloat16").storage.type(4),
        np.int64(5),
        np.uint8(6),
    ]
    value = {"numbers": given, "flag": np.bool_(True)}
    for received in three.run(lambda group: group.broadcast_value(value)):
        assert received == {"numbers": [0.5, 2.0, 3.0, 4.0, 5, 6], "flag": True}
        assert [type(number) for number in received["numbers"]] == [float] * 4 + [int] * 2
        assert received["flag"] is True


def test_value_of_several_megabytes_reaches_all_ranks(three: Crew) -> None:
    text = "é" * 3_000_000
    assert (
        three.run(lambda group: group.broadcast_value(text if group.rank == 1 else None, root=1) == text) == [True] * 3
    )
    gathered = three.run(lambda group: group.all_gather_values("x" * (group.rank * 1_000_000)))
    assert [[len(value) for value in values_of] for values_of in gathered] == [[0, 1_000_000, 2_000_000]] * 3


def test_value_received_is_a_copy(three: Crew) -> None:
    mine = [{"a": [1]}]

    def program(group: gw.Group) -> None:
        received = group.broadcast_value(mine)
        assert received == mine
        assert received is not mine
        received[0]["a"].append(2)
        assert mine == [{"a": [1]}]

    three.run(program)


def circular_list() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def nested_list(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


UNSENDABLE: dict[str, tuple[Any, str]] = {
    "an object": (object(), "not JSON serializable"),
    "a set": ({1, 2}, "not JSON serializable"),
    "bytes": (b"raw", "not JSON serializable"),
    "an array": (np.zeros(3), "not JSON serializable"),
    "a complex number of NumPy": ({"loss": np.complex64(1)}, "not JSON serializable"),
    "a time of NumPy": (np.datetime64("2020"), "not JSON serializable"),
    "a number as key": ({"a": [{1: 2}]}, "the key 1 is not a string"),
    "None as key": ({None: 2}, "the key None is not a string"),
    "a circular list": (circular_list(), "only JSON-like values"),
    "a deeply nested list": (nested_list(100_000), "only JSON-like values"),
    "too many digits": (10**5000, "only JSON-like values"),
}


@pytest.mark.parametrize(("value", "words"), UNSENDABLE.values(), ids=UNSENDABLE)
def test_value_that_cannot_be_sent_raises_on_all_ranks(three: Crew, value: Any, words: str) -> None:
    """Only the root can detect this. The other ranks must not wait forever, and the group stays usable."""

    def program(group: gw.Group) -> int:
        with pytest.raises(gw.ArrayError, match=words) as caught:
            group.broadcast_value(value if group.rank == 1 else "fine", root=1)
        assert (caught.value.rank, caught.value.operation) == (1, "broadcast_value")
        with pytest.raises(gw.ArrayError, match=words) as caught:
            group.all_gather_values(value if group.rank >= 1 else "fine")
        assert (caught.value.rank, caught.value.operation) == (1, "all_gather_values")
        return int(group.all_reduce(1))

    assert three.run(program) == [3, 3, 3]


def test_value_error_names_the_rank_that_sent_it(three: Crew) -> None:
    def program(group: gw.Group) -> str:
        with pytest.raises(gw.ArrayError) as caught:
            group.broadcast_value({1, 2} if group.rank == 1 else None, root=1)
        return str(caught.value)

    texts = three.run(program)
    assert texts[0] == texts[2] == f"broadcast_value(root=1) failed on rank 1: {texts[1]}"


def test_value_that_is_too_large_raises_invalid_size_on_all_ranks(three: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_VALUE_BYTES", 1000)

    def program(group: gw.Group) -> int:
        for call in (group.broadcast_value, group.all_gather_values):
            with pytest.raises(gw.InvalidSize, match=r"a value of 1002 bytes is too large \(more than 1000\)"):
                call("x" * 1000 if group.rank == 0 else "x")
        assert group.broadcast_value("x" * 998) == "x" * 998
        return int(group.all_reduce(1))

    assert three.run(program) == [3, 3, 3]


def test_value_too_deep_to_decode_raises_and_the_group_stays_usable(
    three: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The possible depth of a value depends on the stack of the receiver."""
    real = json.loads

    def shallow(data: Any) -> Any:
        if data == b"[[[1]]]":
            raise RecursionError("too deep")
        return real(data)

    monkeypatch.setattr(json, "loads", shallow)

    def program(group: gw.Group) -> int:
        with pytest.raises(gw.ArrayError, match="cannot be decoded on this rank: the value is nested"):
            group.broadcast_value([[[1]]])
        with pytest.raises(gw.ArrayError, match="cannot be decoded on this rank"):
            group.all_gather_values([[[1]]])
        return int(group.all_reduce(1))

    assert three.run(program) == [3, 3, 3]
