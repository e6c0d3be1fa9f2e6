"""Checkpoints as plain files."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors

import gradwire as gw
from gradwire.arrays import DTYPES, parse_dtype
from gradwire.training.checkpoints.export import export
from support.checkpoints import write_checkpoint
from support.system_calls import Calls

ARRAYS = {name: np.arange(4).reshape(2, 2).astype(parse_dtype(name).storage) for name in DTYPES}
STATE = {"model": ARRAYS, "0-d": np.array(1.5), "größe": np.ones((0, 2)), "lr": 0.1, "worst": float("inf")}
SHARDS = [{"m": np.zeros(1)}, {"m": np.ones(1)}]


def test_export_npz_has_all_arrays_and_the_values_as_json(tmp_path: Path) -> None:
    export(write_checkpoint(tmp_path / "saved", STATE, 7, shards=SHARDS), tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as found:
        about = json.loads(str(found["__metadata__"]))
        for name, array in ARRAYS.items():
            stored = found[f"model.{name}"]
            assert stored.dtype == (np.float32 if name == "bfloat16" else array.dtype)
            assert np.array_equal(stored, array.astype(stored.dtype))
        assert (found["0-d"].shape, found["größe"].shape, found["shard:1:m"].tolist()) == ((), (0, 2), [1.0])
    assert (about["step"], about["generation"], about["values"]) == (7, 1, {"lr": 0.1, "worst": "inf"})
    assert about["dtypes"]["model.bfloat16"] == "bfloat16"


def test_export_safetensors_has_all_arrays_and_the_values_as_json(tmp_path: Path) -> None:
    export(write_checkpoint(tmp_path / "saved", STATE, 7, shards=SHARDS), tmp_path / "x.safetensors")
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as found:
        assert (found.metadata()["step"], json.loads(found.metadata()["values"])["lr"]) == ("7", 0.1)
        for name, array in ARRAYS.items():
            assert found.get_tensor(f"model.{name}").tobytes() == array.tobytes()
        assert found.get_tensor("shard:1:m").tolist() == [1.0]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_export_existing_file_is_only_replaced_with_force(tmp_path: Path, suffix: str) -> None:
    checkpoint, target = write_checkpoint(tmp_path / "saved", STATE, 7), tmp_path / f"x{suffix}"
    target.write_text("mine")
    with pytest.raises(gw.CheckpointError, match="exists already: --force replaces it"):
        export(checkpoint, target)
    assert target.read_text() == "mine"
    export(checkpoint, target, force=True)
    assert target.stat().st_size > 100


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_export_to_a_full_disk_raises_and_leaves_no_file(tmp_path: Path, suffix: str) -> None:
    checkpoint, calls, call = write_checkpoint(tmp_path / "saved", {"w": np.ones(3)}, 7), Calls(), 0
    with pytest.raises(gw.CheckpointError, match="No space left on device"), calls.failing_at(call, errno.ENOSPC):
        export(checkpoint, tmp_path / f"x{suffix}")
    assert [one.name for one in tmp_path.iterdir()] == ["saved"]


def test_export_of_a_damaged_checkpoint_raises_and_leaves_no_file(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "saved", {"w": np.ones(3)}, 7, ranks=1)
    path = checkpoint.path / "rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(gw.CheckpointError, match="is damaged"):
        export(checkpoint, tmp_path / "x.npz")
    assert [one.name for one in tmp_path.iterdir()] == ["saved"]


def test_export_with_another_suffix_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(gw.ConfigError, match=r"ends with \.npz or \.safetensors"):
        export(write_checkpoint(tmp_path / "saved", STATE, 7), tmp_path / "x.pt")


def test_export_of_a_name_that_zip_cannot_store_raises_checkpoint_error(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "saved", {"\ud800": np.ones(1)}, 7)
    with pytest.raises(gw.CheckpointError, match="cannot write"):
        export(checkpoint, tmp_path / "x.npz")
