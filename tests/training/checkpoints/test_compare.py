"""What differs between two checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import parse_dtype
from gradwire.training.checkpoints.compare import Comparison, Difference, compare, difference
from support.checkpoints import write_checkpoint


def compared(path: Path, before: dict[str, Any], after: dict[str, Any], **options: Any) -> Comparison:
    return compare(write_checkpoint(path, before, 1, **options), write_checkpoint(path, after, 2, **options))


def test_compare_equal_states_of_other_ranks_is_empty(tmp_path: Path) -> None:
    state = {"w": np.ones(3), "lr": float("nan")}
    found = compare(write_checkpoint(tmp_path, state, 1, ranks=1), write_checkpoint(tmp_path, state, 2, ranks=3))
    assert (found.is_empty, found.equal) == (True, 1)


def test_compare_reports_every_kind_of_difference(tmp_path: Path) -> None:
    before = {"same": np.ones(1), "w": np.zeros(4), "old": np.ones(2), "cast": np.ones(2), "lr": 0.1, "gone": "x"}
    after = {"same": np.ones(1), "w": np.array([0, 0, 3, -4.5]), "new": np.ones(2), "cast": np.ones(2, "f4"), "lr": 0.5}
    found = compared(tmp_path, before, after | {"added": None})
    assert found.arrays == (
        Difference("w", "float64[4]", "float64[4]", 4, 2, 4.5),
        Difference("old", "float64[2]", ""),
        Difference("cast", "float64[2]", "float32[2]"),
        Difference("new", "", "float64[2]"),
    )
    assert found.equal == 1
    assert found.values == {"lr": ([0.1], [0.5]), "gone": (["x"], []), "added": ([], [None])}


def test_compare_only_other_bits_has_no_differing_element(tmp_path: Path) -> None:
    found = compared(tmp_path, {"w": np.array([0.0])}, {"w": np.array([-0.0])})
    assert found.arrays == (Difference("w", "float64[1]", "float64[1]", 1, 0, 0.0),)


def test_compare_shards_names_the_rank(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path, {}, 1, shards=[{"m": np.zeros(1), "n": 1}, {"m": np.zeros(1), "n": 1}])
    other = write_checkpoint(tmp_path, {}, 2, shards=[{"m": np.zeros(1), "n": 1}, {"m": np.ones(1), "n": 2}])
    found = compare(one, other)
    assert [array.name for array in found.arrays] == ["shard:1:m"]
    assert found.values == {"shard:1:n": ([1], [2])}


@pytest.mark.parametrize(
    ("dtype", "before", "after", "expected"),
    [
        ("int8", [-128, 0], [127, 0], (1, 255.0)),
        ("uint8", [0], [255], (1, 255.0)),
        ("int64", [-(1 << 63)], [(1 << 63) - 1], (1, float((1 << 64) - 1))),
        ("bool", [True, False], [False, False], (1, 1.0)),
        ("complex64", [0j], [3 + 4j], (1, 5.0)),
        ("bfloat16", [1.0, 2.0], [1.0, 4.0], (1, 2.0)),
        ("float16", [65504.0], [-65504.0], (1, 131008.0)),
        ("float64", [np.inf, np.nan], [-np.inf, np.nan], (1, np.inf)),
        ("float64", [], [], (0, 0.0)),
    ],
)
def test_difference_counts_and_measures_without_overflow(
    dtype: str, before: list[Any], after: list[Any], expected: tuple[int, float]
) -> None:
    storage = parse_dtype(dtype).storage
    assert difference(np.array(before, storage), np.array(after, storage)) == expected


def test_difference_to_nan_is_nan() -> None:
    count, largest = difference(np.array([1.0, 1.0]), np.array([np.nan, 9.0]))
    assert (count, np.isnan(largest)) == (2, True)


def test_compare_with_a_malformed_structure_raises_checkpoint_error(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path, {}, 1)
    head = dataclasses.replace(one.manifest.head, structure=b'{"d":null}')
    with pytest.raises(gw.CheckpointError, match="is damaged: malformed value"):
        compare(one, dataclasses.replace(one, found=dataclasses.replace(one.manifest, head=head)))
