"""The examples, run in new processes through the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire

EXAMPLES = Path(__file__).parents[2] / "examples"


def call(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and the gradwire of the tests, without GRADWIRE_* variables."""
    source = str(Path(gradwire.__file__).parents[1])
    started = {"PYTHONPATH": source, "PYTHONUTF8": "1", "NO_COLOR": "1"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWIRE_", "FORCE_COLOR"))}
    return subprocess.run(
        [sys.executable, *command], env=environ | started, capture_output=True, text=True, timeout=120, check=False
    )


def run(ranks: int, example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call("-m", "gradwire", "run", "-n", str(ranks), str(EXAMPLES / example), *arguments)


def report(outcome: subprocess.CompletedProcess[str]) -> str:
    return f"exit code {outcome.returncode}\n{outcome.stdout}\n{outcome.stderr}"


def test_examples_readme_lists_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    for script in EXAMPLES.glob("*.py"):
        assert f"[`{script.name}`]({script.name})" in text


def test_hello_example_prints_the_results_of_each_collective() -> None:
    outcome = run(4, "hello.py")
    assert outcome.returncode == 0, report(outcome)
    for rank in range(4):
        assert f"[{rank}] all_reduce: [6. 6. 6.], and of a number: 3\n" in outcome.stdout, report(outcome)
        assert f"[{rank}] broadcast: [0. 1. 2.]\n" in outcome.stdout
        assert f"[{rank}] stream: [4.0, 40.0, 400.0]\n" in outcome.stdout
    assert "[2] subgroup [0, 2]: rank 1 of 2, sum 2\n" in outcome.stdout
    assert "[3] subgroup [1, 3]: rank 1 of 2, sum 4\n" in outcome.stdout


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_digits_example_any_number_of_ranks_ends_with_equal_weights(ranks: int) -> None:
    outcome = run(ranks, "digits.py", "--epochs", "2", "--target", "0.8")
    assert outcome.returncode == 0, report(outcome)
    ends = re.findall(r"^\[(\d)\] rank \1 ends with (\w{8})$", outcome.stdout, re.MULTILINE)
    assert sorted(rank for rank, _ in ends) == [str(rank) for rank in range(ranks)], report(outcome)
    assert len({digest for _, digest in ends}) == 1
    assert f"[0] ✓ the same bits on every rank ({ranks})\n" in outcome.stdout
    assert outcome.stdout.count("[0] ✓ ") == 4
    assert "\x1b" not in outcome.stdout  # no terminal control sequences in a pipe
    assert re.search(
        r"^\[0\] epoch   2 ━{24} loss 0\.\d{4}  test accuracy  [89]\d\.\d% \d:\d\d:\d\d", outcome.stdout, re.M
    )


def test_digits_example_runs_in_a_single_process() -> None:
    outcome = call(str(EXAMPLES / "digits.py"), "--epochs", "2", "--target", "0.8")
    assert outcome.returncode == 0, report(outcome)
    assert "✓ at most 0.0e+00 from a single process's weights" in outcome.stdout


def test_digits_example_changed_bit_is_found_and_fails_the_run() -> None:
    outcome = run(3, "digits.py", "--epochs", "1", "--target", "0", "--tamper", "2")
    assert outcome.returncode == 1, report(outcome)
    assert "[0] ✗ FAILED: different bits: output.bias on rank 2\n" in outcome.stdout


def test_digits_example_accuracy_below_target_fails_the_run() -> None:
    outcome = run(2, "digits.py", "--epochs", "1", "--target", "1")
    assert outcome.returncode == 1, report(outcome)
    assert re.search(
        r"^\[0\] ✗ FAILED: .* of 360 test images correct \(required: 100%\)$", outcome.stdout, re.MULTILINE
    )


@pytest.mark.slow
def test_jax_digits_example_ends_with_equal_weights() -> None:
    outcome = run(2, "jax_digits.py", "--epochs", "5", "--target", "0.8")
    assert outcome.returncode == 0, report(outcome)
    ends = re.findall(r"rank (\d) of 2 ends with (\w{8}): [89]\d\.\d% of 360 test images correct", outcome.stdout)
    assert sorted(rank for rank, _ in ends) == ["0", "1"], report(outcome)
    assert len({digest for _, digest in ends}) == 1


@pytest.mark.slow
def test_compressed_example_reports_fewer_bytes_for_each_compression() -> None:
    outcome = run(2, "compressed.py")
    assert outcome.returncode == 0, report(outcome)
    fewer = [float(times) for times in re.findall(r" bytes +([\d.]+)x", outcome.stdout)]
    assert fewer == sorted(fewer), report(outcome)
    assert len(fewer) == 6


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_ddp_example_ends_with_equal_weights(ranks: int) -> None:
    outcome = run(ranks, "torch_ddp.py")
    assert outcome.returncode == 0, report(outcome)
    assert re.search(rf"^\[0\] {ranks} ranks hold the same weights, \w{{8}}", outcome.stdout, re.MULTILINE), report(
        outcome
    )


@pytest.mark.slow
def test_elastic_torch_example_replaces_a_lost_worker() -> None:
    elastic = ("--min", "2", "--restarts", "1")
    outcome = call("-m", "gradwire", "run", "-n", "2", *elastic, str(EXAMPLES / "elastic_torch.py"), "--lose", "1")
    assert outcome.returncode == 0, report(outcome)
    assert "takes its place (restart 1 of 1)" in outcome.stdout + outcome.stderr, report(outcome)
    assert re.search(r"generation \d: 2 ranks hold the same weights", outcome.stdout), report(outcome)


@pytest.mark.slow
def test_elastic_torch_example_continues_with_the_remaining_workers() -> None:
    outcome = call("-m", "gradwire", "run", "-n", "3", "--min", "1", str(EXAMPLES / "elastic_torch.py"), "--lose", "1")
    assert outcome.returncode == 0, report(outcome)
    assert re.search(r"generation 2: 2 ranks hold the same weights", outcome.stdout), report(outcome)
