"""The pipe by which a launcher passes the coordinator's news on to its workers, as lines of JSON.

A worker inherits the reading end and asks it when it suits (`NewsReader.latest` never waits); so it needs no connection
to the coordinator, and no thread, to learn that somebody wants to join. The same pipe tells it of links that are to be
cut on purpose (see `launch/fault_injection.py`).

`GRADWIRE_NEWS` holds the descriptor's number and the pipe's inode: programs that the worker starts inherit the variable
without the descriptor, and its number may then be a file of theirs.
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
    """A worker's end. For any thread; in forked children it stays silent, because the news is the parent's to read."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over."""
        self._fd = fd
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._rest = b""
        self._news: News | None = None
        self._cuts: frozenset[str] = frozenset()
        self.ended = False  # the launcher is gone, or has closed its end
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> NewsReader | None:
        """The reader for this process, or None if no launcher gave it a pipe. Called once: it owns the descriptor."""
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
        """The last news that has come, or None as long as there was none."""
        self._read()
        return self._news

    def cuts(self) -> frozenset[str]:
        """The ids of the members from which this one is to be cut off, for now."""
        self._read()
        return self._cuts

    def fileno(self) -> int:
        """Readable when there is something new; at its end too, so ask `ended`. -1 when closed."""
        return self._fd

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self.ended = -1, True

    def _read(self) -> None:
        if os.getpid() != self._owner:  # before the lock, which some thread may have held at the fork
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
    """The launcher's end, for the worker `member`. One that does not read holds up nobody, and will get the newest."""

    def __init__(self, member: str) -> None:
        self._member = member
        self._read_end, self._fd = os.pipe()
        os.set_blocking(self._fd, False)
        self._last_sent: bytes | None = None  # the last news that went into the pipe
        self._orders: list[bytes] = []  # orders that found the pipe full; they are few, and none may be lost
        self._news: bytes | None = None  # news that did

    @property
    def read_end(self) -> int:
        """The reading end, to be inherited."""
        return self._read_end

    @property
    def variable(self) -> str:
        return f"{self._read_end}:{os.fstat(self._read_end).st_ino}"

    def close_read_end(self) -> None:
        """The worker has been started and has its end."""
        os.close(self._read_end)
        self._read_end = -1

    def send(self, news: News) -> None:
        """Pass news on, if it is any; of those evicted or unknown a worker needs to know only whether it is one."""
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
        """Try again what found the pipe full."""
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
        """Whole or not at all, as pipes do with so few bytes. Who has closed its end is told nothing more."""
        with contextlib.suppress(BrokenPipeError):
            try:
                os.write(self._fd, line)
            except BlockingIOError:
                return False
        return True


def _line(**message: object) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
