"""Sends the coordinator's news from a launcher to its workers through a pipe, as lines of JSON.

A worker inherits the reading end and polls it (`NewsReader.latest` never blocks). So the worker needs no connection to
the coordinator, and no thread, to notice that processes want to join. The same pipe carries orders to cut links on
purpose (see `launch/fault_injection.py`).

`GRADWIRE_NEWS` contains the descriptor's number and the pipe's inode. A program that the worker starts inherits the
variable but not the descriptor, and may use the same number for a file of its own. The inode shows the difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import threading
from collections.abc import Mapping
from typing import Any

from gradwire.membership.types import News

NEWS = "GRADWIRE_NEWS"
_CHUNK = 1 << 16


class NewsReader:
    """A worker's end of the pipe, usable from any thread.

    In a forked child it reads nothing, because the bytes belong to the parent.
    """

    def __init__(self, fd: int) -> None:
        """Take ownership of the descriptor."""
        self._fd = fd
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._rest = b""
        self._news: News | None = None
        self._cuts: frozenset[str] = frozenset()
        self.ended = False  # the launcher has exited or closed its end
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> NewsReader | None:
        """Return the reader for this process, or None if no launcher gave it a pipe.

        Call this once: the reader owns the descriptor.
        """
        text = (os.environ if environ is None else environ).get(NEWS, "")
        number, _, inode = text.partition(":")
        if not (number.isdecimal() and inode.isdecimal()):
            return None
        try:
            status = os.fstat(int(number))
        except (OSError, OverflowError):
            return None
        if not stat.S_ISFIFO(status.st_mode) or status.st_ino != int(inode):
            return None
        return cls(int(number))

    def latest(self) -> News | None:
        """Return the last news received, or None if there was none yet."""
        self._read()
        return self._news

    def cuts(self) -> frozenset[str]:
        """Return the ids of the members to which this member's links are to be cut now."""
        self._read()
        return self._cuts

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is news, or when the pipe has `ended`; -1 when closed."""
        return self._fd

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self.ended = -1, True

    def _read(self) -> None:
        if os.getpid() != self._owner:  # check this before taking the lock: a thread may have held it at the fork
            return
        with self._lock:
            while not self.ended:
                try:
                    chunk = os.read(self._fd, _CHUNK)
                except BlockingIOError:
                    return
                self.ended = not chunk
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))

    def _handle(self, message: dict[str, Any]) -> None:
        if "cut" in message:
            self._cuts |= {message["cut"]}
        elif "heal" in message:
            self._cuts -= {message["heal"]}
        else:
            fields = {name: tuple(message[name]) for name in ("evicted", "unknown")}
            self._news = News(**{**message, **fields, "run": bytes.fromhex(message["run"])})


class NewsWriter:
    """The launcher's end of the pipe to the worker `member`.

    Writing never blocks. A worker that does not read receives the newest news when it reads again.
    """

    def __init__(self, member: str) -> None:
        self._member = member
        self._read_end, self._fd = os.pipe()
        os.set_blocking(self._fd, False)
        self._last_sent: bytes | None = None  # the last news that was written into the pipe
        self._orders: list[bytes] = []  # orders not yet written because the pipe was full; none may be lost
        self._news: bytes | None = None  # the newest news not yet written

    @property
    def read_end(self) -> int:
        """The descriptor of the reading end, which the worker inherits."""
        return self._read_end

    @property
    def variable(self) -> str:
        return f"{self._read_end}:{os.fstat(self._read_end).st_ino}"

    def close_read_end(self) -> None:
        """Close the launcher's copy of the reading end, after the worker has been started."""
        os.close(self._read_end)
        self._read_end = -1

    def send(self, news: News) -> None:
        """Send news unless it equals the last. Of the evicted and unknown members, only this worker itself is sent."""
        own = {name: [m for m in getattr(news, name) if m == self._member] for name in ("evicted", "unknown")}
        line = _line(**{**dataclasses.asdict(news), **own, "run": news.run.hex()})
        self._news = line if line != self._last_sent else None
        self.flush()

    def cut(self, member: str) -> None:
        self._orders.append(_line(cut=member))
        self.flush()

    def heal(self, member: str) -> None:
        self._orders.append(_line(heal=member))
        self.flush()

    def flush(self) -> None:
        """Try again to write the lines that did not fit into the pipe."""
        while self._orders and self._write(self._orders[0]):
            del self._orders[0]
        if not self._orders and self._news is not None and self._write(self._news):
            self._last_sent, self._news = self._news, None

    def close(self) -> None:
        for fd in (self._read_end, self._fd):
            if fd >= 0:
                os.close(fd)
        self._read_end = self._fd = -1

    def _write(self, line: bytes) -> bool:
        """Write a line and return whether that succeeded.

        A pipe takes a line this short completely or not at all. If the worker has closed its end, the line is dropped.
        """
        with contextlib.suppress(BrokenPipeError):
            try:
                os.write(self._fd, line)
            except BlockingIOError:
                return False
        return True


def _line(**message: object) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
