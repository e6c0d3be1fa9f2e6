"""The folder for the logs and the journal of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.errors import TransportError
from gradwire.launch.log_folder import JOURNAL, log_folder


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
