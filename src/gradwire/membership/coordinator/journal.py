"""Stores the coordinator's journal: an SQLite file from which a restarted coordinator resumes.

    state         one row: the snapshot without the members
    generations   the members of each generation, written once; the last few are kept
    changes       a log of events for people to read; the last few thousand are kept
    earlier       the id of the run whose journal was moved away for this one, if there was one

A saved entry survives a crash of the coordinator. In a durable journal it also survives a crash of the machine. A
journal that is not durable may lack its last entries after that and is refused, because a coordinator that forgets a
generation would form another one with the same number. Only one coordinator at a time can open the file. A file that is
damaged, of another version or not a journal raises an error and is not changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gradwire.errors import JournalError
from gradwire.host import machine
from gradwire.identity import RUN_BYTES
from gradwire.membership.types import Change

APPLICATION = 0x47774A6C  # "GwJl"; distinguishes a journal from other SQLite files
VERSION = 2
GENERATIONS_KEPT = 8
CHANGES_KEPT = 10_000
UNDO = "-journal"  # the suffix of SQLite's rollback file, with which it undoes an incomplete transaction

_SCHEMA = f"""
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
CREATE TABLE state (only INTEGER PRIMARY KEY CHECK (only = 1), body TEXT NOT NULL, digest TEXT NOT NULL);
CREATE TABLE generations (number INTEGER PRIMARY KEY, body TEXT NOT NULL, digest TEXT NOT NULL);
CREATE TABLE changes (
    position INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    generation INTEGER NOT NULL, kind TEXT NOT NULL, member TEXT, text TEXT NOT NULL
);
CREATE TABLE earlier (run TEXT NOT NULL);
"""
_REMEDY = "move the file away to begin a new run, or replace it with an undamaged copy"
_MEANING = {
    sqlite3.SQLITE_BUSY: "another coordinator uses it: stop that one first, or use another journal for this one",
    sqlite3.SQLITE_READONLY: "it cannot be written: check its permissions and whether its disk is mounted read-only",
    sqlite3.SQLITE_FULL: "its disk is full: free space and restart the coordinator, which resumes from the last entry",
    sqlite3.SQLITE_IOERR: "its disk fails or is full: fix that and restart the coordinator",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: check that its folder exists and that this user may write there",
    sqlite3.SQLITE_CORRUPT: f"it is damaged: {_REMEDY}",
    sqlite3.SQLITE_NOTADB: "it is not a coordinator's journal, or damaged from its first byte: name another file",
}


class Journal:
    """The journal at `path`. The file is created if it does not exist, and is locked until `close`.

    With `durable`, each entry is on the disk before `save` returns. Otherwise an entry survives this process but not a
    reboot, and a journal from before a reboot is refused. `boot` identifies the current boot of the machine.
    """

    def __init__(self, path: Path, *, durable: bool = True, boot: str | None = None) -> None:
        self.path = path
        self._durable = durable
        self._boot = machine.boot() if boot is None else boot
        self._written = 0  # the last generation whose members this object has written
        with self._explained():
            if not path.exists():
                _create(path)
            self._inode = path.stat().st_ino
            self._db = sqlite3.connect(
                f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=0, isolation_level=None, check_same_thread=False
            )
        try:
            with self._explained():
                self._lock_and_check()
        except BaseException:
            self._db.close()
            raise

    def load(self) -> dict[str, Any] | None:
        """Return the last saved snapshot; None if there is none."""
        with self._explained():
            row = self._db.execute("SELECT body, digest FROM state").fetchone()
            if row is None and not self._number("SELECT count(*) FROM generations"):
                return None
            snapshot: dict[str, Any] = self._read(row, "its state")
            boot = snapshot.pop("boot", "")
            if boot not in ("", self._boot):
                raise self._error(
                    f"it was written without waiting for the disk, and the machine has been rebooted since, so the "
                    f"last entries may be missing: {_REMEDY}"
                )
            number = snapshot["generation"]
            row = self._db.execute("SELECT body, digest FROM generations WHERE number = ?", (number,)).fetchone()
            return snapshot | {"members": self._read(row, f"generation {number}")}

    def earlier_run(self) -> bytes:
        """Return the id of the run before this journal's; empty if it is unknown."""
        with self._explained():
            (run,) = self._db.execute("SELECT coalesce(max(run), '') FROM earlier").fetchone()
        return bytes.fromhex(run)

    def save(self, changes: Sequence[Change], snapshot: Mapping[str, Any]) -> None:
        """Save the changes and the snapshot in one transaction."""
        state = {name: value for name, value in snapshot.items() if name != "members"}
        if not self._durable:
            state["boot"] = self._boot
        with self._explained(), self._transaction() as db:
            self._save_members(db, snapshot["generation"], snapshot["members"])
            db.execute("INSERT OR REPLACE INTO state VALUES (1, ?, ?)", _sealed(state))
            db.executemany(
                "INSERT INTO changes (generation, kind, member, text) VALUES (?, ?, ?, ?)",
                [(change.generation, change.kind, change.member, change.text) for change in changes],
            )
            db.execute("DELETE FROM changes WHERE position <= (SELECT max(position) FROM changes) - ?", (CHANGES_KEPT,))
        self._written = snapshot["generation"]

    def close(self) -> None:
        """Close and unlock the file. Idempotent."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock_and_check(self) -> None:
        """Lock the file, and raise if it is not an undamaged journal or another process has it."""
        if self.path.stat().st_size == 0:
            raise self._error(f"it is empty, which a journal never is: {_REMEDY}")
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        application, version = self._number("PRAGMA application_id"), self._number("PRAGMA user_version")
        if application != APPLICATION:
            raise self._error(_MEANING[sqlite3.SQLITE_NOTADB])
        if version != VERSION:
            raise self._error(
                f"it has version {version}, and this gradwire writes version {VERSION}: "
                "use the gradwire that wrote it, or name another file"
            )
        # Not WAL: after each commit this one file contains the whole journal, so copying it loses nothing.
        self._db.execute("PRAGMA journal_mode = TRUNCATE")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'OFF'}")
        self._db.execute("BEGIN EXCLUSIVE")  # in locking mode EXCLUSIVE the lock is kept after the transaction
        self._db.execute("COMMIT")
        if not self.path.exists() or self.path.stat().st_ino != self._inode:  # moved before this process locked it
            raise self._error(_MEANING[sqlite3.SQLITE_BUSY])
        (found,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise self._error(f"{_MEANING[sqlite3.SQLITE_CORRUPT]} ({found})")

    def _save_members(self, db: sqlite3.Connection, number: int, members: Sequence[Mapping[str, Any]]) -> None:
        """Save the members of a generation.

        A generation never changes, and numbers never decrease. Otherwise two coordinators have served the same job.
        """
        if number == self._written and number > 0:
            return
        body, digest = _sealed(members)
        newest = self._number("SELECT coalesce(max(number), 0) FROM generations")
        row = db.execute("SELECT body FROM generations WHERE number = ?", (number,)).fetchone()
        if newest > number or (number > 0 and row not in (None, (body,))):
            raise self._error(
                f"it already contains another generation {max(number, newest)}: this coordinator must not continue"
            )
        db.execute("INSERT OR REPLACE INTO generations VALUES (?, ?, ?)", (number, body, digest))
        db.execute("DELETE FROM generations WHERE number <= ?", (number - GENERATIONS_KEPT,))

    def _read(self, row: tuple[str, str] | None, what: str) -> Any:
        if row is None or _digest(row[0]) != row[1]:
            raise self._error(f"it is damaged ({what}): {_REMEDY}")
        return json.loads(row[0])

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk may have ended it already
                self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise errors of SQLite and of the system as `JournalError`, with what to do about them."""
        try:
            yield
        except sqlite3.Error as error:
            meaning = _MEANING.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
            raise self._error(f"{meaning} ({error})" if meaning else str(error)) from error
        except OSError as error:
            meaning = _MEANING[sqlite3.SQLITE_CANTOPEN]
            raise self._error(f"{meaning} ({error.strerror or error})") from error

    def _error(self, reason: str) -> JournalError:
        return JournalError(f"the coordinator's journal {self.path}: {reason}")


