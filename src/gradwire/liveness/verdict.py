"""Decides what broke a generation, in the same way on all ranks. It does no I/O and reads no clock.

Findings of this rank and of its peers go in, and one error comes out. The first finding opens a short window in which
more may arrive: several ranks may die at once, and a rank that aborts also closes its links. Then the most severe
finding wins; among equals, the one that names the lowest rank. A mismatch waits longer, for the calls of all ranks,
because the error shows them. A rank that has decided sends its verdict to the others, and ranks that have not decided
yet adopt it. Otherwise a slower rank could take a rank that raised its error and exited for one more loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.errors import Aborted, Broken, CollectiveMismatch, GroupTimeout, PeerLost
from gradwire.liveness.call_log import Call, CallLog
from gradwire.topology import rank_ranges

DECISION_SECONDS = 0.03  # from the first finding to the verdict
CALLS_SECONDS = 4.0  # the same for a mismatch, at most
MAX_TEXT = 4096
MAX_ROWS = 8  # ranks up to which a mismatch shows each of them in a row of its own
MAX_FINDINGS = 256  # findings considered before the verdict; later ones are dropped

_SEVERITY = {"mismatch": 0, "aborted": 1, "given up": 1, "lost": 2, "timeout": 3}
_ERRORS: dict[str, type[Broken]] = {
    "mismatch": CollectiveMismatch,
    "aborted": Aborted,
    "given up": Aborted,  # on the rank that its peers declared lost
    "lost": PeerLost,
    "timeout": GroupTimeout,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One rank's reason to break the generation. `group` and `sequence` name the disputed call of a mismatch."""

    kind: str
    reason: str
    culprit: int | None = None
    seconds: float | None = None
    operation: str | None = None
    group: int = 0
    sequence: int = 0

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any], size: int) -> Finding:
        """Return a peer's finding; raise ValueError if it is malformed."""
        try:
            finding = cls(**fields)
        except TypeError as error:
            raise ValueError(f"malformed finding {str(fields)[:200]}") from error
        culprit = finding.culprit
        well_formed = (
            isinstance(finding.kind, str)
            and finding.kind in _SEVERITY
            and isinstance(finding.reason, str)
            and len(finding.reason) <= MAX_TEXT
            and (culprit is None or (type(culprit) is int and 0 <= culprit < size))
            and type(finding.group) is int
            and type(finding.sequence) is int
            and (finding.operation is None or (isinstance(finding.operation, str) and len(finding.operation) < 200))
            and (finding.seconds is None or isinstance(finding.seconds, (int, float)))
        )
        if not well_formed:
            raise ValueError(f"malformed finding {str(fields)[:200]}")
        return finding


def disagreement(calls: CallLog, sequence: int, reason: str = "ranks called different things") -> Finding:
    """Return the finding that ranks of a group made different calls, at this sequence number or before it."""
    last = calls.last()
    operation = last.what.partition("(")[0] if last else None
    return Finding("mismatch", reason[:MAX_TEXT], None, None, operation, calls.group, sequence)


