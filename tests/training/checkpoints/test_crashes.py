"""A process that is killed at any system call leaves a folder whose newest complete checkpoint is right."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from gradwire.training.checkpoints import CheckpointFolder
from support.checkpoints import fence_of, write_checkpoint
from support.system_calls import Disk, Killed, killed_at


def state_of(step: int) -> dict[str, object]:
    return {"w": np.full(5, step), "step": step}


def test_killed_at_any_call_the_newest_complete_checkpoint_is_found_and_intact(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / "before", state_of(step), step, ranks=1)
    newest: list[int] = []
    killed = True
    while killed:
        path = tmp_path / str(len(newest))
        shutil.copytree(tmp_path / "before", path)
        try:
            with killed_at(len(newest)):
                write_checkpoint(path, state_of(3), 3, fence_of(2), ranks=2, keep=1)
        except Killed:
            pass
        else:
            killed = False
        found = CheckpointFolder(path).complete()
        assert [one.verify() for one in found] == [[] for _ in found]
        assert found[0].load()[1][0].tolist() == [found[0].step] * 5
        newest.append(found[0].step)
        assert {one.step for one in found} in ({1, 2}, {1, 2, 3}, {2, 3}, {3})
        # The next run writes and removes as usual.
        write_checkpoint(path, state_of(4), 4, fence_of(3), ranks=1, keep=1)
        assert sorted(one.name[:17] for one in path.iterdir()) == ["claims", "step-000000000004"]
    assert newest == sorted(newest)  # complete from one call on, and never again torn
    assert (newest[0], newest[-1], len(newest) > 30) == (2, 3, True)


def test_power_loss_after_the_manifest_has_its_name_loses_nothing_of_the_checkpoint(tmp_path: Path) -> None:
    disk = Disk()
    with disk.watched():
        checkpoint = write_checkpoint(tmp_path / "new" / "saved", state_of(3), 3)
    manifest = checkpoint.path / "manifest.json"
    assert [unflushed - {checkpoint.path} for path, unflushed in disk.at_replace if path == manifest] == [set()]
    assert disk.unflushed == set()
