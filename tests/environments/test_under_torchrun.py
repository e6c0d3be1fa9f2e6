"""The real torchrun: its store has MASTER_PORT, so the ranks must agree on another one through it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import gradwire as gw
with gw.init(timeout=60) as group:
    total = group.all_reduce(group.rank + 1)
    if group.rank == 0:
        print("size", group.size, "total", total)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--standalone"]])
def test_ranks_meet_under_torchrun(tmp_path: Path, options: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", "3", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    assert "size 3 total 6" in run.stdout
