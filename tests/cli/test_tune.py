"""The `gradwire tune` command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.collectives import DEFAULTS, tuning_table
from support.launch_jobs import LONG
from support.leftovers import children_of
from support.ranks import eventually


def tune(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradwire", "tune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=4 * LONG, env=os.environ | more)


@pytest.mark.slow
def test_tune_stores_its_measurements_and_show_uses_them(tmp_path: Path) -> None:
    file = tmp_path / "config" / "tuning.json"
    done = tune(GRADWIRE_TUNING=str(file))
    assert done.returncode == 0, done.stderr
    assert f"# stored in {file}" in done.stdout
    table = tuning_table.read(file)
    assert table.tcp != DEFAULTS.tcp
    assert table.net == DEFAULTS.net
    shown = tune("--show", GRADWIRE_TUNING=str(file)).stdout
    assert shown.startswith(f"# current table: {file}\n")
    assert f"{table.tcp.round * 1e6:.2f} µs" in shown


@pytest.mark.slow
def test_tune_dry_run_stores_nothing_and_prints_the_measurements(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    done = tune("--dry-run", "--json", "--ranks", "3", GRADWIRE_TUNING=str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["stored"]) == (3, None)
    assert found["measured"][0]["kind"] == "tcp"
    assert all(timing["seconds"] > 0 for timing in found["measured"][0]["timings"])
    tuning_table.decode(found["table"])
    assert list(tmp_path.iterdir()) == []


def test_tune_show_without_a_valid_file_prints_the_reason_for_the_defaults(tmp_path: Path) -> None:
    for content, reason in ((None, "there is no such file"), ("{}", "its version is")):
        file = tmp_path / "tuning.json"
        if content is not None:
            file.write_text(content)
        done = tune("--show", GRADWIRE_TUNING=str(file))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"# current table: the defaults ({file}: {reason}")
        assert (
            tuning_table.decode(json.loads(tune("--show", "--json", GRADWIRE_TUNING=str(file)).stdout)["table"])
            == DEFAULTS
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_tune_interrupted_leaves_no_process_and_no_file(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradwire", "tune"]
    environ = os.environ | {"TMPDIR": str(tmp_path), "GRADWIRE_TUNING": str(tmp_path / "tuning.json")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environ, **pipes) as process:  # type: ignore[call-overload]
        assert eventually(lambda: len(children_of(process.pid)) == 3)  # all are started: two ranks, and their guard
        workers = children_of(process.pid)
        process.send_signal(number)
        _, err = process.communicate(timeout=LONG)
    assert process.returncode == 128 + number
    assert not any(line.startswith("Traceback") for line in err.splitlines()), err  # of a worker there may be one
    assert list(tmp_path.iterdir()) == []
    # One that was only just being started ends by itself.
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
