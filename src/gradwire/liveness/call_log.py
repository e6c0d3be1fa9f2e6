"""The log of a group's calls on this rank. It finds calls on which ranks disagree, and is cheap enough to be always on.

Each group has one log. A call has a sequence number, a fingerprint of its meaning, and its place in the user's code.
The place is stored as (code object, instruction) and turned into file:line only for an error. `chain` combines all
fingerprints so far into one number: if two ranks have the same chain at a sequence number, they made the same calls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from gradwire.host import native_core

MAX_CALLS = 1024  # a peer whose last reported call is older is compared at its next report
CALLS_SHOWN = 32  # calls sent to the peers to explain a mismatch

# The folders whose code is not the user's. A framework that calls gradwire adds its own.
inside: tuple[str, ...] = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Call:
    """One call, as it is sent to other ranks. `items` are the entries of a named map."""

    sequence: int
    fingerprint: int
    what: str
    site: str
    items: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} at {self.site}"

    @classmethod
    def from_wire(cls, fields: object) -> Call:
        """Return a peer's call; raise ValueError if it is malformed."""
        match fields:
            case {
                "sequence": int(sequence),
                "fingerprint": int(fingerprint),
                "what": str(what),
                "site": str(site),
                "items": list(items),
            } if all(isinstance(item, str) for item in items):
                return cls(sequence, fingerprint, what, site, tuple(items))
        raise ValueError(f"malformed call {str(fields)[:200]}")


@dataclass(frozen=True, slots=True)
class CallDescription:
    """The meaning of a call, shared by all calls with the same arguments: its fingerprint and its text."""

    operation: str
    what: str
    fingerprint: int
    items: tuple[str, ...] = ()


class CallRing:
    """The latest calls. The Python version of the native class of the same name."""

    def __init__(self, kept: int) -> None:
        self.sequence = self.finished = self.chain = 0
        self._calls: list[tuple[int, int, Any, Any, int] | None] = [None] * kept

    def record(self, meaning: object, fingerprint: int, code: object, instruction: int) -> int:
        self.chain = ((self.chain ^ fingerprint) * 0x9E3779B97F4A7C15 + 1) & _MASK
        sequence = self.sequence + 1
        self._calls[sequence % len(self._calls)] = (sequence, self.chain, meaning, code, instruction)
        self.sequence = sequence
        return sequence

    def call(self, sequence: int) -> tuple[int, Any, Any, int] | None:
        entry = self._calls[sequence % len(self._calls)]
        return entry[1:] if entry is not None and entry[0] == sequence else None


class CallLog:
    """The latest calls of one group on this rank."""

    def __init__(self, group: int, members: Sequence[int]) -> None:
        self.group = group
        self.members = tuple(members)  # world ranks
        self.closed = False  # whether this rank closed the group
        self.ring = native_core.native.CallRing(MAX_CALLS) if native_core.available() else CallRing(MAX_CALLS)

    @property
    def sequence(self) -> int:
        """The number of the last call; 0 before the first one."""
        return self.ring.sequence

    @property
    def finished(self) -> int:
        """The number of the last call that has ended."""
        return self.ring.finished

    @finished.setter
    def finished(self, sequence: int) -> None:
        self.ring.finished = sequence

    def record(self, description: CallDescription, site: tuple[CodeType, int]) -> int:
        """Record a call and return its sequence number. The caller's ticket is being served."""
        return self.ring.record(description, description.fingerprint, *site)

    @property
    def chain(self) -> int:
        return self.ring.chain

    def chain_at(self, sequence: int) -> int | None:
        """Return the chain after the call with this number; None if the call is too old or was not made yet."""
        entry = self.ring.call(sequence)
        return entry[0] if entry is not None else None

    def call(self, sequence: int) -> Call | None:
        entry = self.ring.call(sequence)
        if entry is None:
            return None
        _, meaning, code, instruction = entry
        return Call(sequence, meaning.fingerprint, meaning.what, place(code, instruction), meaning.items)

    def last(self) -> Call | None:
        return self.call(self.sequence)

    def recent(self, until: int) -> list[Call]:
        """Return the last `CALLS_SHOWN` calls up to a sequence number, oldest first."""
        newest = min(until, self.sequence)
        calls = (self.call(sequence) for sequence in range(max(1, newest - CALLS_SHOWN + 1), newest + 1))
        return [call for call in calls if call is not None]


def call_site() -> tuple[CodeType, int]:
    """Return the place in the user's code: the innermost frame outside of gradwire and of frameworks that call it."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(inside) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def count_as_inside(path: str) -> None:
    """Treat the code in this folder, or file, as not the user's."""
    global inside
    beginning = path + os.sep if os.path.isdir(path) else path
    if beginning not in inside:
        inside = (*inside, beginning)


def place(code: CodeType, instruction: int) -> str:
    """Return the file:line of an instruction."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return f"{os.path.basename(code.co_filename)}:{line}"
