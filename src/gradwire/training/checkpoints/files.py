"""Files that are replaced as a whole, and the mapping of system errors to `CheckpointError`."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from gradwire.errors import CheckpointError
from gradwire.training.fence import sync_folder

MAX_JSON = 512 << 20  # bytes of a manifest or a description: a million arrays with long names
_HINTS = {
    errno.ENOLCK: ". The file system must support locks (flock)",
    errno.EOPNOTSUPP: ". The file system must support locks (flock)",
}


@contextlib.contextmanager
def system_errors(action: str, path: Path) -> Iterator[None]:
    """Map an `OSError` of the block to a `CheckpointError` that names the action ("write") and the path."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"cannot {action} {path}: {reason}{_HINTS.get(error.errno or 0, '')}") from error


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all bytes: `os.write` may write fewer, for example at the end of a full disk."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` after the block.

    A reader, also one after a crash, sees the old file or the whole new one. The block flushes the new file.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_folder(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader, also one after a crash, sees all of it or none of it."""
    with replacing(path) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and those above it, and flush their names to the disk."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
    sync_folder(path.parent)


def read_small(path: Path) -> bytes:
    """Return the content of a manifest or description; raise ValueError if it is too long for one."""
    with path.open("rb") as opened:
        data = opened.read(MAX_JSON + 1)
    if len(data) > MAX_JSON:
        raise ValueError(f"it has more than {MAX_JSON} bytes")
    return data
