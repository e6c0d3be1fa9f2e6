"""Finds the root cause of a failed job, the failure that explains the others, and describes it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradwire.launch.worker_main import FINISHED
from gradwire.topology import rank_ranges
from gradwire.wire import parse_json

EXIT_BY_SIGNAL = 128  # shells add the signal's number to this


@dataclass(frozen=True)
class Report:
    """What a worker reported about the exception that ended it."""

    time: float
    type: str
    message: str
    traceback: str
    place: str
    broken: bool  # the exception is, contains or was caused by an error of a broken group
    lost: bool  # that error is a PeerLost
    culprit: int | None  # the rank that that error names

    @classmethod
    def parse(cls, text: bytes | bytearray) -> Report:
        """Read a report; raise ValueError if the text is none."""
        return cls.from_fields(parse_json(text))

    @classmethod
    def from_fields(cls, fields: object) -> Report:
        """Return the report with these fields, in JSON's types; raise ValueError if they are none."""
        match fields:
            case {
                "time": float(time),
                "type": str(type_),
                "message": str(message),
                "traceback": str(traceback),
                "place": str(place),
                "broken": bool(broken),
                "lost": bool(lost),
                "culprit": int() | None as culprit,
            }:
                return cls(time, type_, message, traceback, place, broken, lost, culprit)
        raise ValueError("malformed report")

    @property
    def fatal(self) -> bool:
        """Whether the exception is a failure: `sys.exit(0)` and joining a finished job are none."""
        return not self.too_late and (self.type != "SystemExit" or self.message not in ("", "None", "0"))

    @property
    def too_late(self) -> bool:
        """Whether the worker tried to join a job whose work was done."""
        return self.type == FINISHED

    @property
    def refused(self) -> bool:
        """Whether the worker tried to join a job and was refused."""
        return self.type in ("gradwire.errors.Refused", "gradwire.errors.NoConnection")

    @property
    def explains_itself(self) -> bool:
        """Whether the traceback shows a mistake: not for an exit, a refusal, or an error of a broken group."""
        return self.fatal and not (self.broken or self.refused or self.type == "SystemExit")

    @property
    def short_type(self) -> str:
        """The exception's type, without the module if it is one of gradwire's."""
        return self.type.removeprefix("gradwire.errors.")

    def frames(self) -> str:
        """The traceback without the exception's text at its end."""
        text = f"{self.type}: {self.message}" if self.message else self.type
        return self.traceback.rstrip("\n").removesuffix(text).rstrip("\n")

    def summary(self) -> str:
        """The exception in one line, to follow the worker's name."""
        first, *_ = self.message.splitlines() or [""]
        if self.type == "SystemExit":
            place = f" at {self.place}" if self.place else ""
            return f"left by sys.exit({first}){place}" if len(first) <= 3 else f"gave up{place}: {first}"
        return f"raised {self.short_type}: {first}" if first else f"raised {self.short_type}"


@dataclass(frozen=True)
class Ending:
    """How a worker's process ended."""

    number: int  # the rank, in jobs of fixed size
    pid: int
    status: int  # exit code, or minus the signal
    time: float  # when the supervisor noticed the exit
    stop_sent: float | None = None  # when the supervisor first signalled the worker to stop
    report: Report | None = None
    result_missing: bool = False  # the process exited with code 0, but has not sent the result that was due
    noun: str = "rank"  # the word before the number: "rank 2", "worker 2"
    left_early: bool = False  # the process exited with code 0 while other ranks still needed it
    kill_reason: str = ""  # why the supervisor killed the worker, if it did so for another reason than stopping the job
    host: str = ""  # where the worker ran, if another launcher started it
    stop_signal: int = 0  # because of which the worker left its job after a whole step, as it reported

    @property
    def name(self) -> str:
        return f"{self.noun} {self.number}"

    @property
    def failed(self) -> bool:
        return not self.left_gracefully and (self.status != 0 or self.result_missing)

    @property
    def left_gracefully(self) -> bool:
        """Whether the worker left after a whole step because of a signal."""
        return self.stop_signal != 0 and self.status == EXIT_BY_SIGNAL + self.stop_signal

    @property
    def too_late(self) -> bool:
        """Whether the worker did nothing because the work of the job was already done."""
        return self.report is not None and self.report.too_late

    @property
    def exit_code(self) -> int:
        if self.status < 0 and self.report is not None and self.stop_sent is not None:
            return 1  # an exception ended the script, but the process did not exit until it was stopped
        return self.status if self.status >= 0 else EXIT_BY_SIGNAL - self.status

    @property
    def failure_time(self) -> float:
        return self.report.time if self.report is not None else self.time

    @property
    def stopped(self) -> bool:
        """Whether the worker failed because the supervisor stopped it."""
        return self.failed and self.stop_sent is not None and self.stop_sent <= self.failure_time


