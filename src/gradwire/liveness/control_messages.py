"""The control messages between ranks about the state of their generation, as types and as JSON.

JSON "t"   type             meaning
finding    FindingReport    a reason to break the generation; each receiver forwards it to all ranks
verdict    VerdictReport    the decision of a rank; ranks that have not decided yet adopt it
calls      CallsReport      the latest calls of a rank, to explain a mismatch
bye        Goodbye          a rank closed the generation or ended normally
at         Progress         the last call of a rank in a group, with its chain; receivers compare their own calls
where      PositionQuery    asks for the receiver's position in a group
here       Position         the answer
tell       GatherValue      a rank's value in a gather
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.liveness.call_log import CALLS_SHOWN, Call
from gradwire.liveness.verdict import MAX_TEXT, Finding
from gradwire.wire import parse_json

MAX_SEQUENCE = 1 << 63
KINDS = frozenset(("finding", "verdict", "calls", "bye", "at", "where", "here", "tell"))


@dataclass(frozen=True, slots=True)
class FindingReport:
    finding: Finding


@dataclass(frozen=True, slots=True)
class VerdictReport:
    finding: Finding


@dataclass(frozen=True, slots=True)
class CallsReport:
    group: int
    members: tuple[int, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Goodbye:
    pass


@dataclass(frozen=True, slots=True)
class Progress:
    group: int
    sequence: int
    chain: int


@dataclass(frozen=True, slots=True)
class PositionQuery:
    group: int


@dataclass(frozen=True, slots=True)
class Position:
    group: int
    sequence: int  # of the last call
    finished: int  # the last call that has ended
    last: str  # the text of the last call


@dataclass(frozen=True, slots=True)
class GatherValue:
    number: int
    operation: str
    value: Any


Message = FindingReport | VerdictReport | CallsReport | Goodbye | Progress | PositionQuery | Position | GatherValue


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return json.dumps(_fields(message), separators=(",", ":")).encode()


def _fields(message: Message) -> dict[str, Any]:
    match message:
        case FindingReport(finding):
            return {"t": "finding", "finding": finding.to_wire()}
        case VerdictReport(finding):
            return {"t": "verdict", "finding": finding.to_wire()}
        case CallsReport(group, members, calls):
            return {"t": "calls", "g": group, "among": members, "calls": [asdict(call) for call in calls]}
        case Goodbye():
            return {"t": "bye"}
        case Progress(group, sequence, chain):
            return {"t": "at", "g": group, "s": sequence, "c": chain}
        case PositionQuery(group):
            return {"t": "where", "g": group}
        case Position(group, sequence, finished, last):
            return {"t": "here", "g": group, "s": sequence, "f": finished, "last": last}
        case GatherValue(number, operation, value):
            return {"t": "tell", "n": number, "o": operation, "v": value}


def decode(payload: bytes, size: int) -> Message | None:
    """Return the message in these bytes, from a peer among `size` ranks; None for a type of a later version.

    Raise ValueError if it is malformed.
    """
    fields = parse_json(payload)
    match fields:
        case {"t": "finding", "finding": dict(finding)}:
            return FindingReport(Finding.from_wire(finding, size))
        case {"t": "verdict", "finding": dict(finding)}:
            return VerdictReport(Finding.from_wire(finding, size))
        case {"t": "calls", "g": int(group), "among": list(members), "calls": list(calls)}:
            shown = tuple(Call.from_wire(call) for call in calls[:CALLS_SHOWN])
            return CallsReport(group, _ranks(members, size), shown)
        case {"t": "bye"}:
            return Goodbye()
        case {"t": "at", "g": int(group), "s": int(sequence), "c": int(chain)} if 0 < sequence < MAX_SEQUENCE:
            return Progress(group, sequence, chain)
        case {"t": "where", "g": int(group)}:
            return PositionQuery(group)
        case {"t": "here", "g": int(group), "s": int(sequence), "f": int(finished), "last": str(last)}:
            return Position(group, sequence, finished, last[:MAX_TEXT])
        case {"t": "tell", "n": int(number), "o": str(operation), "v": value}:
            return GatherValue(number, operation, value)
        case {"t": str(kind)} if kind in KINDS:
            raise ValueError(f"malformed control message {str(fields)[:200]}")
        case _ if not isinstance(fields, dict):
            raise ValueError("a control message must be a JSON object")
    return None


def _ranks(members: Sequence[Any], size: int) -> tuple[int, ...]:
    known = {rank for rank in members[:size] if type(rank) is int and 0 <= rank < size}
    if len(known) != len(members):
        raise ValueError("a group whose ranks do not exist or appear twice")
    return tuple(members)
