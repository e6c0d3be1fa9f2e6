"""Observes and interrupts the system calls that change files, in this process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("open", "write", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir")


class Killed(BaseException):
    """The process was killed: no later call of this process has an effect."""


@contextlib.contextmanager
def watched(
    before: Callable[[str, tuple[Any, ...]], None], after: Callable[[str, tuple[Any, ...], Any], None]
) -> Iterator[None]:
    """Call `before` and `after` around each system call that changes files."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, _wrapped(name, getattr(os, name), before, after))
        patch.setattr(fcntl, "flock", _wrapped("flock", fcntl.flock, before, after))
        yield


def _wrapped(name: str, call: Callable[..., Any], before: Callable[..., None], after: Callable[..., None]) -> Any:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        before(name, arguments)
        result = call(*arguments, **options)
        after(name, arguments, result)
        return result

    return wrapped


@contextlib.contextmanager
def killed_at(call: int) -> Iterator[None]:
    """Raise `Killed` from this system call of the block, counted from 0, and from all later ones."""
    seen = 0

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if name == "flock" and arguments[1] == fcntl.LOCK_UN:
            return  # the system unlocks files of a killed process
        seen += 1
        if seen > call:
            raise Killed

    with watched(before, lambda name, arguments, result: None):
        yield


class Calls:
    """Counts the system calls of a block, and lets one of them fail."""

    def __init__(self) -> None:
        self.seen = 0

    @contextlib.contextmanager
    def failing_at(self, call: int, error: int) -> Iterator[None]:
        """Let one call, counted from 0, fail with this error number. A failing write has written half of its bytes."""
        write = os.write

        def before(name: str, arguments: tuple[Any, ...]) -> None:
            self.seen += 1
            if self.seen == call + 1:
                if name == "write":
                    write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise OSError(error, os.strerror(error))

        with watched(before, lambda name, arguments, result: None):
            yield


class Disk:
    """What a power loss could undo: bytes that were not flushed, and names in folders that were not flushed."""

    def __init__(self) -> None:
        self.unflushed: set[Path] = set()  # files with such bytes, and folders with such names
        self.at_replace: list[tuple[Path, set[Path]]] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with watched(self._before, self._after):
            yield

    def _before(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "replace":
            self.at_replace.append((Path(arguments[1]), set(self.unflushed)))

    def _after(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        match name:
            case "open" if arguments[1] & os.O_CREAT and stat.S_ISREG(os.fstat(result).st_mode):
                self.unflushed.add(Path(arguments[0]).parent)
            case "write":
                self.unflushed.add(_path(arguments[0]))
            case "fsync":
                self.unflushed.discard(_path(arguments[0]))
            case "mkdir" | "unlink" | "rmdir":
                self.unflushed.add(Path(arguments[0]).parent)
            case "replace" | "rename":
                self.unflushed.add(Path(arguments[1]).parent)


def _path(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