# -- endings on other hosts -------------------------------------------------------------------------------------------


def to_message(ending: Ending, now: float) -> dict[str, Any]:
    """Return an ending in JSON's types, with times relative to `now`: clocks of two hosts cannot be compared."""
    report = None if ending.report is None else {**asdict(ending.report), "time": ending.report.time - now}
    stop_sent = None if ending.stop_sent is None else ending.stop_sent - now
    return {
        **{name: getattr(ending, name) for name in ("number", "pid", "status", "kill_reason", "stop_signal")},
        "time": ending.time - now,
        "stop_sent": stop_sent,
        "report": report,
    }


def from_message(message: object, host: str, now: float) -> Ending:
    """Return the ending that another launcher has just sent; raise ValueError if the message is none."""
    match message:
        case {
            "number": int(number),
            "pid": int(pid),
            "status": int(status),
            "kill_reason": str(kill_reason),
            "stop_signal": int(stop_signal),
            "time": float(time),
            "stop_sent": float() | None as stop_sent,
            "report": dict() | None as report,
        }:
            told = None if report is None else Report.from_fields(report)
            return Ending(
                number,
                pid,
                status,
                time + now,
                None if stop_sent is None else stop_sent + now,
                None if told is None else replace(told, time=told.time + now),
                kill_reason=kill_reason,
                host=host,
                stop_signal=stop_signal,
            )
    raise ValueError("malformed ending")


# -- which ending is the root cause -----------------------------------------------------------------------------------


def find(endings: Iterable[Ending]) -> Ending | None:
    """Return the failure that explains the others; None if no worker failed, apart from those that were stopped.

    An error of a broken group is a consequence as long as there is any other failure. If all failures are such errors
    (ranks disagree, a rank left), the rank that the errors name comes first, and then the earliest failure.
    """
    failures = [ending for ending in endings if ending.failed and not ending.stopped]
    return min(failures, key=lambda failure: (_remoteness(failure), failure.failure_time, failure.number), default=None)


def of_failure(endings: Sequence[Ending], given_up_at: int) -> Ending | None:
    """Return why a job failed that was given up at this ending; earlier endings count if that one is a consequence."""
    root = find(endings[given_up_at:])
    return find(endings) if root is None or _remoteness(root) > 0 else root


def of_end(endings: Sequence[Ending], errors: Collection[int], *, formed: bool) -> Ending | None:
    """Return why a job that was never given up did not end well; None if it did.

    `errors` are the workers whose failures the others did not recover from; `formed`: members had formed a generation.
    """
    if all(ending.failed for ending in endings):  # workers elsewhere may continue, but none here has finished
        return find(endings)
    if all(ending.too_late for ending in endings) and not formed:  # refused as too late, though no worker did the work
        return min(endings, key=lambda ending: ending.failure_time)
    return find(ending for ending in endings if ending.number in errors)


def or_early_exit(failure: Ending | None, endings: Iterable[Ending]) -> Ending | None:
    """Return the rank whose exit with code 0 caused `failure`, a PeerLost on another rank; without one, `failure`."""
    report = failure.report if failure is not None else None
    if failure is not None and failure.noun == "rank" and report is not None and report.lost:
        for ending in endings:
            if ending.number == report.culprit and not ending.failed and ending.stop_sent is None:
                return replace(ending, left_early=True)
    return failure


