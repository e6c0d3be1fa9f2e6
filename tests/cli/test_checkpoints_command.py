"""The `gradwire checkpoints` command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gradwire.cli import main
from support.checkpoints import fence_of, write_checkpoint


@pytest.fixture(name="saved")
def saved_fixture(tmp_path: Path) -> Path:
    """Steps 99 and 199 of a run, step 199 of a later one, and a torn checkpoint of step 299."""
    path = tmp_path / "saved"
    write_checkpoint(path, {"w": np.zeros(3), "lr": 0.1}, 99)
    write_checkpoint(path, {"w": np.zeros(3), "lr": 0.1}, 199)
    write_checkpoint(path, {"w": np.array([0.0, 0.5, 0.0]), "lr": 0.05}, 199, fence_of(2))
    torn = write_checkpoint(path, {"w": np.zeros(3)}, 299, fence_of(2))
    (torn.path / "manifest.json").unlink()
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, ["checkpoints", *map(str, arguments)])


def test_checkpoints_lists_the_newest_first_and_says_which_are_torn(saved: Path) -> None:
    result = run(saved)
    header, *rows, reason = result.output.splitlines()
    assert header.split() == ["step", "run", "generation", "ranks", "size", "written", "state"]
    assert [(row.split()[0], row.split()[-1]) for row in rows] == [
        ("299", "torn"),
        ("199", "complete"),
        ("199", "complete"),
        ("99", "complete"),
    ]
    assert reason.startswith("step 299 of run 000000000000 is torn: it has no manifest")
    assert (result.exit_code, max(map(len, result.output.splitlines())) <= 120) == (0, True)


def test_checkpoints_list_of_300_has_one_line_of_80_columns_for_each(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path, {"w": np.zeros(3)}, 10**8)
    for step in range(299):
        name = one.path.name.replace(f"{10**8:012d}", f"{10**8 + 1 + step:012d}")
        shutil.copytree(one.path, tmp_path / name)
        (tmp_path / name / "manifest.json").unlink()
    lines = run(tmp_path).output.splitlines()
    table = [line for line in lines if " is torn: " not in line]
    assert (len(table), max(map(len, table)) <= 80) == (301, True)


def test_checkpoints_verify_intact_and_torn_exits_with_0(saved: Path) -> None:
    result = run(saved, "--verify")
    assert (result.exit_code, result.output.count("verified"), result.output.count("is torn")) == (0, 3, 1)


def test_checkpoints_verify_damaged_names_the_file_and_exits_with_1(saved: Path) -> None:
    path = next(saved.glob("step-000000000099.*")) / "rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert run(saved).exit_code == 0
    result = run(saved, "--verify")
    assert (result.exit_code, result.output.count("verified")) == (1, 2)
    assert f"step 99 of run 000000000000 is damaged: {path} is damaged: array 'w'" in result.output
    found = json.loads(run(saved, "--verify", "--json").output)
    assert [(one["step"], one["complete"], one["verified"]) for one in found] == [
        (299, False, None),
        (199, True, True),
        (199, True, True),
        (99, True, False),
    ]


def test_checkpoints_json_has_all_facts(saved: Path) -> None:
    torn, one, *_ = json.loads(run(saved, "--json").output)
    assert (torn["complete"], len(torn["problems"]), torn["ranks"]) == (False, 1, None)
    assert {name: one[name] for name in ("step", "run", "generation", "ranks", "problems", "verified")} == {
        "step": 199,
        "run": fence_of(2).run.hex(),
        "generation": 1,
        "ranks": 2,
        "problems": [],
        "verified": None,
    }
    assert (Path(one["path"]).parent, one["written"] > 1e9, one["bytes"] > 0) == (saved, True, True)


def test_checkpoints_diff_shows_arrays_and_values(saved: Path) -> None:
    result = run(saved, "--diff", "99", "latest")
    assert result.output.splitlines() == [
        "- step 99, run 000000000000, generation 1",
        "+ step 199, run 000000000000, generation 1",
        "arrays: 0 equal, 1 differ",
        "w  float64[3]  1 of 3 differ, by at most 0.5",
        "values: 1 differ",
        "lr  0.1 → 0.05",
    ]
    assert result.exit_code == 0


def test_checkpoints_diff_of_equal_ones_says_so(saved: Path) -> None:
    older = next(saved.glob(f"step-000000000199.{fence_of(1)}"))
    assert "no differences: all 1 arrays and all values are equal" in run(saved, "--diff", "99", older).output


def test_checkpoints_diff_as_json_has_no_nan(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"w": np.zeros(1), "x": 1.0}, 1)
    write_checkpoint(tmp_path, {"w": np.full(1, np.nan), "x": float("nan")}, 2)
    found = json.loads(run(tmp_path, "--diff", "1", "2", "--json").output, parse_constant=pytest.fail)
    assert (found["arrays"][0]["largest"], found["values"]) == ("nan", {"x": [[1.0], ["nan"]]})


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_checkpoints_export_writes_the_file_once(saved: Path, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"model{suffix}"
    result = run(saved, "--export", "latest", "--to", target)
    assert (result.exit_code, target.exists()) == (0, True)
    assert result.output.startswith(f"wrote step 199 of run 000000000000 to {target}: ")
    again = run(saved, "--export", "latest", "--to", target)
    assert (again.exit_code, "exists already: --force replaces it" in again.output) == (1, True)
    assert run(saved, "--export", "latest", "--to", target, "--force").exit_code == 0


def test_checkpoints_names_of_files_cannot_change_the_terminal(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"\x1b[2J\ud800": np.zeros(1)}, 1)
    write_checkpoint(tmp_path, {"\x1b[2J\ud800": np.ones(1)}, 2)
    assert r"\x1b[2J\ud800" in run(tmp_path, "--diff", "1", "2").output


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("7", "has no checkpoint '7'; steps of complete checkpoints: 199, 99"),
        ("nonsense", "has no checkpoint 'nonsense'"),
        ("299", "is torn: it has no manifest"),
    ],
)
def test_checkpoints_unknown_or_torn_checkpoint_is_an_error(saved: Path, name: str, reason: str) -> None:
    result = run(saved, "--diff", name, "latest")
    assert (result.exit_code, reason in result.output) == (1, True)


def test_checkpoints_folder_that_is_missing_empty_a_file_or_a_checkpoint_says_so(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    results = [run(tmp_path / "missing"), run(tmp_path / "empty"), run(tmp_path / "file"), run(next(saved.glob("s*")))]
    texts = ["there is no folder", "has no checkpoints", "Not a directory", "is one checkpoint: pass the folder"]
    assert [result.exit_code for result in results] == [1, 0, 1, 1]
    assert [text in result.output for text, result in zip(texts, results, strict=True)] == [True] * 4
    assert json.loads(run(tmp_path / "empty", "--json").output) == []


@pytest.mark.parametrize(
    "options", [["--verify", "--diff", "1", "2"], ["--export", "latest"], ["--to", "x.npz"], ["--force"]], ids=" ".join
)
def test_checkpoints_options_that_do_not_fit_are_a_usage_error(tmp_path: Path, options: list[str]) -> None:
    assert run(tmp_path, *options).exit_code == 2