class Verdict:
    """Collects the findings of this rank and its peers, and decides on one of them."""

    def __init__(self, size: int, generation: int) -> None:
        self._size = size
        self._generation = generation
        self._findings: list[Finding] = []
        self._since: float | None = None
        self._left: dict[int, float] = {}
        self._calls: dict[int, dict[int, tuple[Call, ...]]] = {}  # by group and rank
        self._members: dict[int, tuple[int, ...]] = {}  # of disputed groups
        self.decided: Finding | None = None
        self.detail = ""

    @property
    def open(self) -> bool:
        """Whether there are findings but no decision yet."""
        return self._since is not None and self.decided is None

    @property
    def since(self) -> float:
        """The time of the first finding."""
        return self._since if self._since is not None else math.inf

    @property
    def findings(self) -> Sequence[Finding]:
        return tuple(self._findings)

    @property
    def intact(self) -> bool:
        return self._since is None

    def add(self, finding: Finding, now: float) -> bool:
        """Add a finding; True if it is new, so that the peers should get it."""
        if self.decided is not None or finding in self._findings or len(self._findings) >= MAX_FINDINGS:
            return False
        if self._since is None:
            self._since = now
        self._findings.append(finding)
        return True

    def adopt(self, finding: Finding, now: float) -> bool:
        """Adopt the decision of a peer; False if this rank has decided already."""
        if self.decided is not None:
            return False
        if self._since is None:
            self._since = now
        self.decided = finding
        return True

    def mark_left(self, rank: int, now: float) -> None:
        """Note that a rank said goodbye. The end of its links is then no loss."""
        self._left.setdefault(rank, now)

    def left_at(self, rank: int) -> float | None:
        """Return the time of a rank's goodbye, or None."""
        return self._left.get(rank)

    def dispute(self) -> Finding | None:
        """Return the earliest mismatch found so far, for which ranks send their calls; or None."""
        disputes = [finding for finding in self._findings if finding.kind == "mismatch"]
        return min(disputes, key=self._severity, default=None)

    def add_calls(self, group: int, members: Sequence[int], rank: int, calls: Sequence[Call]) -> None:
        """Add the calls of a rank in a disputed group with these members."""
        self._members[group] = tuple(members)
        self._calls.setdefault(group, {})[rank] = tuple(calls)

    def due(self) -> float | None:
        """Return the latest time for the next call of `decide`; None if there is nothing to decide."""
        if self._since is None or self.decided is not None:
            return None
        return self._since + (CALLS_SECONDS if self.dispute() is not None else DECISION_SECONDS)

    def decide(self, now: float) -> bool:
        """Decide if the time has come or all calls are known. Return whether there is a decision."""
        if self.decided is not None:
            return True
        due = self.due()
        if due is None:
            return False
        if now < due and not self._all_calls_known():
            return False
        self.decided = min(self._findings, key=self._severity)
        if self.decided.kind == "mismatch":
            self._explain(self.decided)
        return True

    def _all_calls_known(self) -> bool:
        """Whether there is a mismatch, and all ranks that can send their calls have done so."""
        dispute = self.dispute()
        if dispute is None:
            return False
        lost = {finding.culprit for finding in self._findings if finding.kind == "lost"}
        known = set(self._calls.get(dispute.group, ())) | set(self._left) | lost
        return known >= set(self._members.get(dispute.group, range(self._size)))

    @staticmethod
    def _severity(finding: Finding) -> tuple[int, int, int, int, str]:
        """Return a sort key; the smallest is the most severe. It does not depend on the order of arrival."""
        culprit = finding.culprit if finding.culprit is not None else 1 << 31
        return _SEVERITY[finding.kind], finding.sequence, finding.group, culprit, finding.reason

    def _explain(self, finding: Finding) -> None:
        """Find the first call on which ranks differ, and describe each rank's call there."""
        reported = self._calls.get(finding.group, {})
        by_rank = {rank: {call.sequence: call for call in calls} for rank, calls in reported.items()}
        difference = _first_difference(by_rank)
        sequence = difference or finding.sequence
        at = {rank: calls.get(sequence) for rank, calls in by_rank.items()}
        rows = {}
        for rank in self._members.get(finding.group, sorted(at)):
            call = at.get(rank)
            newest = max(by_rank.get(rank, {}).values(), key=lambda c: c.sequence, default=None)
            if call is not None:
                rows[rank] = str(call)
            elif newest is not None:
                rows[rank] = f"has not reached this call; its last call was {newest}"
            elif rank in by_rank:
                rows[rank] = "has not called anything in this group"
            else:
                rows[rank] = "has not reported its calls"
        known = {rank: call for rank, call in at.items() if call is not None}
        differing = _outside_majority(known)
        culprit = min(differing, default=None)
        self.decided = Finding("mismatch", finding.reason, culprit, None, finding.operation, finding.group, sequence)
        why = _item_difference(known) if difference else f": {finding.reason}"
        self.detail = f"ranks disagree on call #{sequence}{why}\n" + "\n".join(_table(rows, differing))

    def error(self, *, operation: str | None, during: str, who: str) -> Broken:
        """Return the error to raise on this rank.

        `during` names the call that this rank was in. `who` is the full name of the culprit.
        """
        finding = self.decided
        assert finding is not None
        if finding.kind == "mismatch":
            text = self.detail or finding.reason
        elif finding.kind in ("lost", "given up"):
            text = f"{who} {finding.reason}{during}"
        elif finding.kind == "aborted":
            text = f"{who} gave up: {finding.reason}" if finding.culprit is not None else finding.reason
        else:
            text = finding.reason
        return _ERRORS[finding.kind](
            text,
            culprit=finding.culprit,
            operation=operation or finding.operation,
            generation=self._generation,
            seconds=finding.seconds,
        )


def _first_difference(by_rank: Mapping[int, Mapping[int, Call]]) -> int | None:
    sequences = sorted({sequence for calls in by_rank.values() for sequence in calls})
    for sequence in sequences:
        prints = {calls[sequence].fingerprint for calls in by_rank.values() if sequence in calls}
        if len(prints) > 1:
            return sequence
    return None


def _outside_majority(calls: Mapping[int, Call]) -> set[int]:
    """Return the ranks whose call is not the one that most ranks made; none if two calls are equally frequent."""
    agreeing: dict[int, list[int]] = {}
    for rank, call in calls.items():
        agreeing.setdefault(call.fingerprint, []).append(rank)
    sizes = sorted((len(ranks) for ranks in agreeing.values()), reverse=True)
    if len(sizes) < 2 or sizes[0] == sizes[1]:
        return set()
    majority = max(agreeing.values(), key=len)
    return {rank for rank in calls if rank not in majority}


def _table(rows: Mapping[int, str], differing: Collection[int]) -> Iterator[str]:
    """Yield a line for each rank, or for ranks with equal rows if there are many; mark those of `differing` ranks."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, row in rows.items():
        groups.setdefault((row, rank in differing, rank if len(rows) <= MAX_ROWS else None), []).append(rank)
    names = [f"rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}:" for ranks in groups.values()]
    width = min(max(map(len, names), default=0), 30)
    for name, ranks in zip(names, groups.values(), strict=True):
        mark = "  <-- differs" if ranks[0] in differing else ""
        yield f"  {name.ljust(width)} {rows[ranks[0]]}{mark}"


def _item_difference(calls: Mapping[int, Call]) -> str:
    """Return a text that names the first entry in which named maps differ."""
    with_items = {rank: call for rank, call in calls.items() if call.items}
    if len(with_items) < 2:
        return ""
    first_rank, first = min(with_items.items())
    for rank, call in sorted(with_items.items()):
        differing = sorted(set(first.items) ^ set(call.items))
        if differing:
            holder = first_rank if differing[0] in first.items else rank
            return f": {differing[0]} is in the map of rank {holder}, not of rank {rank + first_rank - holder}"
    return ""
