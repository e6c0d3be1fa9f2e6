"""Reading one checkpoint: its state, its shards, and damage of every file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import DTYPES, parse_dtype
from gradwire.training.checkpoints import Checkpoint, CheckpointFolder
from gradwire.training.state import State
from support.checkpoints import write_checkpoint

STATE = {
    **{name: np.arange(6).reshape(2, 3).astype(parse_dtype(name).storage) for name in DTYPES},
    "0-d": np.array(2.5),
    "empty": np.zeros((3, 0), np.int8),
    "strided": np.arange(12.0).reshape(3, 4).T,
    "größe ✓": {"shard:0:w": np.ones(1), "lr": 0.1, "nan": float("nan"), "names": ["a", None, True]},
}


def found(path: Path) -> Checkpoint:
    return CheckpointFolder(path).find()[0]


@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_load_of_any_number_of_ranks_returns_the_state(tmp_path: Path, ranks: int) -> None:
    written = State(dict(STATE))
    write_checkpoint(tmp_path, STATE, 7, ranks=ranks)
    skeleton, leaves = found(tmp_path).load()
    expected, own = written.take_apart()
    assert skeleton == expected
    assert [leaf.tobytes() for leaf in leaves] == [leaf.tobytes() for leaf in own]
    assert found(tmp_path).verify() == []


def test_load_of_an_empty_state_has_no_arrays(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, 7)
    assert found(tmp_path).load()[1] == []


def test_load_shards_returns_the_part_of_every_rank(tmp_path: Path) -> None:
    shards = [{"m": np.full(3, float(rank)), "step": rank} for rank in range(3)]
    write_checkpoint(tmp_path, {"m": np.zeros(2)}, 7, ranks=3, shards=shards)
    loaded = found(tmp_path).load_shards()
    assert [leaves[0].tolist() for _, leaves in loaded] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert found(tmp_path).verify() == []


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_load_of_changed_bytes_names_the_file_and_the_array(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"w": np.arange(9.0)}, 7, ranks=1).path / "rank-0.safetensors"
    flip(path, -1)
    with pytest.raises(gw.CheckpointError, match=r"rank-0.safetensors is damaged: array 'w' has digest"):
        found(tmp_path).load()
    assert len(found(tmp_path).verify()) == 1


def test_verify_of_a_damaged_header_reports_it_once(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"w": np.ones(2), "b": np.ones(2)}, 7, ranks=1).path / "rank-0.safetensors"
    flip(path, 8)
    assert len(found(tmp_path).verify()) == 1


def test_verify_counts_all_bytes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"w": np.ones(2), "b": np.ones(3)}, 7)
    counted: list[int] = []
    found(tmp_path).verify(counted.append)
    assert sum(counted) == 40


def test_load_of_arrays_from_another_checkpoint_raises_although_each_is_intact(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path, {"w": np.ones(2)}, 1, ranks=1)
    head = dataclasses.replace(one.manifest.head, digest="0" * 32)
    forged = dataclasses.replace(one, found=dataclasses.replace(one.manifest, head=head))
    with pytest.raises(gw.CheckpointError, match="was written with wrong values"):
        forged.load()


@pytest.mark.parametrize(
    ("file", "data", "problem"),
    [
        ("manifest.json", None, "it has no manifest"),
        ("manifest.json", b"", "its manifest is invalid: it is truncated or damaged"),
        ("rank-1.safetensors", None, "rank-1.safetensors is missing"),
        ("rank-1.safetensors", b"1234", "rank-1.safetensors has 4 bytes instead of"),
    ],
)
def test_checkpoint_without_a_whole_file_is_torn(tmp_path: Path, file: str, data: bytes | None, problem: str) -> None:
    path = write_checkpoint(tmp_path, {"w": np.ones(2), "b": np.ones(3)}, 7).path / file
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    assert found(tmp_path).problem.startswith(problem)
    assert found(tmp_path).verify() == [found(tmp_path).problem]
    with pytest.raises(gw.CheckpointError, match="is torn"):
        found(tmp_path).load()


def test_checkpoint_with_the_manifest_of_another_one_is_torn(tmp_path: Path) -> None:
    one, other = (write_checkpoint(tmp_path, {"w": np.ones(2)}, step).path for step in (1, 2))
    (other / "manifest.json").write_bytes((one / "manifest.json").read_bytes())
    assert found(tmp_path).problem == "its manifest belongs to another checkpoint"
