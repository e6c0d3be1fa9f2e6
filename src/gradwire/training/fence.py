"""Fences: tokens that keep an outdated writer from overwriting the checkpoint of a later one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradwire.errors import ConfigError, Fenced
from gradwire.identity import RUN_BYTES

_SUFFIX = ".fence"


@dataclass(frozen=True, order=True, slots=True)
class Fence:
    """An ordered token of a run and its generation, from `run.fence`.

    The fence of a later run is greater. Within a run, the fence of a later generation is greater. `str(fence)` is text
    that sorts in the same order, and `Fence.parse` reads it back.

    Attributes:
        run: The id of the run, 16 bytes.
        generation: The number of the generation.

    >>> early, late = Fence(b"a" * 16, 9), Fence(b"b" * 16, 1)
    >>> early < late, str(early) < str(late), Fence.parse(str(late)) == late
    (True, True, True)
    """

    run: bytes
    generation: int

    def __str__(self) -> str:
        return f"{self.run.hex()}-{self.generation:012d}"

    @classmethod
    def parse(cls, text: str) -> Fence:
        """Return the fence whose `str` is `text`; raise `ConfigError` for any other text."""
        run, _, generation = text.partition("-")
        try:
            fence = cls(bytes.fromhex(run), int(generation))
        except ValueError:
            fence = cls(b"", -1)
        if len(fence.run) != RUN_BYTES or fence.generation < 0 or str(fence) != text:
            raise ConfigError(f"{text[:80]!r} is not a fence: it must be a run id, a dash and a generation number")
        return fence

    def replace(self, draft: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
        """Move the finished file `draft` to `path`, unless `path` was written with a greater fence.

        The fences of all writers are recorded in the file `path` + ".fence". If writers run on several hosts, the file
        system must support locks across hosts.

        Args:
            draft: The finished file, on the same file system as `path`.
            path: The file to replace.

        Raises:
            Fenced: `path` was written with a greater fence: this process belongs to an outdated run or generation. Both
                files are left unchanged.
        """
        target = Path(path)
        with locked_record(target.with_name(target.name + _SUFFIX)) as record:
            written = max(record.fences(), default=None)
            if written is not None and written > self:
                raise Fenced(
                    f"{target} was written by generation {written.generation} of run {written.run.hex()}, which is "
                    f"later than generation {self.generation} of run {self.run.hex()}: the file was not replaced"
                )
            if written != self:
                record.append(self)  # before the file is replaced, so that an earlier writer is refused from now on
            os.replace(draft, target)
            sync_folder(target.parent)


@dataclass(frozen=True, slots=True)
class FenceRecord:
    """A file with one fence per line, open for reading and appending."""

    descriptor: int

    def fences(self) -> list[Fence]:
        """Return the fences in the order of their lines. Incomplete lines are ignored."""
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self.descriptor), "rb") as record:
            return parse_fences(record.read())

    def append(self, fence: Fence) -> None:
        """Add a line and flush it to the disk."""
        line = f"\n{fence}\n".encode()  # the first newline ends an incomplete line that a crash may have left
        if os.write(self.descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self.descriptor)


def parse_fences(data: bytes) -> list[Fence]:
    """Return the fences of a record's complete lines, in order."""
    fences = []
    for line in data.splitlines():
        with contextlib.suppress(ConfigError):
            fences.append(Fence.parse(line.decode("ascii", "replace").strip()))
    return fences


@contextlib.contextmanager
def locked_record(path: Path) -> Iterator[FenceRecord]:
    """Open or create a record of fences, and lock it until the block ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield FenceRecord(descriptor)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile shares the lock
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, so that a renamed or new file survives a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)
