"""An elastic job with a DataLoader loses a worker and gets a new one: each sample of an epoch is used once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import gradwire as gw

SAMPLES, BATCH, TOTAL, LOST_AT = 200, 4, 30, 5
PROGRAM = f"""
    import json, os, signal, sys
    from pathlib import Path
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import gradwire as gw

    folder, loop, workers, members = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    run = gw.elastic({{"model": model, "optimizer": optimizer}}, min_size=members)
    ddp = gw.torch.DistributedDataParallel(model, run)
    sampler = gw.Sampler({SAMPLES}, run=run, seed=6)
    data = TensorDataset(torch.arange({SAMPLES}))
    loader = DataLoader(data, batch_size={BATCH}, sampler=sampler, num_workers=workers)

    def bare(loader):
        while True:
            yield from loader

    batches = sampler.follow(loader) if loop == "follow" else bare(loader)
    with (folder / str(os.getpid())).open("w", buffering=1) as record:
        for step in run.steps({TOTAL}):
            with step:
                epoch, generation = sampler.current_epoch, run.group.generation
                (index,) = next(batches)
                if step.index == {LOST_AT} and run.group.rank == 1 and generation == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                ddp(index[:, None] / {SAMPLES}).square().mean().backward()
                optimizer.step()
            if step.committed:
                print(json.dumps([step.index, epoch, run.group.size, index.tolist()]), file=record)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "workers", "members"), [("follow", 2, 3), ("follow", 2, 1), ("bare", 0, 1)])
def test_elastic_job_with_a_loader_uses_each_sample_of_an_epoch_once(
    loop: str, workers: int, members: int, tmp_path: Path
) -> None:
    script, records = tmp_path / "train.py", tmp_path / "records"
    script.write_text(textwrap.dedent(PROGRAM))
    records.mkdir()
    command = ["-m", "gradwire", "run", "-n", "3", "--min", "1", "--restarts", str(int(members == 3)), str(script)]
    environ = os.environ | {"PYTHONPATH": str(Path(gw.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *command, str(records), loop, str(workers), str(members)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    steps: dict[int, list[int]] = {}
    epochs: dict[int, int] = {}
    sizes: set[int] = set()
    for path in records.iterdir():
        for line in path.read_text().splitlines():
            step, epoch, size, index = json.loads(line)
            steps.setdefault(step, []).extend(index)
            sizes.add(size)
            assert epochs.setdefault(step, epoch) == epoch
    assert sizes == ({3} if members == 3 else {2, 3})
    assert sorted(steps) == list(range(TOTAL))
    position, current = 0, 0
    for step in range(TOTAL):
        if epochs[step] != current:
            assert (epochs[step], SAMPLES - position) < (current + 2, 3)  # fewer samples than ranks are left out
            position, current = 0, current + 1
        order = gw.Sampler(SAMPLES, rank=0, size=1, seed=6).epoch(current).tolist()
        assert sorted(steps[step]) == sorted(order[position : position + len(steps[step])]), step
        position += len(steps[step])
    assert current >= 1
