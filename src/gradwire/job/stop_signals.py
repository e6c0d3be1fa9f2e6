"""Records SIGTERM and SIGUSR2, so that a run can leave after a whole step instead of being killed in the middle of one.

    with stop_signals.watched(can_stop=lambda: not broken) as signals:
        ...
        if signals.received:  # the number of the signal
            ...

While a run watches, the first signal is recorded and reported to the launcher, and has no other effect. It has its
default effect, the end of this process, if the run cannot leave gracefully, and if SIGTERM arrives a second time. When
the run has acted upon a signal, another one does not disturb the exit of this process either.

Only signals with the default handler are watched, and only in the main thread: Python runs handlers there. In a forked
child (a data loader), SIGTERM has its default effect again, and SIGUSR2 is ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from gradwire.job.stop_notices import STOP_SIGNALS, NoticeKind, NoticeWriter

# A scheduler may signal every process of a job, and the launcher then forwards its own signal too. SIGTERM counts as a
# second one only if it arrives this many seconds after the first.
SECOND_AFTER = 2.0


class StopSignals:
    """The signals that this process has received while a run watches."""

    def __init__(self, can_stop: Callable[[], bool], notices: NoticeWriter | None = None) -> None:
        self._can_stop = can_stop
        self._notices = notices
        self._received = 0
        self.acted_upon = False  # this process leaves because of the signal
        self._first_term: float | None = None

    @property
    def received(self) -> int:
        """The first of SIGTERM and SIGUSR2 that this process received; 0 if none.

        A signal that an earlier run of this process received and did not act upon counts too.
        """
        return self._received

    @property
    def unhandled(self) -> int:
        """The received signal if the run has not acted upon it: a later run of this process must do so. Otherwise 0."""
        return 0 if self.acted_upon else self._received

    def begin(self) -> None:
        """Report that this process watches for signals."""
        self._report(NoticeKind.WATCHING)

    def end(self) -> None:
        """Report that signals have their default effect again."""
        self._report(NoticeKind.NOT_WATCHING)

    def inherit(self, number: int) -> None:
        """Record a signal that another run of this process has received and not acted upon."""
        if number and not self._received:
            self._received = number
            self._report(NoticeKind.RECEIVED, number)

    def agreed(self, number: int) -> None:
        """Report to the launcher that all ranks leave because of this signal, which any of them has received.

        Call it on all ranks when they have agreed, before a checkpoint is written: the launcher then waits for it.
        """
        self.acted_upon = True
        self._report(NoticeKind.AGREED, number)

    def accept(self, number: int, now: float) -> bool:
        """Record and report a signal. Return False if it must have its default effect."""
        if not (self.acted_upon or self._can_stop()):
            return False
        if number == signal.SIGTERM:
            if self._first_term is None:
                self._first_term = now
            elif now >= self._first_term + SECOND_AFTER:
                return False
        if not self._received:
            self._received = number
            self._report(NoticeKind.RECEIVED, number)
        return True

    def _report(self, kind: NoticeKind, number: int = 0) -> None:
        if self._notices is not None:
            self._notices.send(kind, number)


_watches: list[StopSignals] = []  # the last one decides
_owner = 0  # the process that watches; a forked child has another id
_unhandled = 0  # a signal that a run which has ended received and did not act upon
_leaving: StopSignals | None = None  # of a run that has ended because of a signal
_ignores = False  # this process is a forked child that ignores SIGUSR2
_fork_hook_set = False


@contextlib.contextmanager
def watched(can_stop: Callable[[], bool] = lambda: True) -> Iterator[StopSignals]:
    """Watch for SIGTERM and SIGUSR2 inside the block.

    Args:
        can_stop: Returns whether the run can leave gracefully now: False if its group is broken and will not recover. A
            signal handler calls it, so it must not wait for a lock.
    """
    signals = StopSignals(can_stop, NoticeWriter())
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    _begin(signals)
    try:
        yield signals
    finally:
        _end(signals)


def _begin(signals: StopSignals) -> None:
    global _owner, _fork_hook_set, _unhandled
    if not _fork_hook_set:
        _fork_hook_set = True
        os.register_at_fork(after_in_child=_forget_parent)
    signals.begin()
    signals.inherit(_unhandled)
    _owner, _unhandled = os.getpid(), 0
    _watches.append(signals)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL or (number == signal.SIGUSR2 and _ignores):
            signal.signal(number, _handle)


def _end(signals: StopSignals) -> None:
    global _unhandled, _leaving
    if signals not in _watches:  # a forked child leaves the block of its parent
        return
    _watches.remove(signals)
    if _watches:
        _watches[-1].inherit(signals.unhandled)
    elif signals.acted_upon:
        _leaving = signals
    else:
        _unhandled = signals.unhandled
        _set_default()
        signals.end()


def _forget_parent() -> None:
    """Let SIGTERM end a forked child, such as a data loader, but not SIGUSR2.

    A scheduler may send SIGUSR2 to all processes of a job. The parent still needs its data loaders for the step that it
    finishes.
    """
    global _unhandled, _leaving, _ignores
    _unhandled, _leaving = 0, None
    _watches.clear()
    ours = signal.getsignal(signal.SIGUSR2) is _handle
    _set_default()
    if ours:
        _ignores = True
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _set_default() -> None:
    """Set the default handlers again, where no other ones were set meanwhile."""
    for number in STOP_SIGNALS:
        # Outside of the main thread this is not possible. The handler then has the default effect itself.
        with contextlib.suppress(ValueError):
            if signal.getsignal(number) is _handle:
                signal.signal(number, signal.SIG_DFL)


def _handle(number: int, frame: FrameType | None) -> None:
    deciding = _watches[-1] if _watches else _leaving
    if os.getpid() == _owner and deciding is not None and deciding.accept(number, time.monotonic()):
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
