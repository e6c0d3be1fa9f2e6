"""Defines properties that a schedule may claim besides being correct, and the rules that prove them.

The native executor's memory safety depends on these claims. They are therefore fields of a schedule, and the verifier
proves them. The rules are sufficient but not necessary: a schedule that violates a rule may not make the claim, even if
the claim is true.

**One shot.** An all-reduce of one segment in one exchange: every rank sends its whole input to every other rank, folds
all inputs in rank order, and then finishes the result. The executor may do the same without following the schedule.

**Mirrored.** The result has the same layout on all ranks, and the sender of a part of the result is the last reader of
the memory that the part is written to. Two optimisations depend on this:

- A sender writes a part of its result directly into the receiver's result.
- A rank continues with the next round while peers still read the memory that it has exposed to them.

The rules below suffice for the following reason. If a rank receives segment s from rank q, it has read the memory of s
before only to send it to q. So q had received that message, and there was no other reader, before q sent its own. And
no rank writes by itself to memory that it has sent in an earlier round, because a peer may still read that memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gradwire.collectives.schedule import Copy, Finish, Fold, From, Operation, Recv, Round, Schedule, Send, placement


class Objection(NamedTuple):
    """A place where a claim does not hold, with the reason."""

    rank: int
    round_number: int
    operation: Operation | None
    reason: str


def objections(schedule: Schedule) -> Iterator[Objection]:
    """Yield every violation of the claims of a schedule, which is otherwise assumed to be correct."""
    if schedule.one_shot:
        yield from _against_one_shot(schedule)
    if schedule.mirrored:
        yield from _against_mirrored(schedule)


# -- one shot ----------------------------------------------------------------------------------------------------------


def _against_one_shot(schedule: Schedule) -> Iterator[Objection]:
    if schedule.collective != "all_reduce" or schedule.segments != 1:
        yield Objection(0, 0, None, "it claims to be one shot, but only an all-reduce of one segment can be")
        return
    for rank in range(schedule.size):
        program = schedule.program(rank)
        for number, ops in enumerate(program):
            for op in ops:
                if not isinstance(op, Finish) and (number > 0 or not _fits_one_shot(op, rank, schedule.size)):
                    yield Objection(rank, number, op, "it claims to be one shot, but this operation does not fit")


def _fits_one_shot(op: Operation, rank: int, size: int) -> bool:
    """Return whether an operation sends this rank's whole input to all others, or folds all inputs in rank order."""
    match op:
        case Send(piece, to):
            return piece.buffer == "in" and sorted(to) == [other for other in range(size) if other != rank]
        case Fold(_, terms):
            return len(terms) == size and all(
                term.rank == place != rank if isinstance(term, From) else (place == rank and term.buffer == "in")
                for place, term in enumerate(terms)
            )
    return False


# -- mirrored ----------------------------------------------------------------------------------------------------------


def _against_mirrored(schedule: Schedule) -> Iterator[Objection]:
    if schedule.separate_acc:
        yield Objection(0, 0, None, "it claims to be mirrored, but needs a separate acc")
    all_segments, result_messages = tuple(range(schedule.segments)), _messages_of_results(schedule)
    for rank in range(schedule.size):
        _, outputs = placement(schedule.collective, schedule.size, schedule.segments, schedule.root, rank)
        if outputs != all_segments:
            yield Objection(rank, 0, None, "it claims to be mirrored, but does not end with all segments")
        accesses = _Accesses()
        for number, ops in enumerate(schedule.program(rank)):
            for op in ops:
                reason = accesses.against(op) or _against_message(op, rank, result_messages[number])
                if reason:
                    yield Objection(rank, number, op, f"it claims to be mirrored, but {reason}")
            accesses.add_round(ops)


class _Accesses:
    """One rank's accesses to its segments in earlier rounds. `in`, `out` and `acc` of a segment share memory."""

    def __init__(self) -> None:
        self.used: set[int] = set()  # segments that this rank's own operations have written, or that it received
        self.sent: dict[int, set[int]] = {}  # by segment, the ranks that it was sent to

    def against(self, op: Operation) -> str:
        """Return why an operation may write memory that a peer or this rank still reads; empty if it cannot."""
        match op:
            case Recv(dst, source):
                for segment in dst.segments:
                    if segment in self.used or self.sent.get(segment, {source}) != {source}:
                        return f"rank {source} is not the only rank that had to read segment {segment}"
            case Fold(dst) | Finish(dst) | Copy(dst):
                for segment in dst.segments:
                    if segment in self.sent:
                        return f"ranks that segment {segment} was sent to may still read it"
        return ""

    def add_round(self, ops: Round) -> None:
        for op in ops:
            match op:
                case Send(piece, to):
                    for segment in piece.segments:
                        self.sent.setdefault(segment, set()).update(to)
                case Recv(dst) | Fold(dst) | Finish(dst) | Copy(dst):
                    self.used.update(dst.segments)


def _messages_of_results(schedule: Schedule) -> list[set[tuple[int, int]]]:
    """Return, by round, the pairs (sender, receiver) of messages that may be a part of the sender's result."""
    found: list[set[tuple[int, int]]] = [set() for _ in range(schedule.rounds)]
    for rank in range(schedule.size):
        for pairs, ops in zip(found, schedule.program(rank), strict=True):
            for op in ops:
                if isinstance(op, Send) and op.slice.buffer != "in":
                    pairs.update((rank, to) for to in op.to)
    return found


def _against_message(op: Operation, rank: int, result_messages: set[tuple[int, int]]) -> str:
    """Return why a message must not be written directly into its receiver's result; empty if it may be."""
    match op:
        case Send(piece):
            if piece.buffer == "acc":
                return "a partial result is sent, which may be in the memory of the result"
        case Recv(dst):
            if dst.buffer != "out":
                return "it receives a message that is not a part of the result"
        case Fold(_, terms):
            for term in terms:
                if isinstance(term, From) and (term.rank, rank) in result_messages:
                    return f"it folds a message of rank {term.rank} that may be a part of the result"
    return ""
