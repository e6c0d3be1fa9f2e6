"""State: split into a skeleton and arrays, transferred to another rank, restored without pickle."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradwire.errors import ArrayError
from gradwire.training.state import State, memory_for


class Optimizer:
    """An optimizer like those of frameworks: nested state with integer keys and tuples, some of which appears later."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def moved(source: State, target: State) -> None:
    skeleton, leaves = source.take_apart()
    memory = memory_for(skeleton)
    for place, leaf in zip(memory, leaves, strict=True):
        place[...] = leaf
    target.put_together(skeleton, memory)


def test_state_put_together_writes_into_the_existing_arrays() -> None:
    mine, theirs = np.zeros((2, 3), np.float32), np.arange(6, dtype=np.float32).reshape(2, 3)
    state = {"w": mine}
    moved(State({"w": theirs}), State(state))
    assert state["w"] is mine
    np.testing.assert_array_equal(mine, theirs)


def test_state_own_memory_is_used_if_shapes_match_and_arrays_are_writable() -> None:
    mine = {"w": np.zeros((2, 3)), "turned": np.zeros((3, 2)).T, "number": np.zeros(())}
    theirs = {"w": np.ones((2, 3)), "turned": np.ones((3, 2)).T, "number": np.ones(())}
    skeleton, leaves = State(theirs).take_apart()
    own = State(mine).own_memory(skeleton)
    assert own is not None
    assert np.shares_memory(own[0], mine["w"])
    for place, leaf in zip(own, leaves, strict=True):
        place[...] = leaf
    State(mine).put_together(skeleton, own)
    assert State(mine).digest() == State(theirs).digest()
    read_only = np.zeros((2, 3))
    read_only.flags.writeable = False
    for other in (np.zeros((3, 2)), read_only):
        assert State({**mine, "w": other}).own_memory(skeleton) is None


def test_state_nested_dicts_keep_their_arrays_and_stateful_objects() -> None:
    mine, inner = np.zeros(3), Optimizer({"lr": 1.0})
    state: dict[str, Any] = {"weights": {"w": mine}, "others": {"optimizer": inner}}
    moved(State({"weights": {"w": np.arange(3.0)}, "others": {"optimizer": Optimizer({"lr": 0.5})}}), State(state))
    np.testing.assert_array_equal(mine, [0, 1, 2])
    assert state["weights"]["w"] is mine
    assert inner.state == {"lr": 0.5}


def test_state_strided_half_empty_and_scalar_arrays_are_restored() -> None:
    source = {
        "strided": np.arange(10.0)[::3],
        "half": np.arange(3).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.int8),
        "scalar": np.array(7, np.int64),
        "turned": np.arange(6).reshape(2, 3).T,
    }
    target: dict[str, Any] = {name: np.zeros_like(value) for name, value in source.items()}
    moved(State(source), State(target))
    for name, value in source.items():
        np.testing.assert_array_equal(target[name], value)
        assert target[name].dtype == value.dtype
    assert State(source).digest() == State(target).digest()


def test_state_object_with_state_dict_receives_the_state_of_the_source() -> None:
    full = {
        "state": {0: {"step": np.float32(3), "mean": np.ones(4)}, 1: {"step": np.float32(3), "mean": np.zeros(2)}},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "nan": float("inf"), "name": None, "on": True, "params": [0, 1]}],
    }
    there, here = Optimizer(full), Optimizer({"state": {}, "groups": []})
    target = {"optimizer": here, "w": np.zeros(2)}
    moved(State({"optimizer": there, "w": np.full(2, 5.0)}), State(target))
    assert here.state["groups"] == full["groups"]
    assert isinstance(here.state["groups"][0]["betas"], tuple)
    assert list(here.state["state"]) == [0, 1]
    np.testing.assert_array_equal(here.state["state"][0]["mean"], np.ones(4))
    np.testing.assert_array_equal(target["w"], [5, 5])
    assert State(target).digest() == State({"optimizer": there, "w": np.full(2, 5.0)}).digest()


def test_state_put_together_drops_extra_entries_and_adds_missing_ones() -> None:
    target: dict[str, Any] = {"old": np.ones(1)}
    moved(State({"new": np.full(3, 2.0), "epoch": 4}), State(target))
    assert list(target) == ["new", "epoch"]
    assert target["epoch"] == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["w"].view(np.uint8).__setitem__(0, 1),
        lambda state: state.__setitem__("lr", 0.2),
        lambda state: state.__setitem__("w", state["w"].reshape(2, 2)),
        lambda state: state.__setitem__("w", state["w"].view(np.int32)),
    ],
)
def test_state_digest_changes_with_every_bit_value_shape_and_dtype(change: Any) -> None:
    state: dict[str, Any] = {"w": np.zeros(4, np.float32), "lr": 0.1}
    before = State(state).digest()
    change(state)
    assert State(state).digest() != before


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ([1, 2], "got list"),
        ({"w": object()}, r"state\['w'\] cannot be sent"),
        ({"a": {(1, 2): np.ones(1)}}, r"has the key \(1, 2\)"),
        ({"a": [np.array(["text"])]}, r"state\['a'\]\[0\] cannot be sent"),
    ],
)
def test_state_with_an_unsupported_value_raises_array_error(state: Any, reason: str) -> None:
    with pytest.raises(ArrayError, match=reason):
        State(state)


@pytest.mark.parametrize(
    "skeleton",
    [
        b'{"a":["float32",[-1],"numpy"]}',
        b'{"a":["float32","x","numpy"]}',
        b'{"a":["float32",[1000000000000000000000],"numpy"]}',
        b'{"a":3}',
        b'{"f":"0x1p99999"}',
        b'{"d":[["a"]]}',
        b'{"d":[[["unhashable"],1]]}',
        b'{"of a later version":1}',
        b"[" * 100 + b"]" * 100,
        b"[" * 100_000,
    ],
)
def test_memory_for_malformed_skeleton_raises_value_error(skeleton: bytes) -> None:
    with pytest.raises(ValueError, match=r"malformed|too deep"):
        memory_for(skeleton)


def test_memory_for_more_than_the_machine_has_raises_value_error() -> None:
    skeleton = json.dumps([{"a": ["float64", [1 << 20, 1 << 8], "numpy"]}] * 100_000).encode()
    with pytest.raises(ValueError, match="more than the memory of this machine"):
        memory_for(skeleton)


def test_state_put_together_list_in_place_of_a_dict_raises_value_error() -> None:
    state = State({"w": np.zeros(3)})
    with pytest.raises(ValueError, match="malformed state: list"):
        state.put_together(b"[1]", [])


def test_state_touch_makes_the_pages_resident_without_changing_values() -> None:
    """The system maps a page of memory only when it is first written."""
    state: dict[str, Any] = {
        "w": np.frombuffer(mmap.mmap(-1, 64 << 20), np.float32).reshape(64, -1),  # np.zeros may reuse mapped memory
        "n": np.arange(3),
        "none": np.zeros((0, 4)),
        "x": np.float32(1),
    }
    before, expected = resident(), {name: np.array(value) for name, value in state.items() if name != "w"}
    State(state).touch()
    assert resident() - before > 60 << 20
    assert not state["w"].any()
    assert all((state[name] == value).all() for name, value in expected.items())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
