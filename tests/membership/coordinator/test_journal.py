"""Tests of the journal: loading, locking, and detecting damage."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradwire.errors import JournalError
from gradwire.membership.coordinator import journal as journals
from gradwire.membership.coordinator.journal import Journal, set_aside
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.types import Change
from support.membership_claims import RUN, worker

OTHER_PROCESS = """
import resource, sys
from pathlib import Path
from gradwire.membership.coordinator.journal import Journal
from gradwire.membership.coordinator.state_machine import Membership
from support.membership_claims import RUN, worker
path, largest_file = Path(sys.argv[1]), int(sys.argv[2])
if largest_file:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
state = Membership("job", RUN, start=1, minimum=1, maximum=1)
with Journal(path, durable="durable" in sys.argv) as journal:
    for generation in range(100_000):
        state.register(worker("a", generation), float(generation))
        journal.save(state.changes(), state.snapshot())
        print(state.generation, flush=True)
"""


def elastic() -> Membership:
    return Membership("job", RUN, start=1, minimum=1, maximum=4)


def grown(state: Membership, generation: int) -> Membership:
    for number in range(state.generation, generation):
        state.register(worker("a", number), float(number))
    return state


def sound(path: Path) -> Path:
    """A journal with two generations in it."""
    state = grown(elastic(), 2)
    with Journal(path) as journal:
        journal.save(state.changes(), state.snapshot())
    return path


def rows(path: Path, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


@contextlib.contextmanager
def other_process(path: Path, largest_file: int = 0, durable: bool = True) -> Any:
    command = [sys.executable, "-c", OTHER_PROCESS, str(path), str(largest_file), *(["durable"] if durable else [])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_journal_loads_the_saved_snapshot(tmp_path: Path) -> None:
    path, state = tmp_path / "journal", elastic()
    with Journal(path) as journal:
        assert journal.load() is None
        journal.save([], state.snapshot())
        assert journal.load() == state.snapshot()
        state.register(worker("a"), 0.0)
        state.register(worker("b"), 0.0)
        journal.save(state.changes(), state.snapshot())
        state.register(worker("a", 1), 1.0)
        state.gone(["b"], 1.0)
        state.start_checkpoint(3, "a", 1.0)
        journal.save(state.changes(), state.snapshot())
    with Journal(path) as journal:
        assert journal.load() == state.snapshot()
    assert [entry.name for entry in tmp_path.iterdir() if not entry.name.endswith("-journal")] == ["journal"]
    assert ("formed", 1) in rows(path, "SELECT kind, generation FROM changes")


def test_journal_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    assert sound(tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_journal_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "CHANGES_KEPT", 20)
    path, state = tmp_path / "journal", elastic()
    with Journal(path) as journal:
        for generation in range(1, 60):
            grown(state, generation)
            journal.save(state.changes(), state.snapshot())
            if generation == 30:
                size = path.stat().st_size
        assert journal.load() == state.snapshot()
    assert path.stat().st_size <= size
    kept = [number for (number,) in rows(path, "SELECT number FROM generations ORDER BY number")]
    assert kept == list(range(60 - journals.GENERATIONS_KEPT, 60))
    assert rows(path, "SELECT count(*) FROM changes") == [(20,)]


def test_journal_in_use_by_another_coordinator_is_refused(tmp_path: Path) -> None:
    path = sound(tmp_path / "journal")
    with Journal(path) as journal:
        with pytest.raises(JournalError, match="another coordinator uses it: stop that one first"):
            Journal(path)
        assert journal.load() is not None
        with other_process(path) as process:
            _, said = process.communicate(timeout=60)
        assert "another coordinator uses it" in said
    with other_process(tmp_path / "theirs") as process:
        assert process.stdout.readline() == "1\n"
        with pytest.raises(JournalError, match="another coordinator uses it"):
            Journal(tmp_path / "theirs")
    Journal(tmp_path / "theirs").close()


@pytest.mark.parametrize("durable", [True, False])
def test_journal_saved_entries_survive_a_kill(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "journal"
    with other_process(path, durable=durable) as process:
        told = [int(process.stdout.readline()) for _ in range(25)][-1]
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        told = max([told, *map(int, process.stdout.read().split())])
    with Journal(path) as journal:
        snapshot = journal.load()
    assert snapshot is not None
    assert snapshot["generation"] in (told, told + 1)
    assert Membership.restore(snapshot, 0.0).generation == snapshot["generation"]


@pytest.mark.parametrize("durable", [True, False])
def test_journal_waits_for_the_disk_only_if_it_is_durable(
    tmp_path: Path, databases: list[sqlite3.Connection], durable: bool
) -> None:
    with Journal(tmp_path / "journal", durable=durable):
        (waits,) = databases[-1].execute("PRAGMA synchronous").fetchone()
    assert bool(waits) is durable


@pytest.mark.parametrize("durable", [True, False])
def test_journal_after_a_start_of_the_machine_is_refused_unless_it_is_durable(tmp_path: Path, durable: bool) -> None:
    path, state = tmp_path / "journal", grown(elastic(), 2)
    with Journal(path, durable=durable, boot="one") as journal:
        journal.save(state.changes(), state.snapshot())
    with Journal(path, durable=durable, boot="one") as journal:
        assert journal.load() == state.snapshot()
    with Journal(path, boot="two") as journal:
        if durable:
            assert journal.load() == state.snapshot()
        else:
            with pytest.raises(JournalError, match=r"the machine has been rebooted since.*move the file away"):
                journal.load()


def flip(path: Path, found: bytes, instead: bytes) -> None:
    content = path.read_bytes()
    assert found in content
    path.write_bytes(content.replace(found, instead))


def statement(text: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.executescript(text)

    return run


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_bytes(b""), "it is empty"),
        (lambda path: path.write_text("name: journal\n" * 1000), "not a coordinator's journal"),
        (lambda path: path.write_bytes(bytes(100) + path.read_bytes()[100:]), "not a coordinator's journal"),
        (lambda path: os.truncate(path, path.stat().st_size // 2), "it is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:4096] + bytes(path.stat().st_size - 4096)), "it is damaged"),
        (lambda path: flip(path, b'"start":1', b'"start":7'), r"it is damaged \(its state\)"),
        (lambda path: flip(path, b'"host":"machine"', b'"host":"nowhere"'), r"it is damaged \(generation 2\)"),
        (statement("DELETE FROM state"), r"it is damaged \(its state\)"),
        (statement("DELETE FROM generations WHERE number = 2"), r"it is damaged \(generation 2\)"),
        (statement("PRAGMA user_version = 1"), "it has version 1, and this gradwire writes version 2"),
        (statement("PRAGMA application_id = 0"), "not a coordinator's journal"),
    ],
)
def test_damaged_journal_raises_and_is_left_unchanged(tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    path = sound(tmp_path / "journal")
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(JournalError, match=said) as caught, Journal(path) as journal:
        journal.load()
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before
    with pytest.raises(JournalError), Journal(path) as journal:  # the failed attempt must not have created a new file
        journal.load()


def test_journal_that_cannot_be_opened_raises(tmp_path: Path) -> None:
    for path in (tmp_path / "no such folder" / "journal", tmp_path):
        with pytest.raises(JournalError, match="check that its folder exists"):
            Journal(path)


def test_save_to_a_file_that_cannot_be_written_raises(tmp_path: Path, databases: list[sqlite3.Connection]) -> None:
    path = sound(tmp_path / "journal")
    with Journal(path) as journal:
        databases[-1].execute("PRAGMA query_only = ON")
        with pytest.raises(JournalError, match="it cannot be written: check its permissions"):
            journal.save([], grown(elastic(), 3).snapshot())


def test_save_to_a_full_disk_raises_and_keeps_earlier_entries(
    tmp_path: Path, databases: list[sqlite3.Connection]
) -> None:
    path, state = tmp_path / "journal", grown(elastic(), 2)
    much = [Change("came", 2, "a", "x" * 1000, lasting=False)] * 100
    with Journal(path) as journal:
        journal.save([], state.snapshot())
        before = state.snapshot()
        (pages,) = databases[-1].execute("PRAGMA page_count").fetchone()
        databases[-1].execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(JournalError, match="its disk is full: free space and restart the coordinator"):
            journal.save(much, grown(state, 3).snapshot())
        assert journal.load() == before
        journal.save([], state.snapshot())
        assert journal.load() == state.snapshot()
    assert rows(path, "SELECT count(*) FROM changes") == [(0,)]


def test_save_that_the_system_refuses_raises(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    size = sound(path).stat().st_size
    path.unlink()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    with other_process(path, largest_file=size + 8192) as process:
        told, said = process.communicate(timeout=100)
    assert "JournalError" in said
    assert "its disk fails or is full" in said
    with Journal(path) as journal:
        snapshot = journal.load()
    assert snapshot is not None
    assert snapshot["generation"] == int(told.split()[-1])


def test_save_of_another_membership_for_a_known_generation_raises(tmp_path: Path) -> None:
    path = sound(tmp_path / "journal")
    for number in (1, 2):
        other = elastic()
        for generation in range(number):
            other.register(worker("b", generation), float(generation))
        with Journal(path) as journal, pytest.raises(JournalError, match="it already contains another generation 2"):
            journal.save([], other.snapshot())


def test_set_aside_moves_a_journal_that_can_still_be_read(tmp_path: Path) -> None:
    (tmp_path / "earlier").mkdir()
    path = sound(tmp_path / "journal")
    with Journal(path) as journal:
        before = journal.load()
    moved = set_aside(path, tmp_path / "earlier")
    assert moved == tmp_path / "earlier" / "journal"
    with Journal(moved) as journal:
        assert journal.load() == before
    for _ in range(2):  # the second time, the new run has not begun yet
        with Journal(path) as journal:
            assert (journal.load(), journal.earlier_run()) == (None, RUN), "a new journal with the earlier run's id"
        set_aside(path, tmp_path / "earlier")
    path.unlink()
    assert set_aside(path, tmp_path / "earlier") is None


def test_set_aside_waits_for_a_coordinator_that_is_ending(tmp_path: Path) -> None:
    (tmp_path / "earlier").mkdir()
    path = sound(tmp_path / "journal")
    with Journal(path):
        with pytest.raises(JournalError, match="another coordinator uses it"):
            set_aside(path, tmp_path / "earlier", timeout=0.0)
        assert path.exists()
        waiting = threading.Thread(target=set_aside, args=(path, tmp_path / "earlier"))
        waiting.start()
    waiting.join(30)
    assert (tmp_path / "earlier" / "journal").exists()


def test_set_aside_moves_a_damaged_journal_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "earlier").mkdir()
    path = tmp_path / "journal"
    path.write_bytes(b"no journal at all")
    moved = set_aside(path, tmp_path / "earlier")
    assert moved is not None
    assert moved.read_bytes() == b"no journal at all"


def test_journal_that_was_moved_before_it_was_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, moved = tmp_path / "journal", tmp_path / "moved"
    Journal(path).close()
    connect = sqlite3.connect

    def connect_and_move(*arguments: Any, **options: Any) -> sqlite3.Connection:
        database: sqlite3.Connection = connect(*arguments, **options)
        database.execute("PRAGMA application_id").fetchone()  # SQLite opens the file with the first statement
        path.rename(moved)
        path.write_bytes(moved.read_bytes())
        return database

    monkeypatch.setattr(sqlite3, "connect", connect_and_move)
    with pytest.raises(JournalError, match="another coordinator uses it"):
        Journal(path)
