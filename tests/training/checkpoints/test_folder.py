"""Folders of checkpoints: what is listed, in which order, what is removed, and what cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gradwire as gw
from gradwire.training.checkpoints import CheckpointFolder
from gradwire.training.checkpoints.tensor_file import Cancelled
from support.checkpoints import fence_of, write_checkpoint, write_parts
from support.system_calls import Calls

STATE = {"w": np.arange(6.0), "b": np.zeros((0, 3)), "lr": 0.5}


def steps(path: Path) -> list[int]:
    return [one.step for one in CheckpointFolder(path).complete()]


def torn(path: Path, step: int, fence: gw.Fence | None = None) -> Path:
    """Write the parts of a checkpoint, but no manifest."""
    write_parts(CheckpointFolder(path), STATE, step, fence)
    return CheckpointFolder(path).draft(step, fence or fence_of()).path


def test_publish_makes_the_checkpoint_complete_and_newest(tmp_path: Path) -> None:
    written = [write_checkpoint(tmp_path, STATE, step) for step in (9, 19, 109)]
    found = CheckpointFolder(tmp_path).find()
    assert [one.path for one in found] == [one.path for one in reversed(written)]
    assert [(one.step, one.is_complete, one.nbytes) for one in found] == [
        (one.step, True, one.nbytes) for one in reversed(written)
    ]


def test_find_orders_runs_by_their_claims_although_the_clock_was_set_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, STATE, 99, fence_of(9))
    write_checkpoint(tmp_path, STATE, 49, fence_of(3))
    assert steps(tmp_path) == [49, 99]


def test_find_of_two_generations_that_wrote_one_step_returns_the_later_first(tmp_path: Path) -> None:
    for generation in (1, 2):
        write_checkpoint(tmp_path, STATE, 7, fence_of(1, generation))
    assert [one.fence.generation for one in CheckpointFolder(tmp_path).complete()] == [2, 1]


def test_find_of_a_missing_folder_has_none(tmp_path: Path) -> None:
    assert CheckpointFolder(tmp_path / "missing").find() == []


def test_find_ignores_foreign_files_and_folders(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, STATE, 9)
    for name in ("step-9", f"step-9.{fence_of()}", f"step-{1:012d}.x", "model.pt", f"step-{9:012d}.{fence_of()}.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / f"step-{10:012d}.{fence_of()}").write_text("a file")
    (tmp_path / f"step-{'٩' * 12}.{fence_of()}").mkdir()
    (tmp_path / f"step-{'9' * 200}.{fence_of()}").mkdir()  # a step with 200 digits is a possible name
    assert [(one.step, one.is_complete) for one in CheckpointFolder(tmp_path).find()] == [
        (int("9" * 200), False),
        (9, True),
    ]


def test_find_lists_a_link_to_a_checkpoint_and_prune_does_not_follow_it(tmp_path: Path) -> None:
    elsewhere = write_checkpoint(tmp_path / "elsewhere", STATE, 5)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / elsewhere.path.name).symlink_to(elsewhere.path)
    write_checkpoint(tmp_path / "here", STATE, 9, fence_of(2), keep=1)
    assert (steps(tmp_path / "here"), steps(tmp_path / "elsewhere")) == ([9, 5], [5])


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_publish_keeps_the_newest_checkpoints(tmp_path: Path, keep: int) -> None:
    for step in range(6):
        write_checkpoint(tmp_path, STATE, step, keep=keep)
    assert steps(tmp_path) == [5, 4, 3][:keep]
    assert sorted(one.name.partition("-")[0] for one in tmp_path.iterdir()) == ["claims", *["step"] * keep]


def test_publish_never_removes_itself_even_if_others_seem_newer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, STATE, 100)
    write_checkpoint(tmp_path, STATE, 50, keep=1)
    assert 50 in steps(tmp_path)


def test_publish_removes_older_torn_checkpoints_and_leftovers(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).claim(fence_of())
    old = torn(tmp_path, 3)
    shutil.copytree(old, tmp_path / f".removing-{old.name}")
    foreign = tmp_path / ".removing-photos"
    foreign.mkdir()
    write_checkpoint(tmp_path, STATE, 9)
    assert (old.exists(), (tmp_path / f".removing-{old.name}").exists(), foreign.exists()) == (False, False, True)


def test_publish_counts_no_torn_checkpoint_among_those_to_keep(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, STATE, 1)
    damaged = write_checkpoint(tmp_path, STATE, 2)
    (damaged.path / "rank-0.safetensors").write_bytes(b"short")
    write_checkpoint(tmp_path, STATE, 3, keep=2)
    assert steps(tmp_path) == [3, 1]


def test_publish_keeps_checkpoints_of_a_later_format_and_unreadable_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr("gradwire.training.checkpoints.manifest.FORMAT", 2)
        of_later_version = write_checkpoint(tmp_path, STATE, 1)
    unreadable = write_checkpoint(tmp_path, STATE, 2)
    (unreadable.path / "manifest.json").unlink()
    (unreadable.path / "manifest.json").mkdir()
    write_checkpoint(tmp_path, STATE, 3, keep=1)
    assert [(one.step, one.problem) for one in CheckpointFolder(tmp_path).find()][1:] == [
        (2, "its manifest cannot be read: Is a directory"),
        (1, "its manifest cannot be read: it has format 2, and this version of gradwire reads format 1"),
    ]
    assert of_later_version.path.exists()


def test_claim_of_a_new_run_removes_only_torn_checkpoints_of_earlier_ones(tmp_path: Path) -> None:
    """They may fill the disk, and their writers are fenced."""
    complete = [write_checkpoint(tmp_path, STATE, step) for step in range(5)]
    old, own = torn(tmp_path, 9), torn(tmp_path, 4, fence_of(2))
    CheckpointFolder(tmp_path, keep=1).claim(fence_of(2))
    assert [one.path.exists() for one in complete] == [True] * 5
    assert (old.exists(), own.exists()) == (False, True)
    CheckpointFolder(tmp_path).claim(fence_of(2, 2))
    assert not own.exists()


def test_publish_of_an_outdated_run_raises_fenced_and_stays_torn(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.claim(fence_of(1))
    head = write_parts(folder, STATE, 5)
    other = CheckpointFolder(tmp_path)
    shutil.copytree(folder.draft(5, fence_of()).path, tmp_path / "copy")
    other.claim(fence_of(2))
    (tmp_path / "copy").rename(folder.draft(5, fence_of()).path)  # as if the claim had come after the parts
    with pytest.raises(gw.Fenced):
        folder.draft(5, fence_of()).publish(head)
    assert steps(tmp_path) == []


def test_publish_without_a_part_names_the_ranks(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.claim(fence_of())
    head = write_parts(folder, STATE, 5, ranks=3)
    draft = folder.draft(5, fence_of())
    for rank in (1, 2):
        (draft.path / f"rank-{rank}.json").unlink()
    with pytest.raises(gw.CheckpointError, match="has no part of ranks 1, 2: do all hosts share"):
        draft.publish(head)
    assert steps(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "data", "reason"),
    [
        ("rank-1.json", b"{}", "is damaged: it is truncated"),
        ("rank-1.safetensors", b"short", "rank-1.safetensors has 5 bytes instead of"),
    ],
)
def test_publish_with_a_damaged_part_raises_checkpoint_error(
    tmp_path: Path, file: str, data: bytes, reason: str
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.claim(fence_of())
    head = write_parts(folder, STATE, 5)
    draft = folder.draft(5, fence_of())
    (draft.path / file).write_bytes(data)
    with pytest.raises(gw.CheckpointError, match=reason):
        draft.publish(head)
    assert steps(tmp_path) == []


def test_publish_of_a_state_that_readers_refuse_raises_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.training.checkpoints.manifest.MAX_SKELETON", 10)
    with pytest.raises(gw.CheckpointError, match="the structure of the state has more than 10 bytes"):
        write_checkpoint(tmp_path, STATE, 5)
    assert steps(tmp_path) == []


def test_write_part_of_a_complete_checkpoint_raises_and_changes_nothing(tmp_path: Path) -> None:
    done = write_checkpoint(tmp_path, STATE, 5)
    with pytest.raises(gw.CheckpointError, match="is already complete"):
        CheckpointFolder(tmp_path).draft(5, fence_of()).write_part(0, [("w", np.ones(3))])
    CheckpointFolder(tmp_path).draft(5, fence_of()).discard(0)
    assert (steps(tmp_path), done.verify()) == ([5], [])


def test_write_part_repeated_name_raises_checkpoint_error(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).claim(fence_of())
    with pytest.raises(gw.CheckpointError, match="used twice"):
        CheckpointFolder(tmp_path).draft(5, fence_of()).write_part(0, [("w", np.ones(3)), ("w", np.ones(3))])


def test_write_part_cancelled_leaves_no_part(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).claim(fence_of())
    draft = CheckpointFolder(tmp_path).draft(5, fence_of())
    with pytest.raises(Cancelled):
        draft.write_part(0, [("w", np.ones(3))], cancelled=lambda: True)
    assert list(draft.path.iterdir()) == []


def test_discard_removes_the_draft(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).claim(fence_of())
    path = torn(tmp_path, 5)
    draft = CheckpointFolder(tmp_path).draft(5, fence_of())
    draft.discard(1)
    assert sorted(one.name for one in path.iterdir()) == ["rank-0.json", "rank-0.safetensors"]
    draft.discard(0)
    draft.discard(0)
    assert [one.name for one in tmp_path.iterdir()] == ["claims"]


def test_write_part_after_the_folder_was_removed_raises_checkpoint_error(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "saved")
    folder.claim(fence_of())
    shutil.rmtree(folder.path)
    with pytest.raises(gw.CheckpointError, match=r"saved.*do all hosts share"):
        folder.draft(5, fence_of()).write_part(0, [("w", np.ones(3))])
    folder.claim(fence_of())
    write_checkpoint(folder.path, STATE, 6)
    assert steps(folder.path) == [6]


def test_claim_of_a_file_raises_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = CheckpointFolder(tmp_path / "file")
    with pytest.raises(gw.CheckpointError, match=r"cannot claim .*file: Not a directory"):
        folder.claim(fence_of())
    with pytest.raises(gw.CheckpointError, match=r"cannot read .*file: Not a directory"):
        folder.find()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_write_failing_at_any_call_raises_checkpoint_error_and_keeps_the_last_one(tmp_path: Path, error: int) -> None:
    """The next attempt succeeds, whatever the failed one has left."""
    failed = 0
    for call in range(1000):
        path = tmp_path / str(call)
        write_checkpoint(path, STATE, 1, ranks=1)
        calls = Calls()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(gw.CheckpointError))  # other errors fail this test
            stack.enter_context(calls.failing_at(call, error))
            write_checkpoint(path, STATE, 2, ranks=1, keep=1)
        found = CheckpointFolder(path).complete()
        failed += found[0].step == 1
        assert [one.verify() for one in found] == [[] for _ in found]
        write_checkpoint(path, STATE, 3, fence_of(1, 2), ranks=1, keep=1)
        assert [one.step for one in CheckpointFolder(path).find()] == [3]
        if calls.seen <= call:
            assert failed > 20
            return


@pytest.fixture(name="small_disk")
def small_disk_fixture(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for about two checkpoints of 100 kB."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=300k gradwire-test {path} 2>/dev/null"):
        pytest.skip("mounting a small file system needs root")
    yield path
    assert os.system(f"umount {path}") == 0


def test_full_disk_is_reported_and_room_of_a_killed_run_is_used_again(small_disk: Path) -> None:
    state = {"w": np.arange(13_000.0)}
    write_checkpoint(small_disk, state, 1, keep=1)
    torn_parts = CheckpointFolder(small_disk)
    write_parts(torn_parts, state, 2)  # the run is killed here
    draft = torn_parts.draft(3, fence_of())
    with pytest.raises(gw.CheckpointError, match="No space left on device"):
        draft.write_part(0, [("w", state["w"])])
    draft.discard(0)
    assert steps(small_disk) == [1]
    write_checkpoint(small_disk, state, 2, fence_of(2), keep=1)
    assert [one.step for one in CheckpointFolder(small_disk).find()] == [2]


def test_folder_relative_path_stays_the_same_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = CheckpointFolder("saved")
    monkeypatch.chdir("/")
    assert folder.path == tmp_path / "saved"


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_folder_invalid_keep_raises_config_error(tmp_path: Path, keep: int) -> None:
    with pytest.raises(gw.ConfigError, match="at least 1 checkpoint"):
        CheckpointFolder(tmp_path, keep)


def test_folder_with_an_empty_path_raises_config_error() -> None:
    with pytest.raises(gw.ConfigError, match="is empty"):
        CheckpointFolder("")


def test_draft_of_a_negative_step_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(gw.ConfigError, match="not negative"):
        CheckpointFolder(tmp_path).draft(-1, fence_of())


def test_publish_of_another_steps_head_raises_checkpoint_error(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.claim(fence_of())
    head = write_parts(folder, STATE, 5)
    with pytest.raises(gw.CheckpointError, match="does not belong to"):
        folder.draft(6, fence_of()).publish(head)
