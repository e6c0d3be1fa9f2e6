"""Shows the lines of all workers with a prefix; on a terminal the unfinished line stays at the bottom."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
from collections.abc import Sequence
from typing import Any, TextIO

OUT, ERR = 0, 1  # the stream that a line was written to, and is shown on
_ERASE = "\r\x1b[2K"
_RESET = "\x1b[0m"
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


class Screen:
    """Standard output and standard error of this process, which the workers share. For one thread at a time.

    A stream that fails (a closed pipe) is not used any more: the job continues, and the logs have everything.
    """

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._streams: list[TextIO | None] = [out, err]
        self._terminal = [_is_terminal(stream) for stream in (out, err)]
        self._prefixes: dict[tuple[str, int], str] = {}
        self._bottom = ""  # the unfinished line at the bottom of the terminal
        self._bottom_of: tuple[str, int] | None = None  # the label and stream of that line

    def is_terminal(self, stream: int) -> bool:
        return self._terminal[stream]

    def show(self, label: str, stream: int, lines: Sequence[str], unfinished: str = "") -> None:
        """Show whole lines; on a terminal also the unfinished line, which the next call overwrites."""
        prefix = self._prefix(label, stream)
        if not self._terminal[stream]:
            self._write(stream, "".join(f"{prefix}{line}\n" for line in lines))
            return
        erase = _ERASE if self._bottom else ""
        if unfinished:
            width = shutil.get_terminal_size().columns - len(f"[{label}] ") - 1
            self._bottom, self._bottom_of = prefix + _shortened(unfinished, width), (label, stream)
        elif self._bottom_of == (label, stream):
            self._bottom, self._bottom_of = "", None
        text = "".join(f"{prefix}{_closed(line)}\n" for line in lines)
        self._write(stream, f"{erase}{text}{self._bottom}")

    def print_line(self, line: str) -> None:
        """Show a line of the launcher, on standard error."""
        if self._terminal[ERR]:
            self._write(ERR, f"{_ERASE if self._bottom else ''}{line}\n{self._bottom}")
        else:
            self._write(ERR, f"{line}\n")

    def _prefix(self, label: str, number: int) -> str:
        key = (label, number)
        if key not in self._prefixes:
            stream = self._streams[number] if self._terminal[number] else None
            self._prefixes[key] = f"[{label}] " if stream is None else _coloured(label, stream)
        return self._prefixes[key]

    def _write(self, number: int, text: str) -> None:
        stream = self._streams[number]
        if stream is None or not text:
            return
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoding = stream.encoding or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except (OSError, ValueError) as error:  # ValueError: the program has closed the stream
            self._streams[number] = None
            if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO):  # EIO: the terminal is gone
                _drain(stream)


def _drain(stream: TextIO) -> None:
    """Redirect a stream without a reader to /dev/null, so that flushing it at exit does not fail."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _coloured(label: str, stream: TextIO) -> str:
    from rich.console import Console

    style = _COLOURS[int(label) % len(_COLOURS)] if label.isdecimal() else "dim"
    found = Console(file=stream)  # respects NO_COLOR and the capabilities of the terminal
    text = io.StringIO()  # not the stream itself: rich would write to it, and the terminal may be gone
    system: Any = found.color_system
    console = Console(file=text, force_terminal=True, color_system=system, no_color=found.no_color)
    console.print(f"[{label}] ", style=style, end="", markup=False, highlight=False)
    return text.getvalue()


def _closed(line: str) -> str:
    """Reset colours at the end of a line, so that they do not continue in the next one."""
    return line + _RESET if "\x1b" in line else line


def _shortened(line: str, width: int) -> str:
    """Cut a line to `width` columns: a wrapped line could not be overwritten."""
    from rich.text import Text

    text = Text.from_ansi(line)
    text.truncate(max(width, 1), overflow="ellipsis")
    return text.plain
