"""Chooses the journal of a job for which no file was named, and moves the journals of earlier runs aside.

    $XDG_STATE_HOME/gradwire/digits.journal       of the job "digits"
    $XDG_STATE_HOME/gradwire/digits.earlier-1     of its last run that has ended; 2 and 3 are older
    $XDG_STATE_HOME/gradwire/unnamed/…            of jobs whose name is random

Without `XDG_STATE_HOME` the folder is `~/.local/state/gradwire`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pwd
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from gradwire.errors import JournalError
from gradwire.membership.coordinator.journal import UNDO, Journal, move_aside
from gradwire.membership.coordinator.state_machine import SILENT_GRACE, Membership

EARLIER_KEPT = 3
UNNAMED_SECONDS = 7 * 86_400.0  # for which the journal of a job with a random name is kept
_SUFFIX = ".journal"
_LONGEST_NAME = 150  # characters of a file name before the suffix; file systems allow 255


def folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of this user's journals. Relative paths in the variable are invalid and ignored."""
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        home = environ.get("HOME") or pwd.getpwuid(os.geteuid()).pw_dir
        state = os.path.join(home, ".local", "state")
    return Path(state, "gradwire")


def path_of(job: str, environ: Mapping[str, str], *, named: bool = True) -> Path:
    """Return the path of a job's journal, and create its folder. `named`: the user chose the name of the job.

    A user who names a job that had a random name resumes it.
    """
    own = folder(environ)
    name = f"{_file_name(job)}{_SUFFIX}"
    path = own / "unnamed" / name
    if named and not path.exists():
        path = own / name
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(
            f"the folder {path.parent} for the coordinator's journal cannot be created ({error.strerror}): "
            "name a file with --journal, or do without a journal with --no-journal"
        ) from error
    return path


def retire_ended(path: Path) -> None:
    """Move the journal of an ended job aside, so that the next job of this name begins anew.

    A journal without a generation is removed: it has nothing that could be resumed. So is the journal of an ended job
    with a random name. A journal that another coordinator uses raises `JournalError`.
    """
    if not path.exists():
        return
    with Journal(path) as journal, _explained(path):
        snapshot = journal.load()
        if snapshot is None:
            return  # it may have the id of an earlier run, which a new run must exceed
        membership = Membership.restore(snapshot, 0.0)
        # After the first report of finished work, others may still need the coordinator for a moment.
        forgotten = membership.finished and _age(path) > membership.terms.lease + SILENT_GRACE
        over = membership.ended or forgotten
        if not membership.generation or (over and path.parent.name == "unnamed"):
            _remove(path)  # before the lock is released
            return
    if over:
        begin_anew(path)


def begin_anew(path: Path) -> None:
    """Move a journal aside, if there is one. The last few are kept, the newest as number 1."""
    if not path.exists():
        return
    earlier = [path.with_name(f"{path.name.removesuffix(_SUFFIX)}.earlier-{n}") for n in range(1, EARLIER_KEPT + 1)]
    with _explained(path):
        for newer, older in reversed(list(itertools.pairwise(earlier))):
            for end in ("", UNDO):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{newer}{end}", f"{older}{end}")
    move_aside(path, earlier[0], timeout=0.0)


def prune_unnamed(environ: Mapping[str, str]) -> None:
    """Remove old journals of jobs with random names. Those that a coordinator uses stay."""
    for path in (folder(environ) / "unnamed").glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError, JournalError):
            if _age(path) > UNNAMED_SECONDS:
                with Journal(path):
                    _remove(path)


def _file_name(job: str) -> str:
    """Return a file name for a job, different for each name.

    >>> _file_name("digits"), _file_name("a/b"), _file_name("..")
    ('digits', 'a%2Fb', '%2E.')
    """
    name = quote(job, safe="", errors="surrogateescape")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(job.encode("utf-8", "surrogateescape")).hexdigest()
        name = f"{name[: _LONGEST_NAME - 65]}%{digest}"
    return name


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalError(
            f"the coordinator's journal {path} cannot be moved aside: {error.strerror or error}"
        ) from error


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def _remove(path: Path) -> None:
    for name in (path, path.with_name(path.name + UNDO)):
        name.unlink(missing_ok=True)
