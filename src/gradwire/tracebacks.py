"""Formats uncaught exceptions without the frames inside gradwire.

`GRADWIRE_TRACEBACK=full` shows every frame. The frames also stay where the error is not one of gradwire's own and was
raised inside gradwire: such an error is unexpected, and a bug report needs them.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from gradwire.errors import GradwireError

TRACEBACK = "GRADWIRE_TRACEBACK"
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PLACEHOLDER = traceback.FrameSummary("<gradwire>", 0, "", lookup_line=False)
_NOTE = f"  [frames inside gradwire are hidden; {TRACEBACK}=full shows them]\n"


def format_exception(error: BaseException) -> str:
    """Return the traceback of an exception as Python prints it, without the frames inside gradwire."""
    formatted = traceback.TracebackException.from_exception(error)
    if os.environ.get(TRACEBACK) != "full":
        _hide_frames(formatted, error)
    return "".join(formatted.format())


def install() -> None:
    """Print uncaught exceptions of this process by `format_exception`, unless the program has a hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception to standard error: the hook that `install` sets."""
    try:
        text = format_exception(error.with_traceback(trace))
    except Exception:  # an exception whose text cannot be made, or no memory: Python's own hook copes with those
        sys.__excepthook__(kind, error, trace)
        return
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()


class _Frames(traceback.StackSummary):
    """Frames of a traceback; a placeholder among them is printed as a note that frames are hidden."""

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **options: Any) -> str:
        if frame_summary is _PLACEHOLDER:
            return _NOTE
        return super().format_frame_summary(frame_summary, **options)


def _hide_frames(formatted: traceback.TracebackException, error: BaseException) -> None:
    """Replace the frames inside gradwire in a formatted exception and in those that it is chained to or holds."""
    for part, its_error in _parts(formatted, error):
        unexpected = isinstance(its_error, Exception) and not isinstance(its_error, GradwireError)
        if part.stack and not (unexpected and _is_inside(part.stack[-1])):
            part.stack = _Frames(_without_inside(part.stack))


def _without_inside(frames: traceback.StackSummary) -> Iterator[traceback.FrameSummary]:
    hidden = False
    for frame in frames:
        if not _is_inside(frame):
            yield frame
        elif not hidden:
            yield _PLACEHOLDER
        hidden = _is_inside(frame)


def _is_inside(frame: traceback.FrameSummary) -> bool:
    return os.path.abspath(frame.filename).startswith(_PACKAGE)


def _parts(
    formatted: traceback.TracebackException, error: BaseException
) -> Iterator[tuple[traceback.TracebackException, BaseException]]:
    """A formatted exception, its causes, contexts and members, each with the exception that it was made from."""
    found: list[tuple[traceback.TracebackException | None, BaseException | None]] = [(formatted, error)]
    seen = set()
    while found:
        part, its_error = found.pop()
        if part is None or its_error is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part, its_error
        found += [(part.__cause__, its_error.__cause__), (part.__context__, its_error.__context__)]
        found += zip(part.exceptions or (), getattr(its_error, "exceptions", ()), strict=False)
