"""What the launcher knows of a graceful stop: workers leave after a whole step because of a signal. Pure.

A signal to one worker stops all of them. No launcher needs to pass it on, because the ranks agree to leave.

>>> stop = GracefulStop("worker", timeout=120)
>>> stop.noticed(2, StopNotice(NoticeKind.RECEIVED, signal.SIGUSR2), forwarded=False)
'worker 2 received SIGUSR2: all workers leave after the current step, with 120 s for the last checkpoint'
>>> stop.noticed(0, StopNotice(NoticeKind.AGREED, signal.SIGUSR2), forwarded=False)
''
>>> stop.stopped_by, stop.origin
(<Signals.SIGUSR2: 12>, ' after a signal to worker 2')
"""

from __future__ import annotations

import signal
from signal import Signals

from gradwire.job.stop_notices import STOP_SIGNALS, NoticeKind, StopNotice
from gradwire.topology import rank_ranges


class GracefulStop:
    """The signals that the launcher has received, and those that its workers have reported."""

    def __init__(self, noun: str, timeout: float) -> None:
        self._noun = noun
        self._timeout = timeout
        self._asked: list[Signals] = []
        self._agreed: Signals | None = None  # because of which all workers leave
        self._receivers: set[int] = set()  # workers that another process has signalled
        self._announced = False

    @property
    def stopped_by(self) -> Signals | None:
        """The signal that has stopped the job; None: nothing has."""
        if self._asked and self._asked[0] not in STOP_SIGNALS:
            return self._asked[0]
        return self._agreed or (self._asked[0] if self._asked else None)

    @property
    def default_signal(self) -> Signals | None:
        """The signal that ends workers that do not watch any more; None: the launcher was not signalled."""
        return self._asked[-1] if self._asked and self._asked[-1] in STOP_SIGNALS else None

    @property
    def origin(self) -> str:
        """Where the signal arrived, in words that follow its name; empty if this launcher received it."""
        if self._asked or self._agreed is None:
            return ""
        if not self._receivers:
            return f" after a signal to another launcher or one of its {self._noun}s"
        plural = "s" * (len(self._receivers) > 1)
        return f" after a signal to {self._noun}{plural} {rank_ranges(self._receivers)}"

    def asked(self, number: int, *, watching: bool) -> str:
        """Note a signal to the launcher, and return a line for the user or "".

        `watching`: workers leave after their current step. Otherwise the signal ends them.
        """
        self._asked.append(Signals(number))
        return self._announced_now(self._timed()) if watching and number in STOP_SIGNALS else ""

    def noticed(self, worker: int, notice: StopNotice, *, forwarded: bool) -> str:
        """Note what a worker has reported, and return a line for the user or "".

        `forwarded`: the launcher has signalled this worker.
        """
        if notice.kind is NoticeKind.RECEIVED and not forwarded:
            self._receivers.add(worker)
        if notice.kind is NoticeKind.AGREED and self._agreed is None:
            self._agreed = Signals(notice.number)
        if notice.kind is NoticeKind.AGREED or not forwarded:
            return self._announced_now(self._reported(worker, notice))
        return self._announced_now(self._timed()) if self.default_signal else ""

    @property
    def overdue(self) -> str:
        """The line for workers that did not leave in time."""
        return f"the {self._noun}s did not leave within {self._timeout:g} s (--stop-timeout): they are killed"

    def _announced_now(self, line: str) -> str:
        announced, self._announced = self._announced, True
        return "" if announced else line

    def _timed(self) -> str:
        after = f"all {self._noun}s leave after the current step and their last checkpoint"
        return f"{self._asked[-1].name}: {after}; waiting up to {self._timeout:g} s"

    def _reported(self, worker: int, notice: StopNotice) -> str:
        name = signal.Signals(notice.number).name
        if notice.kind is NoticeKind.RECEIVED:
            what = f"{self._noun} {worker} received {name}: all {self._noun}s leave after the current step"
        else:
            what = f"all {self._noun}s leave because of {name} to one of them"
        return f"{what}, with {self._timeout:g} s for the last checkpoint"