def _remoteness(failure: Ending) -> int:
    """Return 0 for a failure of its own, 1 for an error of a broken group that names this rank, otherwise 2."""
    report = failure.report
    if report is None or not report.broken:
        return 0
    return 1 if failure.noun == "rank" and report.culprit == failure.number else 2


# -- in words ---------------------------------------------------------------------------------------------------------


def describe(ending: Ending) -> str:
    """Return one line: the name of a worker and how it ended."""
    host = f"host {ending.host}, " if ending.host else ""
    return f"{ending.name} ({host}pid {ending.pid}) {how_it_ended(ending)}"


def consequences(endings: Iterable[Ending], root: Ending | None) -> list[str]:
    """Return lines that say how the workers other than `root` failed, one line for those that failed alike.

    Errors of a broken group take one line in all: each names what its worker was doing, which may differ.
    """
    alike: dict[str, list[Ending]] = {}
    for ending in endings:
        if ending.failed and ending is not root:
            alike.setdefault(_likeness(ending, root), []).append(ending)
    lines = []
    for likeness, ones in alike.items():
        if likeness == _SAME and root is not None:
            lines.append(f"{_names(ones)}: same error as {root.name}")
        else:
            lines.append(f"{_names(ones)} {_common_way(ones)}")
    return lines


_SAME = "same error as the root cause"
_BROKEN = "another error of a broken group"


def _likeness(ending: Ending, root: Ending | None) -> str:
    """What workers that share a line have in common."""
    report = ending.report
    if root is not None and report is not None and not ending.stopped:
        if root.report is not None and report.traceback == root.report.traceback:
            return _SAME
        if report.broken:
            return _BROKEN
    return how_it_ended(ending)


def _common_way(endings: list[Ending]) -> str:
    ways = {how_it_ended(ending) for ending in endings}
    if len(ways) > 1:
        return f"failed in consequence; {endings[0].name} {how_it_ended(endings[0])}"
    what = ways.pop()
    return what.replace("was ", "were ", 1) if len(endings) > 1 and what.startswith("was ") else what


def _names(endings: list[Ending]) -> str:
    """For example "rank 2" or "ranks 0-4, 6"."""
    return f"{endings[0].noun}{'s' * (len(endings) > 1)} {rank_ranges(ending.number for ending in endings)}"


def how_it_ended(ending: Ending) -> str:
    """Return how a worker ended, in words that follow its name."""
    if ending.stopped:
        return "was stopped"
    if ending.left_early:
        how = ending.report.summary() if ending.report is not None else "exited with code 0"
        return f"{how} while other ranks still needed it"
    if ending.report is not None:
        return ending.report.summary()
    if ending.status < 0 and ending.kill_reason:
        return ending.kill_reason
    if ending.status < 0:
        return f"was killed by {_signal_name(-ending.status)}{_hint(-ending.status)}"
    if ending.result_missing:
        return "exited with code 0 before its function returned"
    return f"exited with code {ending.status}"


def explain(root: Ending, last_lines: Sequence[str], *, with_message: bool = True) -> str:
    """Describe the root cause in full: with its traceback, or without one with the last lines that it printed.

    `with_message=False` leaves out the exception's own text after the frames, for a reader who sees it elsewhere.
    """
    if root.report is not None and root.report.type != "SystemExit":
        details = root.report.traceback.rstrip("\n") if with_message else root.report.frames()
    else:
        details = "\n".join(["Its last output:", *last_lines]) if last_lines else ""
    return f"{describe(root)}\n{details}".rstrip("\n")


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def _hint(number: int) -> str:
    """The sender of a signal is unknown: name the kernel where it is a likely one."""
    return ", which the kernel also sends when memory runs out" if number == signal.SIGKILL else ""
