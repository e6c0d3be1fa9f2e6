"""Injects the faults of `gradwire run --chaos`: when and on which worker (pure), and how they are carried out."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

from gradwire.errors import ConfigError
from gradwire.launch.worker_process import Worker

# The number of workers that each action affects.
TARGETS = {"kill": 1, "freeze": 1, "cut": 2, "restart coordinator": 0, "join": 0}
LASTING = {"freeze": "resume", "cut": "heal"}  # actions that may have a duration, and what ends them
NEEDS_ELASTIC = {"cut", "restart coordinator", "join"}

_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0}
_TIME = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,24})?)(ms|s|min)")
_NUMBER = re.compile(r"[0-9]{1,9}")
_LONGEST = 1 << 16  # characters


@dataclass(frozen=True)
class Fault:
    """One statement of the script. `targets` None means random workers."""

    action: str
    targets: tuple[int, ...] | None
    at: float
    every: float | None = None
    duration: float | None = None

    def __str__(self) -> str:
        target = "random" if self.targets is None else "-".join(map(str, self.targets))
        parts = [self.action, target, f"@{_seconds(self.at)}"]
        parts += [f"every {_seconds(self.every)}"] if self.every is not None else []
        parts += [f"for {_seconds(self.duration)}"] if self.duration is not None else []
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Script:
    """All statements; `seed` None: random workers are chosen differently in each run."""

    faults: tuple[Fault, ...]
    seed: int | None = None


def parse(text: str) -> Script:
    """Read statements such as 'kill 2 @5s; freeze random every 10s for 2s'; a ConfigError says which one is wrong."""
    if len(text) > _LONGEST:
        raise ConfigError(f"chaos: {len(text)} characters are more than the {_LONGEST} that can be read")
    faults, seed = [], None
    for statement in re.split(r"[;\n]", text):
        words = statement.replace("@", " @ ").split()
        if not words:
            continue
        try:
            if words[0] == "seed":
                seed = _seed(words[1:])
            else:
                faults.append(_fault(words))
        except ConfigError as error:
            raise ConfigError(f"chaos: {statement.strip()!r}: {error}") from None
    if not faults:
        raise ConfigError("chaos: there is no statement; write for example 'kill 2 @5s'")
    return Script(tuple(faults), seed)


@dataclass(frozen=True)
class FaultAction:
    """An action that is due. `missing`: it is impossible, because not all of its workers are alive."""

    action: str  # a key of TARGETS, or a value of LASTING
    targets: tuple[int, ...]
    duration: float | None = None
    missing: bool = False


class Chaos:
    """The schedule of the faults: call `due` at `next_due` or later. Times count from the start of the job."""

    def __init__(self, script: Script, seed: int) -> None:
        self.seed = seed if script.seed is None else script.seed
        self.faults = script.faults
        self._random = random.Random(self.seed)
        self._coming = [(fault.at, fault) for fault in script.faults]
        self._ends: list[tuple[float, FaultAction]] = []

    @property
    def next_due(self) -> float | None:
        times = [time for time, _ in self._coming] + [time for time, _ in self._ends if time < float("inf")]
        return min(times, default=None)

    def due(self, now: float, living: Collection[int]) -> list[FaultAction]:
        """Return the actions that are due, ends of earlier ones first; a repeated action that is overdue comes once."""
        events = [event for time, event in self._ends if time <= now and living_all(event, living)]
        self._ends = [(time, event) for time, event in self._ends if time > now]
        ready = sorted((entry for entry in self._coming if entry[0] <= now), key=lambda entry: entry[0])
        self._coming = [entry for entry in self._coming if entry[0] > now]
        for time, fault in ready:
            events.append(self._event(fault, now, living))
            if fault.every is not None:
                rounds = int((now - time) / fault.every) + 1
                self._coming.append((max(time + rounds * fault.every, now), fault))
        return events

    def stop(self, living: Collection[int]) -> list[FaultAction]:
        """Drop the schedule; return the actions that end what lasts."""
        events = [event for _, event in self._ends if living_all(event, living)]
        self._coming, self._ends = [], []
        return events

    def _event(self, fault: Fault, now: float, living: Collection[int]) -> FaultAction:
        count = TARGETS[fault.action]
        targets = fault.targets
        if targets is None:
            frozen = {number for _, event in self._ends if event.action == "resume" for number in event.targets}
            choice = sorted(set(living) - (frozen if fault.action == "freeze" else set()))
            if len(choice) < count:
                return FaultAction(fault.action, (), fault.duration, missing=True)
            targets = tuple(self._random.sample(choice, count))
        event = FaultAction(fault.action, targets, fault.duration)
        if not living_all(event, living):
            return FaultAction(fault.action, targets, fault.duration, missing=True)
        if fault.action in LASTING:
            # Without a duration the action ends with the job: a frozen process would not handle SIGTERM.
            end = float("inf") if fault.duration is None else now + fault.duration
            self._ends.append((end, FaultAction(LASTING[fault.action], targets)))
        return event


def living_all(event: FaultAction, living: Collection[int]) -> bool:
    return all(number in living for number in event.targets)


# --- the pieces of parse


def _fault(words: list[str]) -> Fault:
    action, targets, rest = _action(words)
    times = _times(rest)
    every, at, duration = times.get("every"), times.get("@"), times.get("for")
    if every is not None and every <= 0:
        raise ConfigError("'every 0s' would never end")
    if at is None and every is None:
        raise ConfigError("the time is missing: add '@5s' or 'every 5s'")
    if duration is not None and action not in LASTING:
        raise ConfigError(f"'{action}' does not last: leave out 'for'")
    start = at if at is not None else every
    assert start is not None
    return Fault(action, targets, start, every, duration)


def _action(words: list[str]) -> tuple[str, tuple[int, ...] | None, list[str]]:
    for action, count in TARGETS.items():
        name = action.split()
        if words[: len(name)] == name:
            rest = words[len(name) :]
            if count == 0:
                return action, (), rest
            if not rest or rest[0] in ("@", "every", "for"):
                raise ConfigError(f"'{action}' needs {'a worker' if count == 1 else 'two workers'}: {_example(action)}")
            return action, _targets(action, count, rest[0]), rest[1:]
    raise ConfigError(f"there is no {words[0]!r}; there are {', '.join(TARGETS)}")


def _targets(action: str, count: int, text: str) -> tuple[int, ...] | None:
    if text == "random":
        return None
    parts = text.split("-")
    if len(parts) != count or not all(_NUMBER.fullmatch(part) for part in parts):
        raise ConfigError(f"{text!r} does not name {'a worker' if count == 1 else 'two workers'}: {_example(action)}")
    targets = tuple(map(int, parts))
    if len(set(targets)) < count:
        raise ConfigError(f"{text!r} names one worker twice")
    return targets


def _example(action: str) -> str:
    target = "0-3" if TARGETS[action] == 2 else "2"
    return f"write for example '{action} {target} @5s' or '{action} random @5s'"


def _times(words: list[str]) -> dict[str, float]:
    times: dict[str, float] = {}
    while words:
        name, *words = words
        if name not in ("@", "every", "for"):
            raise ConfigError(f"{name!r} is not understood; after the worker come '@5s', 'every 5s', 'for 5s'")
        if name in times:
            raise ConfigError(f"{name!r} is given twice")
        if not words:
            raise ConfigError(f"after {name!r} a time is missing, such as 5s")
        text, *words = words
        found = _TIME.fullmatch(text)
        if found is None:
            raise ConfigError(f"{text!r} is not a time; write 5s, 0.5s, 500ms or 2min")
        times[name] = float(found[1]) * _UNITS[found[2]]
    return times


def _seed(words: list[str]) -> int:
    if len(words) != 1 or not _NUMBER.fullmatch(words[0]):
        raise ConfigError("a seed is one whole number of at most nine digits, as in 'seed 7'")
    return int(words[0])


def _seconds(value: float) -> str:
    return f"{Decimal(repr(value)).normalize():f}s"


BY_CHAOS = "was killed by chaos"


class FaultyJob(Protocol):
    """What fault injection needs of a job."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    def print_line(self, line: str) -> None: ...

    def add_worker(self) -> Worker | None: ...

    def inject(self, action: str, workers: Sequence[Worker]) -> str:
        """Carry out an action that needs the job's setup; return what was done."""


