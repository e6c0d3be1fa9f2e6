"""What the workers print: read as it comes, kept in a log per rank, shown on the screen.

One thread does it all, apart from the supervision: a screen that stands still (a paused terminal, a full pipe) holds up
the workers' printing, never the news of a failure or the stopping.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from gradwire.errors import TransportError
from gradwire.launch.lines import Lines
from gradwire.launch.screen import ERR, OUT, Screen

_CHUNK = 1 << 16
_TAIL = 20  # lines that are remembered for a worker that dies without a traceback
_PROGRESS_EVERY = 5.0  # seconds between two states of a progress bar, where only whole lines can be shown
_LATE = 0.5  # seconds of silence after which a stream that outlived its worker is left alone


@dataclass
class _Stream:
    rank: int
    number: int  # OUT or ERR
    lines: Lines = field(default_factory=Lines)
    progress_shown: float = float("-inf")


class Output:
    """The printing of all workers. `close` when the workers are gone, to have seen it to the end."""

    def __init__(
        self,
        size: int,
        *,
        log_dir: Path | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log_dir = log_dir
        self._logs = _open_logs(log_dir, size)
        self._screen = Screen(size, out or sys.stdout, err or sys.stderr)
        self._tails: list[collections.deque[str]] = [collections.deque(maxlen=_TAIL) for _ in range(size)]
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._lock = threading.Lock()  # of the next two, so that nobody writes to a descriptor that is closed
        self._closing = False
        self._released = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def pipes(self, rank: int) -> Iterator[tuple[int, int]]:
        """The writing ends of two pipes, to be a worker's standard output and error; before `start`."""
        ends = []
        try:
            for number in (OUT, ERR):
                reading, writing = os.pipe()
                ends.append(writing)
                self._selector.register(reading, selectors.EVENT_READ, _Stream(rank, number))
            yield ends[OUT], ends[ERR]
        finally:
            for end in ends:
                os.close(end)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._pump, name="gradwire-output", daemon=True)
        self._thread.start()

    def close(self, timeout: float | None = None) -> bool:
        """Wait until everything is shown, at most so long: a screen may never move again. False if it took longer."""
        with self._lock:
            first, self._closing = not self._closing, True
            if first and not self._released:
                os.write(self._wake_write, b".")
        if self._thread is not None:
            self._thread.join(timeout)
        elif not self._released:
            self._release()
        return self._released

    def tail(self, rank: int) -> list[str]:
        """The last lines that this rank printed."""
        return list(self._tails[rank])

    def _pump(self) -> None:
        try:
            while len(self._selector.get_map()) > 1 or not self._closing:
                ready = self._selector.select(_LATE if self._closing else None)
                if self._closing and not ready:
                    break
                for key, _ in ready:
                    if key.data is None:
                        os.read(self._wake_read, 1)
                    else:
                        self._take(key.fd, key.data)
        finally:
            self._release()

    def _take(self, fd: int, stream: _Stream) -> None:
        data = os.read(fd, _CHUNK)
        if data:
            self._log(stream.rank, data)
            self._show(stream, stream.lines.feed(data))
        else:
            self._selector.unregister(fd)
            os.close(fd)
            self._show(stream, stream.lines.end())

    def _show(self, stream: _Stream, lines: list[str]) -> None:
        self._tails[stream.rank].extend(lines[-_TAIL:])
        unfinished = stream.lines.unfinished
        if self._progress_is_due(stream):
            stream.progress_shown = self._clock()
            lines = [*lines, unfinished]
        self._screen.show(stream.rank, stream.number, lines, unfinished)

    def _progress_is_due(self, stream: _Stream) -> bool:
        in_whole_lines = stream.lines.redrawn and not self._screen.is_terminal(stream.number)
        return in_whole_lines and self._clock() >= stream.progress_shown + _PROGRESS_EVERY

    def _log(self, rank: int, data: bytes) -> None:
        file = self._logs[rank]
        if file is None:
            return
        try:
            _write_all(file, data)
        except OSError as error:  # a full disk ends the log, not the training
            self._logs[rank] = None
            os.close(file)
            self._screen.show(rank, ERR, [f"(gradwire: the log of this rank ends here: {error.strerror})"])

    def _release(self) -> None:
        """Every descriptor; by the thread that uses them, so that none is closed under its hands."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._show(key.data, key.data.lines.end())
                os.close(key.fd)
        self._selector.close()
        for file in self._logs:
            if file is not None:
                os.close(file)
        with self._lock:
            self._released = True
            os.close(self._wake_read)
            os.close(self._wake_write)


def _open_logs(log_dir: Path | None, size: int) -> list[int | None]:
    if log_dir is None:
        return [None] * size
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    logs: list[int | None] = []
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        for rank in range(size):
            logs.append(os.open(log_path(log_dir, rank), flags, 0o666))
    except OSError as error:
        for file in logs:
            if file is not None:
                os.close(file)
        raise TransportError(f"cannot write logs in {log_dir}: {error.strerror}") from error
    return logs


def log_path(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank-{rank}.log"


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
