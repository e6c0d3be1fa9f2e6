"""Fences: order the writers of a checkpoint, and keep an earlier writer from overwriting a later one's file."""

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
    """An ordered token of one generation of a run: a later run's is greater, and within a run a later generation's.

    `str(fence)` is text that sorts in the same order; `Fence.parse` reads it back.

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
        """Read what `str` wrote; `ConfigError` for anything else."""
        run, _, generation = text.partition("-")
        try:
            fence = cls(bytes.fromhex(run), int(generation))
        except ValueError:
            fence = cls(b"", -1)
        if len(fence.run) != RUN_BYTES or fence.generation < 0 or str(fence) != text:
            raise ConfigError(f"{text[:80]!r} is not a fence: one is the run's id, a dash and the generation")
        return fence

    def replace(self, draft: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
        """Move the finished file `draft` to `path`, unless `path` was written under a greater fence.

        Raises `Fenced` then, and leaves both files as they are: the writer belongs to a run or generation that others
        have gone on without. Fences are kept beside the file, as `path` + ".fence". Writers on several hosts need a
        file system with locks for this.
        """
        target = Path(path)
        with _locked(target.with_name(target.name + _SUFFIX)) as record:
            written = _read(record)
            if written is not None and written > self:
                raise Fenced(
                    f"{target} was written by generation {written.generation} of run {written.run.hex()}, which is "
                    f"later than generation {self.generation} of run {self.run.hex()}: it is left as it is"
                )
            if written != self:
                _append(record, self)  # before the file itself: an earlier writer is kept out from now on
            os.replace(draft, target)
            _sync_folder(target.parent)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile holds the descriptor, too
        os.close(descriptor)


def _read(descriptor: int) -> Fence | None:
    """The greatest fence that the target was written under; None if there was none yet. Torn lines are passed over."""
    fences = []
    with os.fdopen(os.dup(descriptor), "rb") as record:
        record.seek(0)
        for line in record:
            with contextlib.suppress(ConfigError):
                fences.append(Fence.parse(line.decode("ascii", "replace").strip()))
    return max(fences, default=None)


def _append(descriptor: int, fence: Fence) -> None:
    line = f"\n{fence}\n".encode()  # whatever a torn line before it holds
    if os.write(descriptor, line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot do that for a folder
            raise
    finally:
        os.close(descriptor)