class FaultInjector:
    """Carries out the faults of a schedule on the workers of a job."""

    def __init__(self, chaos: Chaos, job: FaultyJob, began: float) -> None:
        self._chaos = chaos
        self._job = job
        self._began = began
        if any(fault.targets is None for fault in chaos.faults):
            job.print_line(f"chaos: the workers are chosen with seed {chaos.seed}")

    @property
    def next_due(self) -> float | None:
        due = self._chaos.next_due
        return None if due is None else self._began + due

    def make(self, now: float) -> None:
        for event in self._chaos.due(now - self._began, self._living()):
            self._job.print_line(f"chaos: {self._do(event)} at {now - self._began:.1f} s{_lasting(event)}")

    def stop(self) -> None:
        """End what lasts, without a message."""
        for event in self._chaos.stop(self._living()):
            self._do(event)

    def _living(self) -> list[int]:
        return [worker.number for worker in self._job.workers if worker.ending is None]

    def _do(self, event: FaultAction) -> str:
        if event.missing:
            return (
                f"found no {' and '.join(f'worker {number}' for number in event.targets) or 'worker'} to {event.action}"
            )
        by_number = {worker.number: worker for worker in self._job.workers}
        workers = [by_number[number] for number in event.targets]
        match event.action, workers:
            case "kill", [worker]:
                worker.kill(BY_CHAOS)
                return f"killed {worker}"
            case "freeze", [worker]:
                worker.pause()
                return f"froze {worker}"
            case "resume", [worker]:
                worker.resume()
                return f"resumed {worker}"
            case "join", []:
                added = self._job.add_worker()
                return f"started {added}" if added is not None else "started no worker, because all work is done"
        return self._job.inject(event.action, workers)


def _lasting(event: FaultAction) -> str:
    return f", for {event.duration:g} s" if event.duration is not None and not event.missing else ""
