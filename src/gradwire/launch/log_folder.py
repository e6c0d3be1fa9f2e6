"""Locks the log folder of a run for one launcher, and moves the files of earlier runs to subfolders.

L/worker-0.log  coordinator.log  coordinator.journal …   the current run, or the last one
L/earlier-1/  earlier-2/ …                               earlier runs, in order
L/launcher-4711/                                         a launcher that started while another one used L
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gradwire.errors import JournalError, TransportError

JOURNAL = "coordinator.journal"
_LOCK = ".launcher"
KEPT_FOLDERS = 10  # temporary ones
_PREFIX = "gradwire-"
_TEMPORARY = re.compile(rf"{_PREFIX}\d{{8}}-\d{{6}}-\w{{8}}")  # names of temporary folders; they sort by time
_SETTLED_SECONDS = 60.0
_LOGS = ("rank-*.log", "worker-*.log", "coordinator.log")


def new_temporary_folder() -> Path:
    """Return a new folder for the logs of a run, and remove older ones: failed runs leave theirs behind."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=time.strftime(f"{_PREFIX}%Y%m%d-%H%M%S-")))
    except OSError as error:
        raise TransportError(f"cannot write logs in {tempfile.gettempdir()}: {error.strerror or error}") from error
    _remove_old_folders(folder.parent)
    return folder


def _remove_old_folders(parent: Path) -> None:
    """Remove all but the newest temporary folders of this user, except those that a running launcher uses."""
    with contextlib.suppress(OSError):
        found = sorted(path for path in parent.iterdir() if _TEMPORARY.fullmatch(path.name))
        for path in found[:-KEPT_FOLDERS]:
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                facts = path.lstat()
                # A folder that was made a moment ago may not be locked yet.
                settled = time.time() - facts.st_mtime > _SETTLED_SECONDS
                if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and settled and _locked(path, stack):
                    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def log_folder(wanted: Path) -> Iterator[Path]:
    """Yield the folder to write to: `wanted`, or a subfolder if another running launcher uses `wanted`.

    Files of an earlier run in that folder are moved to a subfolder first. The lock ends with this process, however it
    ends, and processes that it starts do not inherit it.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = next(folder for folder in _candidates(wanted) if _locked(folder, stack))
            _move_earlier_run(folder)
        except OSError as error:
            raise TransportError(f"cannot write logs in {wanted}: {error.strerror or error}") from error
        yield folder


def _candidates(wanted: Path) -> Iterator[Path]:
    yield wanted
    yield wanted / f"launcher-{os.getpid()}"
    for number in itertools.count(2):  # one process can run several launchers
        yield wanted / f"launcher-{os.getpid()}-{number}"


def _locked(folder: Path, stack: contextlib.ExitStack) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _move_earlier_run(folder: Path) -> None:
    for draft in folder.glob(f".{JOURNAL}-*"):  # left by a coordinator that was killed while it created its journal
        draft.unlink(missing_ok=True)
    logs = [path for pattern in _LOGS for path in folder.glob(pattern)]
    journal = folder / JOURNAL
    if not logs and not journal.exists():
        return
    earlier = _new_folder(folder)
    if journal.exists():
        from gradwire.membership.coordinator.journal import set_aside  # loads SQLite

        try:
            set_aside(journal, earlier)
        except JournalError:  # another coordinator uses the journal: nothing is moved
            with contextlib.suppress(OSError):
                earlier.rmdir()
            raise
    for path in logs:
        path.rename(earlier / path.name)


def _new_folder(folder: Path) -> Path:
    taken = [int(number) for path in folder.glob("earlier-*") if (number := path.name.partition("-")[2]).isdecimal()]
    made = folder / f"earlier-{max(taken, default=0) + 1}"
    made.mkdir()
    return made
