"""Files that are replaced as a whole, new folders, and the text of system errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import gradwire as gw
from gradwire.training.checkpoints import files
from support.system_calls import Calls, Disk, Killed, killed_at


def test_replace_file_killed_at_any_call_leaves_the_old_or_the_new_content(tmp_path: Path) -> None:
    path, seen = tmp_path / "file", set()
    for call in range(20):
        path.write_bytes(b"old")
        try:
            with killed_at(call):
                files.replace_file(path, b"the new content")
        except Killed:
            seen.add(path.read_bytes())
        else:
            break
    assert seen == {b"old", b"the new content"}


@pytest.mark.parametrize("call", range(3))
def test_replace_file_that_fails_keeps_the_old_content_and_leaves_no_draft(tmp_path: Path, call: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="No space"), Calls().failing_at(call, errno.ENOSPC):
        files.replace_file(path, b"the new content")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"old")]


def test_make_folder_flushes_the_names_of_all_new_folders(tmp_path: Path) -> None:
    disk = Disk()
    with disk.watched():
        files.make_folder(tmp_path / "a" / "b")
    assert (disk.unflushed, (tmp_path / "a" / "b").is_dir()) == (set(), True)


def test_make_folder_at_a_file_raises_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        files.make_folder(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        files.make_folder(tmp_path / "file" / "below")


def test_system_errors_names_the_action_the_path_and_the_reason() -> None:
    with pytest.raises(gw.CheckpointError) as caught, files.system_errors("write", Path("/x")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(caught.value) == "cannot write /x: No space left on device"
    assert isinstance(caught.value.__cause__, OSError)


def test_system_errors_of_a_file_system_without_locks_says_what_is_missing() -> None:
    with pytest.raises(gw.CheckpointError, match="must support locks"), files.system_errors("claim", Path("/x")):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_read_small_longer_file_raises_value_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_JSON", 3)
    (tmp_path / "file").write_bytes(b"four")
    with pytest.raises(ValueError, match="more than 3 bytes"):
        files.read_small(tmp_path / "file")
