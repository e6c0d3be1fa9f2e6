"""Finds the first failure that no other failure explains. Pure: endings in, a verdict and its text out."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from gradwire.launch.worker_main import FINISHED
from gradwire.wire import parse_json

EXIT_BY_SIGNAL = 128  # shells add the signal's number to this


@dataclass(frozen=True)
class Report:
    """What a worker said of the exception that ended it."""

    time: float
    type: str
    message: str
    traceback: str
    place: str
    broken: bool  # it is, holds or came from an error of a broken group
    culprit: int | None  # the rank which that error names

    @classmethod
    def parse(cls, text: bytes | bytearray) -> Report:
        """ValueError if this is none."""
        match parse_json(text):
            case {
                "time": float(time),
                "type": str(type_),
                "message": str(message),
                "traceback": str(traceback),
                "place": str(place),
                "broken": bool(broken),
                "culprit": int() | None as culprit,
            }:
                return cls(time, type_, message, traceback, place, broken, culprit)
        raise ValueError("malformed report")

    @property
    def fatal(self) -> bool:
        """False for `sys.exit()` and for coming too late, which are no failures."""
        return not self.too_late and (self.type != "SystemExit" or self.message not in ("", "None", "0"))

    @property
    def too_late(self) -> bool:
        """It asked to be let into a job whose work was done."""
        return self.type == FINISHED

    @property
    def turned_away(self) -> bool:
        """It asked to be let into a job, and was not."""
        return self.type in ("gradwire.errors.Refused", "gradwire.errors.NoConnection")

    def summary(self) -> str:
        first, *_ = self.message.splitlines() or [""]
        if self.type == "SystemExit":
            place = f" at {self.place}" if self.place else ""
            return f"left by sys.exit({first}){place}" if len(first) <= 3 else f"gave up{place}: {first}"
        kind = self.type.removeprefix("gradwire.errors.")
        return f"raised {kind}: {first}" if first else f"raised {kind}"


@dataclass(frozen=True)
class Ending:
    """How a worker's process ended."""

    number: int  # its rank, where ranks stay
    pid: int
    status: int  # exit code, or minus the signal
    time: float  # when that was noticed
    told: float | None = None  # when the supervisor first told it to stop
    report: Report | None = None
    result_missing: bool = False  # it ended like a success, but a result was due
    noun: str = "rank"  # what it is called with its number
    doom: str = ""  # what the supervisor did to it, if it was neither stopped nor left alone

    @property
    def name(self) -> str:
        return f"{self.noun} {self.number}"

    @property
    def failed(self) -> bool:
        return self.status != 0 or self.result_missing

    @property
    def too_late(self) -> bool:
        """It did nothing, because the work of the job was done when it came."""
        return self.report is not None and self.report.too_late

    @property
    def exit_code(self) -> int:
        if self.status < 0 and self.report is not None and self.told is not None:
            return 1  # it had failed by an exception, but did not end until it was told to
        return self.status if self.status >= 0 else EXIT_BY_SIGNAL - self.status

    @property
    def failure_time(self) -> float:
        return self.report.time if self.report is not None else self.time

    @property
    def stopped(self) -> bool:
        """It failed because it was told to stop."""
        return self.failed and self.told is not None and self.told <= self.failure_time


def find(endings: Iterable[Ending]) -> Ending | None:
    """The failure that explains the others; None if nothing failed but what was told to stop.

    An error of a broken group is a consequence as long as any other failure is known. Where all failures are such
    errors (ranks that disagree, a rank that left), the rank they name says most, and otherwise the first that spoke.
    """
    failures = [ending for ending in endings if ending.failed and not ending.stopped]
    return min(failures, key=lambda failure: (_blames(failure), failure.failure_time, failure.number), default=None)


def of_failure(endings: Sequence[Ending], given_up_at: int) -> Ending | None:
    """What made a job fail that was given up at that ending; or, if that was a consequence, what came before it."""
    root = find(endings[given_up_at:])
    return find(endings) if root is None or _blames(root) > 0 else root


def of_end(endings: Sequence[Ending], errors: Collection[int], *, formed: bool) -> Ending | None:
    """Why a job that was never given up did not end well, if so.

    `errors` are the workers whose failures nobody got over; `formed` says that members had come together.
    """
    if all(ending.failed for ending in endings):  # whoever may go on elsewhere: nobody was done here
        return find(endings)
    if all(ending.too_late for ending in endings) and not formed:  # for work that nobody has done
        return min(endings, key=lambda ending: ending.failure_time)
    return find(ending for ending in endings if ending.number in errors)


def _blames(failure: Ending) -> int:
    report = failure.report
    if report is None or not report.broken:
        return 0
    return 1 if failure.noun == "rank" and report.culprit == failure.number else 2


def describe(ending: Ending) -> str:
    """One line: how this worker ended."""
    return f"{ending.name} (pid {ending.pid}) {fate(ending)}"


def consequences(endings: Iterable[Ending], root: Ending | None) -> list[str]:
    """How the other workers ended that did not end well, those with the same fate in one line."""
    fates: dict[tuple[str, str], list[str]] = {}
    for ending in endings:
        if ending.failed and ending is not root:
            fates.setdefault((ending.noun, fate(ending)), []).append(str(ending.number))
    return [_told_of(noun, numbers, what) for (noun, what), numbers in fates.items()]


def _told_of(noun: str, numbers: list[str], what: str) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]} {what}"
    first, _, rest = what.partition(" ")
    return f"{noun}s {', '.join(numbers)} {'were' if first == 'was' else first} {rest}"


def fate(ending: Ending) -> str:
    """How it ended, to be said after its name."""
    if ending.stopped:
        return "was stopped"
    if ending.report is not None:
        return ending.report.summary()
    if ending.status < 0 and ending.doom:
        return ending.doom
    if ending.status < 0:
        return f"was killed by {_signal_name(-ending.status)}{_hint(-ending.status)}"
    if ending.result_missing:
        return "exited with code 0 before its function returned"
    return f"exited with code {ending.status}"


def explain(root: Ending, last_lines: Sequence[str]) -> str:
    """The root cause in full: its traceback, or where there is none the last that it printed."""
    if root.report is not None and root.report.type != "SystemExit":
        details = root.report.traceback.rstrip("\n")
    else:
        details = "\n".join(["Its last output:", *last_lines]) if last_lines else ""
    return f"{describe(root)}\n{details}".rstrip("\n")


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def _hint(number: int) -> str:
    """Nobody tells who has sent a signal: only where it can also come from."""
    return ", which the kernel also sends when memory runs out" if number == signal.SIGKILL else ""
