"""A checkpoint that a member begins at the coordinator: the run writes it, and every member reports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gradwire.training.checkpoints import CheckpointFolder

TRAIN = """
import os
import numpy as np
import gradwire as gw
from gradwire.membership.client import requests
from gradwire.security import tokens
from gradwire.security.secret import with_token

config = gw.JobConfig.from_environ()
secret = tokens.secret_or_token(with_token(os.environ, None), True)
state = {"w": np.zeros(4)}
run = gw.elastic(state, checkpoint="checkpoints")
statuses = []
for step in run.steps(1 << 30):
    with step:
        group = run.group
        state["w"] += group.all_reduce(np.ones(4))
        done = False
        if group.rank == 1 and step.index >= 3:  # the first call begins the checkpoint, the others show its progress
            status = requests.start_checkpoint(str(config.address), config.member, 7, secret=secret)
            statuses.append(f"{status.epoch} {len(status.waiting_for)} {status.complete}")
            done = status.complete
        if group.broadcast_value(done, root=1):
            run.request_stop()
if run.group.rank == 1:
    print("statuses", *dict.fromkeys(statuses), sep=";")
    print("last step", run.committed)
run.close()
"""


def test_checkpoint_begun_at_the_coordinator_is_written_and_reported_by_all_members(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    ended = subprocess.run(
        [sys.executable, "-m", "gradwire", "run", "-n", "3", "--min", "1", "--log-dir", "logs", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    output = dict(line.removeprefix("[1] ").split(" ", 1) for line in ended.stdout.splitlines() if "last" in line)
    statuses = next(line for line in ended.stdout.splitlines() if "statuses" in line).split(";")[1:]
    assert statuses[0] == "7 3 False"
    assert statuses[-1] == "7 0 True"
    steps = [checkpoint.step for checkpoint in CheckpointFolder(tmp_path / "checkpoints").complete()]
    assert len(steps) == 2  # the one for epoch 7, and that of the last step
    assert steps[0] == int(output["last"].split()[1])
    assert 3 <= steps[1] < steps[0]
