"""The folder for the logs and the journal of a run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from gradwire.errors import TransportError
from gradwire.launch.log_folder import JOURNAL, KEPT_FOLDERS, log_folder, new_temporary_folder


def fill(folder: Path, text: str, *names: str) -> None:
    for name in names:
        (folder / name).write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())


def test_log_folder_with_an_earlier_run_moves_all_of_it(tmp_path: Path) -> None:
    wanted = tmp_path / "logs"
    for run in ("first", "second"):
        with log_folder(wanted) as folder:
            assert folder == wanted
            assert names(folder) == []
            fill(folder, run, "worker-0.log", "coordinator.log", JOURNAL)
            if run == "first":
                fill(folder, run, "worker-1.log")
    with log_folder(wanted):
        pass
    files = ["coordinator.journal", "coordinator.log", "worker-0.log"]
    assert names(wanted / "earlier-1") == [*files, "worker-1.log"]
    assert names(wanted / "earlier-2") == files
    assert [(wanted / f"earlier-{number}" / JOURNAL).read_text() for number in (1, 2)] == ["first", "second"]


def test_log_folder_with_other_files_leaves_them_alone(tmp_path: Path) -> None:
    fill(tmp_path, "mine", "notes.log", "worker.log", "rank-list.txt")
    with log_folder(tmp_path) as folder:
        assert folder == tmp_path
    assert names(tmp_path) == ["notes.log", "rank-list.txt", "worker.log"]
    assert not list(tmp_path.glob("earlier-*"))


def test_log_folder_with_a_half_made_journal_removes_it(tmp_path: Path) -> None:
    fill(tmp_path, "half", f".{JOURNAL}-abc", f".{JOURNAL}-abc-journal")
    with log_folder(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".launcher"]


def test_log_folder_in_use_gives_each_launcher_one_of_its_own(tmp_path: Path) -> None:
    with log_folder(tmp_path) as first:
        fill(first, "first", "rank-0.log")
        with log_folder(tmp_path) as second, log_folder(tmp_path) as third:
            assert len({first, second, third}) == 3
            assert {second.parent, third.parent} == {tmp_path}
            assert (first / "rank-0.log").read_text() == "first"
    with log_folder(tmp_path) as again:
        assert again == tmp_path


def test_log_folder_that_cannot_be_made_raises(tmp_path: Path) -> None:
    fill(tmp_path, "", "file")
    with pytest.raises(TransportError, match=r"cannot write logs in .*file"), log_folder(tmp_path / "file" / "logs"):
        pass


def old_folder(parent: Path, number: int) -> Path:
    """A folder that a failed run has left behind."""
    folder = parent / f"gradwire-20250101-0000{number:02}-abcd_012"
    folder.mkdir()
    fill(folder, "log", "rank-0.log")
    os.utime(folder, (0, 0))
    return folder


def test_new_temporary_folder_removes_the_oldest_ones_of_earlier_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = [old_folder(tmp_path, number) for number in range(KEPT_FOLDERS + 5)]
    fresh = new_temporary_folder()
    assert fresh.is_dir()
    assert [folder.exists() for folder in folders] == [False] * 6 + [True] * (KEPT_FOLDERS - 1)


def test_new_temporary_folder_leaves_folders_in_use_and_other_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = [old_folder(tmp_path, number) for number in range(KEPT_FOLDERS + 5)]
    target = tmp_path / "target"
    target.mkdir()
    link, other = tmp_path / "gradwire-20240101-000000-abcd_012", tmp_path / "gradwire-notes"
    link.symlink_to(target)
    other.mkdir()
    just_made = tmp_path / "gradwire-20240101-000001-abcd_012"
    just_made.mkdir()
    with log_folder(folders[0]):
        os.utime(folders[0], (0, 0))
        new_temporary_folder()
    assert all(path.exists() for path in (folders[0], link, target, other, just_made))
    assert not folders[1].exists()
