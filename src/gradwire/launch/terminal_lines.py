r"""Splits the bytes of a stream into lines as a terminal would show them.

Progress bars overwrite one line by carriage returns: only the last state of such a line counts. Bytes that are not
UTF-8 and control characters are shown escaped. Colours stay; cursor movements are removed, since the line is shown at
another place.

>>> lines = Lines()
>>> lines.feed(b"one\r\ntw"), lines.feed(b"o\n 10%\r 20%\r")
(['one'], ['two'])
>>> lines.unfinished
' 20%'
>>> lines.feed(b"100%\n\xff done"), lines.end()
(['100%'], ['\\xff done'])
"""

from __future__ import annotations

import codecs
import re

_LONGEST = 1 << 16  # characters; a longer line is split, so that no stream can fill the memory
_CONTROLS: dict[int, str | None] = {code: f"\\x{code:02x}" for code in [*range(32), 127]}
_CONTROLS |= {ord(kept): kept for kept in "\t\n\r\a\x1b"} | {ord("\b"): None}
# Control sequences except colours (which end in m), titles of windows, other escapes, the bell.
_CURSOR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[^\[\]]|\x07")


class Lines:
    """Cuts one stream into lines."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._drawn = ""  # the text of the line before the last carriage return
        self._rest = ""  # the text after it

    @property
    def unfinished(self) -> str:
        """The line without a newline yet, as a terminal would show it."""
        return _without_cursor_movements(self._rest or self._drawn)

    @property
    def redrawn(self) -> bool:
        """Whether the unfinished line is being overwritten, as progress bars do."""
        return bool(self._drawn)

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        return self._cut(self._decoder.decode(data))

    def end(self) -> list[str]:
        """Return the rest when the stream has ended: lines, the last of them without its newline."""
        lines = self._cut(self._decoder.decode(b"", final=True))
        if self._rest or self._drawn:
            lines.append(self._finish())
        return lines

    def _cut(self, text: str) -> list[str]:
        lines = []
        *whole, last = text.translate(_CONTROLS).split("\n")
        for part in whole:
            self._draw(part)
            lines.append(self._finish())
        self._draw(last)
        while len(self._rest) > _LONGEST:
            lines.append(_without_cursor_movements(self._rest[:_LONGEST]))
            self._rest = self._rest[_LONGEST:]
        return lines

    def _draw(self, part: str) -> None:
        if "\r" in part:
            *drawings, self._rest = (self._rest + part).split("\r")
            self._drawn = next((text for text in reversed(drawings) if text), self._drawn)
        else:
            self._rest += part

    def _finish(self) -> str:
        line, self._drawn, self._rest = self.unfinished, "", ""
        return line


def _without_cursor_movements(text: str) -> str:
    return _CURSOR.sub("", text) if "\x1b" in text or "\a" in text else text
