"""History checker: reads the records of all workers of a job and decides whether they form one history. Pure.

Every worker appends a line to a file of its own when it begins a step and when that step is committed.
`broken_promises` looks at the lines of all workers together. It returns what must never happen, as sentences:

- two states for one committed step of a run,
- a committed step that the next one does not build on, or that nobody of the run has seen,
- a step that begins, and is committed, after the run has gone past it,
- one step that two generations have committed, or a later step that an older generation has committed,
- a worker, or a state, that moves from one run to another. (When no member with the last state is left, a coordinator
  begins the run that replaces the present one: only that one may begin with an earlier state of it.)

A worker may write its line late (it was stopped in between), so the time of a commit alone proves nothing. The time at
which the step began does: a step cannot be committed before every member has begun it.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradwire.identity import next_run

NOT_YET = "-"  # in place of the digest, in a line about a step that has only begun
SHOWN = 5  # sentences of one kind; the others are counted
REPLACEMENTS = 16  # runs in a row that may come to nothing before one of them leaves a record


@dataclass(frozen=True, slots=True)
class Record:
    """One line: a worker has begun a step, or knows that it is committed."""

    kind: Literal["begin", "commit"]
    run: str
    generation: int
    step: int
    digest: str  # of the state after the step
    parent: str  # of the state that the step began with
    member: str  # one process, for its life
    began: float  # seconds of a clock that all workers share
    time: float  # when the line was written

    def line(self) -> str:
        fields = (self.kind, self.run, self.generation, self.step, self.digest, self.parent, self.member)
        return " ".join([*map(str, fields), f"{self.began:.6f}", f"{self.time:.6f}"]) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Record:
        kind, run, generation, step, digest, parent, member, began, time = line.split()
        if kind not in ("begin", "commit"):
            raise ValueError(f"not a record: {line!r}")
        known: Literal["begin", "commit"] = "begin" if kind == "begin" else "commit"
        return cls(known, run, int(generation), int(step), digest, parent, member, float(began), float(time))


def read(folder: Path) -> list[Record]:
    """The records of all workers. A line without its end is the last one of a worker that was killed."""
    records = []
    for path in sorted(folder.glob("*.txt")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                records.append(Record.from_line(line))
    return records


def broken_promises(records: Iterable[Record]) -> list[str]:
    """What the records show that must never happen; nothing, if they are one history for each run."""
    by_run: dict[str, list[Record]] = {}
    for record in records:
        by_run.setdefault(record.run, []).append(record)
    by_run = dict(sorted(by_run.items(), key=lambda item: min(record.began for record in item[1])))
    found: list[str] = []
    for run, its in by_run.items():
        commits = [record for record in its if record.kind == "commit"]
        origin = _origin(run, by_run)
        rules = (
            *(_two_states(its), _unknown_steps(its), _bad_beginning(its, by_run.get(origin, ()))),
            *(_went_back(commits), _generations_mixed(commits), _begun_too_late(commits)),
        )
        for sentences in rules:
            found += _shortened(f"run {run}: {text}" for text in sentences)
    return found + _shortened(_moved_between_runs(by_run)) + _shortened(_states_of_two_runs(by_run))


def summary(records: Sequence[Record]) -> str:
    """How long the history is, for people."""
    commits = [record for record in records if record.kind == "commit"]
    runs = {record.run for record in commits}
    generations = {(record.run, record.generation) for record in commits}
    steps = {(record.run, record.step) for record in commits}
    members = {record.member for record in commits}
    return (
        f"{len(steps)} committed steps of {len(runs)} runs in {len(generations)} generations by {len(members)} workers"
    )


def _states(records: Iterable[Record]) -> dict[int, dict[str, list[str]]]:
    """By step: the digests of its state, each with the members that have seen it.

    A worker begins a step only when the one before is committed, so what it begins with counts as well.
    """
    states: dict[int, dict[str, list[str]]] = collections.defaultdict(dict)
    for record in records:
        if record.kind == "commit":
            states[record.step].setdefault(record.digest, []).append(record.member)
        if record.step > 0:
            states[record.step - 1].setdefault(record.parent, []).append(record.member)
    return states


def _two_states(records: Sequence[Record]) -> Iterator[str]:
    for step, digests in sorted(_states(records).items()):
        if len(digests) > 1:
            who = "; ".join(f"{digest} on {', '.join(sorted(set(them)))}" for digest, them in digests.items())
            yield f"step {step} was committed with {len(digests)} different states: {who}"


def _unknown_steps(records: Sequence[Record]) -> Iterator[str]:
    states = _states(records)
    missing = sorted(set(range(_base(records) + 1, max(states, default=-1) + 1)) - states.keys())
    if missing:
        listed = ", ".join(map(str, missing[:SHOWN]))
        yield f"{len(missing)} steps before step {max(states)} are not part of its history: {listed}"


def _base(records: Iterable[Record]) -> int:
    """The step that a run begins after; -1 unless it goes on from another one."""
    return min((record.step for record in records), default=0) - 1


def _origin(run: str, runs: Iterable[str]) -> str:
    """The last run with records that a run was begun in place of; empty if there is none."""
    later = {other: other for other in runs}
    for _ in range(REPLACEMENTS):
        later = {other: _replacement(its) for other, its in later.items()}
        for other, its in later.items():
            if its == run:
                return other
    return ""


def _replacement(run: str) -> str:
    """The run that a coordinator begins in place of this one."""
    try:
        return next_run(bytes.fromhex(run)).hex()
    except ValueError:  # a name that a coordinator would not give
        return ""


def _bad_beginning(records: Sequence[Record], origin: Sequence[Record]) -> Iterator[str]:
    base = _base(records)
    known = _states(origin).get(base, {})
    for state in {record.parent for record in records if record.step == base + 1} - known.keys() if base >= 0 else ():
        yield f"it begins with step {base + 1}, and with state {state}, which no run that it replaces had after {base}"


def _went_back(commits: Sequence[Record]) -> Iterator[str]:
    """The records of one member are in the order in which it wrote them."""
    last: dict[str, Record] = {}
    for record in commits:
        before = last.get(record.member)
        if before is not None and record.step <= before.step:
            yield f"{record.member} committed step {record.step} after step {before.step}"
        last[record.member] = record


def _generations_mixed(commits: Sequence[Record]) -> Iterator[str]:
    by_step: dict[int, set[int]] = collections.defaultdict(set)
    for record in commits:
        by_step[record.step].add(record.generation)
    newest, since = 0, -1
    for step, generations in sorted(by_step.items()):
        if len(generations) > 1:
            yield f"generations {', '.join(map(str, sorted(generations)))} have each committed step {step}"
        if min(generations) < newest:
            yield (
                f"generation {min(generations)} committed step {step}, and the newer generation {newest} "
                f"had committed step {since}"
            )
        if max(generations) > newest:
            newest, since = max(generations), step


def _begun_too_late(commits: Sequence[Record]) -> Iterator[str]:
    """A member that takes part in a commit has begun the step before any member knew of it, or of a later one."""
    first: dict[int, Record] = {}
    for record in commits:
        if record.step not in first or record.time < first[record.step].time:
            first[record.step] = record
    known = None
    earliest: dict[int, Record] = {}  # the first commit of a step or of any later one
    for step in sorted(first, reverse=True):
        known = earliest[step] = first[step] if known is None else min(first[step], known, key=lambda one: one.time)
    for record in commits:
        other = earliest[record.step]
        if other.time < record.began:
            yield (
                f"{record.member} began step {record.step} in generation {record.generation}, "
                f"{record.began - other.time:.3f} s after {other.member} had committed step {other.step} "
                f"in generation {other.generation}"
            )


def _moved_between_runs(by_run: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    runs: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for run, records in by_run.items():
        for record in records:
            if record.kind == "commit":
                runs[record.member][run] = None
    for member, those in runs.items():
        if any(_origin(later, [earlier]) != earlier for earlier, later in itertools.pairwise(those)):
            yield f"{member} has committed steps of {len(those)} runs: {', '.join(those)}"


def _states_of_two_runs(by_run: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    owner: dict[str, tuple[str, int]] = {}
    told = set()
    for run, records in by_run.items():
        origin, base = _origin(run, by_run), _base(records)
        for step, digests in _states(records).items():
            for digest in digests if not origin or step != base else ():
                other, its_step = owner.setdefault(digest, (run, step))
                if other != run and (other, run) not in told:
                    told.add((other, run))
                    yield f"run {run} holds at step {step} the state that run {other} had at step {its_step}"


def _shortened(sentences: Iterable[str]) -> list[str]:
    found = list(sentences)
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"… and {len(found) - SHOWN} more like that"]
