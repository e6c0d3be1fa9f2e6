"""Reads the output of the workers, writes it to a log per worker, and shows it on the screen.

One thread does this, separate from the supervision: a screen that does not move (a paused terminal, a full pipe) blocks
the workers' printing, but neither the detection of failures nor the stopping.
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
from typing import NamedTuple, TextIO

from gradwire.errors import TransportError
from gradwire.launch.screen import ERR, OUT, Screen
from gradwire.launch.terminal_lines import Lines

_CHUNK = 1 << 16
_TAIL = 20  # last lines kept for a worker that ends without a traceback
_PROGRESS_EVERY = 5.0  # seconds between two shown states of a progress bar, where only whole lines can be shown
_LATE = 0.5  # seconds without data after which a stream that is still open after the workers ended is abandoned


_LOG_ONLY = 2  # the number of the stream whose lines are written to the log and not shown


class Pipes(NamedTuple):
    """The writing ends of a worker's pipes: standard output, standard error, and tracebacks for its log only."""

    out: int
    err: int
    tracebacks: int


@dataclass
class _Printer:
    """A process that prints."""

    label: str
    log: int | None
    shown: bool  # on the screen
    open: int = 3  # streams that have not ended
    ended: threading.Event = field(default_factory=threading.Event)
    tail: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=_TAIL))


@dataclass
class _Stream:
    printer: _Printer
    number: int  # OUT or ERR
    lines: Lines = field(default_factory=Lines)
    progress_shown: float = float("-inf")


class Output:
    """The output of all workers. Call `close` when the workers are gone; it waits until everything is shown."""

    def __init__(
        self,
        *,
        log_dir: Path | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log_dir = log_dir
        self._screen = Screen(out or sys.stdout, err or sys.stderr)
        self._printers: dict[str, _Printer] = {}
        self._lines: collections.deque[str] = collections.deque()
        self._clock = clock
        _prepare(log_dir)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._lock = threading.Lock()  # guards the wake pipe: no thread may write to it after it is closed
        self._closing = False
        self._released = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def pipes(self, label: str, log: str, *, shown: bool = True) -> Iterator[Pipes]:
        """The writing ends of a worker's pipes; `log` names its file. They are closed when the block ends."""
        # A restarted process appends to its log.
        printer = _Printer(label, _open_log(self.log_dir, log, truncate=label not in self._printers), shown)
        self._printers[label] = printer
        ends = []
        try:
            for number in (OUT, ERR, _LOG_ONLY):
                reading, writing = os.pipe()
                ends.append(writing)
                self._selector.register(reading, selectors.EVENT_READ, _Stream(printer, number))
            yield Pipes(*ends)
        finally:
            for end in ends:
                os.close(end)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._pump, name="gradwire-output", daemon=True)
        self._thread.start()

    def print_line(self, line: str) -> None:
        """Show a line of the launcher among those of the workers."""
        self._lines.append(line)
        self._wake()

    def close(self, timeout: float | None = None) -> bool:
        """Wait until everything is shown; False if that takes longer than `timeout`, as on a paused terminal."""
        first, self._closing = not self._closing, True
        if first:
            self._wake()
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        if not self._released:
            self._release()
        return True

    def tail(self, label: str, timeout: float = 0.0) -> list[str]:
        """Return the last lines that a worker printed; wait up to `timeout` for the end of its streams."""
        printer = self._printers[label]
        printer.ended.wait(timeout)
        return list(printer.tail)

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # the pipe is full: the thread will wake anyway
            if not self._released:
                os.write(self._wake_write, b".")

    def _pump(self) -> None:
        try:
            while len(self._selector.get_map()) > 1 or not self._closing:
                ready = self._selector.select(_LATE if self._closing else None)
                if self._closing and not ready:
                    break
                for key, _ in ready:
                    if key.data is None:
                        os.read(self._wake_read, _CHUNK)
                        self._show_lines()
                    else:
                        self._take(key.fd, key.data)
        finally:
            self._release()

    def _take(self, fd: int, stream: _Stream) -> None:
        data = os.read(fd, _CHUNK)
        if data:
            self._log(stream.printer, data)
            self._show(stream, stream.lines.feed(data))
        else:
            self._end(fd, stream)

    def _end(self, fd: int, stream: _Stream) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        self._show(stream, stream.lines.end())
        stream.printer.open -= 1
        if stream.printer.open == 0:
            self._close_log(stream.printer)
            stream.printer.ended.set()

    def _show(self, stream: _Stream, lines: list[str]) -> None:
        stream.printer.tail.extend(lines[-_TAIL:])
        if not stream.printer.shown or stream.number == _LOG_ONLY:
            return
        unfinished = stream.lines.unfinished
        if self._progress_is_due(stream):
            stream.progress_shown = self._clock()
            lines = [*lines, unfinished]
        self._screen.show(stream.printer.label, stream.number, lines, unfinished)

    def _show_lines(self) -> None:
        while self._lines:
            self._screen.print_line(self._lines.popleft())

    def _progress_is_due(self, stream: _Stream) -> bool:
        in_whole_lines = stream.lines.redrawn and not self._screen.is_terminal(stream.number)
        return in_whole_lines and self._clock() >= stream.progress_shown + _PROGRESS_EVERY

    def _log(self, printer: _Printer, data: bytes) -> None:
        if printer.log is None:
            return
        try:
            _write_all(printer.log, data)
        except OSError as error:  # a full disk must not end the training
            self._close_log(printer)
            self._screen.show(printer.label, ERR, [f"(gradwire: this log ends here: {error.strerror})"])

    def _close_log(self, printer: _Printer) -> None:
        if printer.log is not None:
            os.close(printer.log)
        printer.log = None

    def _release(self) -> None:
        """Close every descriptor. Only the thread that uses them may do so."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._end(key.fd, key.data)
        self._selector.close()
        for printer in self._printers.values():
            self._close_log(printer)
        with self._lock:
            self._released = True
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._show_lines()


def _prepare(log_dir: Path | None) -> None:
    try:
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TransportError(f"cannot write logs in {log_dir}: {error.strerror}") from error


def _open_log(log_dir: Path | None, name: str, *, truncate: bool) -> int | None:
    if log_dir is None:
        return None
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if truncate else os.O_APPEND)
    try:
        return os.open(log_dir / name, flags, 0o666)
    except OSError as error:
        raise TransportError(f"cannot write logs in {log_dir}: {error.strerror}") from error


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
