"""Counts the cost of a schedule: rounds with messages, and bytes in units of the whole array."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from gradwire.collectives.schedule import Fold, From, Operation, Recv, Schedule, Send


@dataclass(frozen=True)
class Cost:
    """The cost of a schedule, if all segments have equal length.

    Bytes are fractions of the whole array (for all_to_all, of one rank's input), by rank.
    """

    rounds: int
    sent: tuple[Fraction, ...]
    received: tuple[Fraction, ...]

    @property
    def most_sent(self) -> Fraction:
        return max(self.sent)

    @property
    def most_received(self) -> Fraction:
        return max(self.received)


def cost(schedule: Schedule) -> Cost:
    """Return the cost of a schedule. This builds the programs of all ranks."""
    whole = schedule.size if schedule.collective == "all_to_all" else schedule.segments
    programs = [schedule.program(rank) for rank in range(schedule.size)]
    busy = {i for program in programs for i, ops in enumerate(program) if any(map(_sent, ops))}
    sent = (sum(_sent(op) for ops in program for op in ops) for program in programs)
    received = (sum(_received(op) for ops in program for op in ops) for program in programs)
    return Cost(len(busy), tuple(Fraction(k, whole) for k in sent), tuple(Fraction(k, whole) for k in received))


def _sent(op: Operation) -> int:
    """Return how many segments an operation sends."""
    return op.slice.count * len(op.to) if isinstance(op, Send) else 0


def _received(op: Operation) -> int:
    """Return how many segments an operation receives."""
    match op:
        case Recv(piece):
            return piece.count
        case Fold(dst, terms):
            return dst.count * sum(isinstance(term, From) for term in terms)
    return 0
