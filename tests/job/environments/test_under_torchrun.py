"""Jobs under the real torchrun. Its store listens at MASTER_PORT, so the ranks agree on another port through it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GROUP = """
import gradwire as gw
with gw.init(timeout=60) as group:
    total = group.all_reduce(group.rank + 1)
    if group.rank == 0:
        print("size", group.size, "total", total)
"""

# torch finds the backend by its name; the script does not import gradwire.
BACKEND = """
import torch, torch.distributed as dist
dist.init_process_group("gradwire")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
if dist.get_rank() == 0:
    print("size", dist.get_world_size(), "mean", model.module.weight.grad.tolist())
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--standalone"]])
@pytest.mark.parametrize(("script", "printed"), [(GROUP, "size 3 total 6"), (BACKEND, "size 3 mean [[1.0, 1.0]]")])
def test_ranks_under_torchrun_join_one_group(tmp_path: Path, script: str, printed: str, options: list[str]) -> None:
    file = tmp_path / "script.py"
    file.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", "3", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    assert printed in run.stdout
