"""Tests the facts about this machine: usable cores, identity, and the status of processes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.host import machine


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        (
            "0::/a/b\n",
            {"a/cpu.max": "50000 100000\n", "a/b/cpu.max": "max 100000\n"},
            0.5,
        ),  # the limit of the parent group
        ("0::/a\n", {}, math.inf),
        ("0::/a\n", {"a/cpu.max": "nonsense"}, math.inf),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ("4:memory:/\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ("nonsense", {}, math.inf),
    ],
)
def test_core_quota_reads_the_smallest_limit_of_the_control_groups(
    tmp_path: Path, own: str, files: dict[str, str], cores: float
) -> None:
    write(tmp_path / "own", own)
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    assert machine.core_quota(tmp_path / "groups", tmp_path / "own") == cores


def test_usable_cores_are_limited_by_the_affinity_of_the_process() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert machine.usable_cores() <= 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert 0 < machine.usable_cores() <= len(allowed)


def test_identity_of_a_machine_is_stable() -> None:
    assert machine.identity() == machine.identity() != ""


def test_process_status_of_a_process_with_an_odd_name_has_state_and_start() -> None:
    name = "a) Z (b"  # as /proc shows it, between parentheses
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0); print(); input()"
    before = machine.process_status(os.getpid())
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        status = machine.process_status(child.pid)
        assert status is not None
        assert before is not None
        assert status.state in "RSD"
        assert status.started >= before.started
        assert machine.process_status(f"{child.pid}/task/{child.pid}") is not None
        child.kill()
    assert machine.process_status(child.pid) is None
