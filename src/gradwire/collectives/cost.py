"""Counts what a schedule costs: rounds with messages in them, and bytes, in units of the whole array."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from gradwire.collectives.schedule import Fold, From, Operation, Recv, Schedule, Send


@dataclass(frozen=True)
class Cost:
    """Bytes are fractions of the whole array (of one rank's input for all_to_all), all segments being equal."""

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
    """Every rank's bytes; looks at all programs."""
    whole = schedule.size if schedule.collective == "all_to_all" else schedule.segments
    programs = [schedule.program(rank) for rank in range(schedule.size)]
    busy = {i for program in programs for i, ops in enumerate(program) if any(map(_sent, ops))}
    sent = (sum(_sent(op) for ops in program for op in ops) for program in programs)
    received = (sum(_received(op) for ops in program for op in ops) for program in programs)
    return Cost(len(busy), tuple(Fraction(k, whole) for k in sent), tuple(Fraction(k, whole) for k in received))


def _sent(op: Operation) -> int:
    """In segments."""
    return op.slice.count * len(op.to) if isinstance(op, Send) else 0


def _received(op: Operation) -> int:
    match op:
        case Recv(piece):
            return piece.count
        case Fold(dst, terms):
            return dst.count * sum(isinstance(term, From) for term in terms)
    return 0
