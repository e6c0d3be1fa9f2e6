"""Sends notices from a worker to its launcher through a pipe: how this worker reacts to signals that stop its job.

A notice has two bytes: its kind, and the number of a signal. Writing one never blocks, so signal handlers may do it.

`GRADWIRE_STOP_NOTICES` contains the descriptor's number and the pipe's inode, as `GRADWIRE_NEWS` does: a program that
the worker starts inherits the variable but not the descriptor, and may use the same number for a file of its own.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import stat
from collections.abc import Mapping
from dataclasses import dataclass

NOTICES = "GRADWIRE_STOP_NOTICES"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
_NUMBERS = (0, *STOP_SIGNALS)
_SIZE = 2  # bytes


class NoticeKind(enum.Enum):
    WATCHING = b"W"  # after one of STOP_SIGNALS, the worker leaves the job after a whole step
    RECEIVED = b"R"  # the worker watches, and has received a signal
    AGREED = b"A"  # all ranks have agreed to leave; the worker may not have received the signal itself
    NOT_WATCHING = b"N"  # signals have their default effect again


@dataclass(frozen=True)
class StopNotice:
    """A worker's report; `number` is the signal that it received or leaves because of."""

    kind: NoticeKind
    number: int = 0


class NoticeWriter:
    """A worker's end of the pipe. It does nothing without a launcher, in a forked child, and on a closed descriptor."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        text = (os.environ if environ is None else environ).get(NOTICES, "")
        number, _, inode = text.partition(":")
        self._pipe = (int(number), int(inode)) if number.isdecimal() and inode.isdecimal() else None
        self._owner = os.getpid()

    def send(self, kind: NoticeKind, number: int = 0) -> None:
        if self._pipe is None or os.getpid() != self._owner:
            return
        fd, inode = self._pipe
        with contextlib.suppress(OSError, OverflowError):  # the program has closed it, or the launcher has exited
            status = os.fstat(fd)
            if stat.S_ISFIFO(status.st_mode) and status.st_ino == inode:
                os.write(fd, kind.value + bytes([number]))


class NoticeReader:
    """The launcher's end of the pipe, which is made here. The worker inherits `write_end`."""

    def __init__(self) -> None:
        self._fd, self.write_end = os.pipe()
        for fd in (self._fd, self.write_end):
            os.set_blocking(fd, False)
        self._rest = b""
        self.ended = False  # the worker and all of its copies have closed their end

    @property
    def variable(self) -> str:
        return f"{self.write_end}:{os.fstat(self.write_end).st_ino}"

    def close_write_end(self) -> None:
        """Close the launcher's copy of the writing end, after the worker has been started."""
        if self.write_end >= 0:
            os.close(self.write_end)
        self.write_end = -1

    def fileno(self) -> int:
        return self._fd

    def receive(self) -> list[StopNotice]:
        """Return the notices that have arrived. Bytes that are no notices end the reading: programs may write any."""
        notices: list[StopNotice] = []
        while not self.ended:
            try:
                chunk = os.read(self._fd, 4096)
            except BlockingIOError:
                break
            self.ended = not chunk
            data = self._rest + chunk
            whole = len(data) - len(data) % _SIZE
            self._rest = data[whole:]
            for at in range(0, whole, _SIZE):
                if self.ended or data[at] not in _KINDS or data[at + 1] not in _NUMBERS:
                    self.ended = True
                    break
                notices.append(StopNotice(_KINDS[data[at]], data[at + 1]))
        return notices

    def close(self) -> None:
        self.close_write_end()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.ended = -1, True


_KINDS = {kind.value[0]: kind for kind in NoticeKind}