def set_aside(path: Path, folder: Path, *, timeout: float = 10.0) -> Path | None:
    """Move the journal of an earlier run into a folder, and return its new path; None if there is no journal."""
    return move_aside(path, folder / path.name, timeout=timeout)


def move_aside(path: Path, moved: Path, *, timeout: float = 10.0) -> Path | None:
    """Move the journal of an earlier run to another path, and return that path; None if there is no journal.

    The new journal stores the id of the earlier run, so that the id of the new run is greater even if the clock was set
    back. A coordinator that still uses the journal has `timeout` seconds to close it, because it could otherwise write
    next to the new journal. After that, raise `JournalError`. A damaged journal is moved unchanged.
    """
    if not path.exists():
        return None
    run = ""
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=timeout, isolation_level=None)
        ) as db:
            db.execute("BEGIN EXCLUSIVE")  # also rolls back an incomplete transaction of a killed coordinator
            run = _run_in(db)
            _rename(path, moved)  # under the lock: another coordinator must not begin to use the file before
            db.execute("COMMIT")
    except sqlite3.Error as error:
        if (getattr(error, "sqlite_errorcode", 0) & 0xFF) == sqlite3.SQLITE_BUSY:
            raise JournalError(f"the coordinator's journal {path}: {_MEANING[sqlite3.SQLITE_BUSY]}") from error
        _rename(path, moved)
    if run:
        try:
            _create(path, run)
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"a new coordinator's journal {path} cannot be created: {error}") from error
    return moved


def _rename(path: Path, moved: Path) -> None:
    undo = Path(f"{path}{UNDO}")
    try:
        if undo.exists() and not undo.stat().st_size:  # there is nothing to undo
            undo.unlink()
        if undo.exists():
            os.replace(undo, f"{moved}{UNDO}")
        os.replace(path, moved)
    except OSError as error:
        reason = error.strerror or error
        raise JournalError(f"the coordinator's journal {path} cannot be moved to {moved}: {reason}") from error


def _run_in(db: sqlite3.Connection) -> str:
    """Return the id of the run in a journal, which may be damaged or of another version; empty if it is unreadable."""
    try:
        row = db.execute("SELECT body FROM state").fetchone() or db.execute("SELECT run FROM earlier").fetchone()
        run = str(json.loads(row[0])["run"] if row[0].startswith("{") else row[0])
        return run if len(bytes.fromhex(run)) == RUN_BYTES else ""
    except (sqlite3.Error, ValueError, KeyError, TypeError):
        return ""


def _create(path: Path, earlier_run: str = "") -> None:
    """Create an empty journal, under another name first, so that an incomplete file never looks like a damaged one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    try:
        with contextlib.closing(sqlite3.connect(name, isolation_level=None)) as db:
            db.execute("PRAGMA synchronous = FULL")
            db.executescript(_SCHEMA)
            if earlier_run:
                db.execute("INSERT INTO earlier VALUES (?)", (earlier_run,))
        try:
            os.link(name, path)
        except FileExistsError:
            pass  # another process created it first, and one of the two will get the lock
        except OSError:  # a file system without hard links
            os.rename(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _sealed(value: Any) -> tuple[str, str]:
    body = json.dumps(value, separators=(",", ":"))
    return body, _digest(body)


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
