"""Where the journal of a job is, and what happens with it when the job has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradwire.errors import ConfigError, JournalError
from gradwire.membership.client.requests import register, unregister
from gradwire.membership.coordinator import journal_files
from gradwire.membership.coordinator.service import Coordinator
from gradwire.membership.types import Assembly, Member
from support.membership_claims import SECRET

Serve = Callable[..., Coordinator]


@pytest.fixture(name="begin")
def begin_fixture(serve: Serve, tmp_path: Path) -> Serve:
    """Starts the coordinator of a named job, with its journal at the default path below the test's folder."""

    def begin(size: int = 1, job: str = "digits", **options: object) -> Coordinator:
        path = journal_files.path_of(job, {"XDG_STATE_HOME": str(tmp_path)})
        return serve(size, job=job, journal=path, retire=journal_files.retire_ended, **options)

    return begin


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "gradwire").iterdir() if not path.name.endswith("-journal"))


def joined(coordinator: Coordinator, name: str = "a") -> Assembly:
    member = Member(name, None, "machine", "host", os.getpid(), "")
    return register(coordinator.address, member, size=None, secret=SECRET, job=None, timeout=30.0)


def left(coordinator: Coordinator, assembly: Assembly, *, finished: bool = False) -> None:
    member = assembly.members[assembly.rank]
    assert unregister(coordinator.address, member, secret=SECRET, run=assembly.run, finished=finished)


def test_path_is_below_the_state_folder_and_safe_for_any_name(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    assert journal_files.path_of("digits", state) == tmp_path / "gradwire" / "digits.journal"
    assert (tmp_path / "gradwire").stat().st_mode & 0o777 == 0o700
    odd = ["..", ".", "a/b", "a%2Fb", "é" * 128, "é" * 127 + "e", "\udcff", " ", "x" * 128]
    paths = [journal_files.path_of(job, state) for job in odd]
    assert {path.parent for path in paths} == {tmp_path / "gradwire"}
    assert len(set(paths)) == len(odd)
    for path in paths:
        path.touch()
    home = {"HOME": str(tmp_path / "home"), "XDG_STATE_HOME": "relative"}
    assert journal_files.path_of("digits", home) == tmp_path / "home/.local/state/gradwire/digits.journal"


def test_path_in_a_folder_that_cannot_be_created_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "gradwire").write_text("a file")
    with pytest.raises(JournalError, match=r"cannot be created .*name a file with --journal, or .* --no-journal"):
        journal_files.path_of("digits", {"XDG_STATE_HOME": str(tmp_path)})


def test_journal_of_a_stopped_job_with_members_is_resumed(begin: Serve) -> None:
    first = begin()
    assert first.resumed == ""
    joined(first)
    first.stop()
    second = begin()
    assert second.run == first.run
    assert second.resumed == f"run {first.run.hex()} at generation 1 with 1 member"


@pytest.mark.parametrize("sizes", [{}, {"minimum": 1, "maximum": 4}])
def test_journal_of_an_ended_job_is_moved_aside(begin: Serve, tmp_path: Path, sizes: dict[str, int]) -> None:
    runs = []
    for _ in range(journal_files.EARLIER_KEPT + 2):
        coordinator = begin(**sizes)
        assert coordinator.resumed == ""
        runs.append(coordinator.run)
        left(coordinator, joined(coordinator))
        coordinator.stop()
    assert runs == sorted(set(runs))
    assert names(tmp_path) == ["digits.earlier-1", "digits.earlier-2", "digits.earlier-3", "digits.journal"]
    newest = begin(**sizes, job="digits")
    assert newest.run > runs[-1]


def test_journal_of_a_killed_coordinator_whose_job_had_ended_is_not_resumed(begin: Serve, tmp_path: Path) -> None:
    first = begin()
    left(first, joined(first))
    copy = (tmp_path / "gradwire" / "digits.journal").read_bytes()
    first.stop()
    (tmp_path / "gradwire" / "digits.journal").write_bytes(copy)
    assert begin(2).resumed == "", "the new job may have another size"


def test_journal_of_finished_work_is_moved_aside_when_its_last_members_had_time_to_leave(
    begin: Serve, tmp_path: Path
) -> None:
    first = begin(2, minimum=1, maximum=2)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda name: joined(first, name), "ab"))
    left(first, found[0], finished=True)
    first.stop()
    second = begin(2, minimum=1, maximum=2)
    assert second.resumed.endswith("at generation 1 with 1 member")
    second.stop()
    long_ago = time.time() - 3600
    os.utime(tmp_path / "gradwire" / "digits.journal", (long_ago, long_ago))
    assert begin(1, minimum=1, maximum=1).resumed == ""


def test_journal_without_a_generation_is_no_obstacle_for_other_sizes(begin: Serve, tmp_path: Path) -> None:
    begin(4).stop()
    assert names(tmp_path) == []
    assert begin(3).resumed == ""


def test_journal_of_an_unfinished_job_of_other_sizes_is_refused_until_begun_anew(begin: Serve, tmp_path: Path) -> None:
    first = begin()
    joined(first)
    first.stop()
    with pytest.raises(ConfigError, match=r"initial size is 1, not 2.* or begin a new run with another file or with"):
        begin(2)
    journal_files.begin_anew(tmp_path / "gradwire" / "digits.journal")
    assert begin(2).run > first.run


def test_journal_in_use_is_neither_retired_nor_moved(begin: Serve, tmp_path: Path) -> None:
    first = begin()
    left(first, joined(first))
    with pytest.raises(JournalError, match="another coordinator uses it"):
        begin()
    with pytest.raises(JournalError, match="another coordinator uses it"):
        journal_files.begin_anew(tmp_path / "gradwire" / "digits.journal")
    assert names(tmp_path) == ["digits.journal"]


def test_journal_of_a_random_name_is_resumed_by_that_name_and_pruned_when_old(serve: Serve, tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    path = journal_files.path_of("3fa9", state, named=False)
    first = serve(1, job="3fa9", journal=path, retire=journal_files.retire_ended)
    joined(first)
    first.stop()
    assert journal_files.path_of("3fa9", state) == path
    journal_files.prune_unnamed(state)
    assert path.exists()
    again = serve(1, job="3fa9", journal=path, retire=journal_files.retire_ended)
    assert again.run == first.run
    os.utime(path, (1.0, 1.0))
    journal_files.prune_unnamed(state)
    assert path.exists(), "a coordinator uses it"
    again.stop()
    os.utime(path, (1.0, 1.0))
    journal_files.prune_unnamed(state)
    assert list(path.parent.iterdir()) == []
