"""Properties that a schedule may state beyond being correct, and the rules that prove them.

The native executor's memory safety depends on these claims, so they are fields of a schedule and proved like the rest
of it. The rules are sufficient, not necessary: a schedule that breaks one is refused the claim, whatever else it does.

**One shot.** An all-reduce of one segment in one exchange: every rank sends its whole input to every other rank and
folds all inputs in the order of ranks; only the finishing follows. The executor may do the same without the schedule.

**Mirrored.** All ranks' results lie alike, and the sender of a part of the result is the last reader of the place where
it goes. Two shortcuts depend on that. A sender writes a part of its result straight into the receiver's. And a rank
goes on to the next round while peers still read what it has exposed to them. Why the rules below suffice: where a rank
receives segment s from rank q, it has read that place before only to send it to q. So q had taken that message,
and all readers were done, before q sent its own. And no rank writes a place by itself that it has sent in an earlier
round, which a peer may still read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gradwire.collectives.schedule import Copy, Finish, Fold, From, Operation, Recv, Round, Schedule, Send, placement


class Objection(NamedTuple):
    """Where a claim does not hold, and why."""

    rank: int
    round_number: int
    operation: Operation | None
    reason: str


def objections(schedule: Schedule) -> Iterator[Objection]:
    """Everything that speaks against what a schedule claims; that it is right otherwise is taken for granted."""
    if schedule.one_shot:
        yield from _against_one_shot(schedule)
    if schedule.mirrored:
        yield from _against_mirrored(schedule)


# -- one shot ----------------------------------------------------------------------------------------------------------


def _against_one_shot(schedule: Schedule) -> Iterator[Objection]:
    if schedule.collective != "all_reduce" or schedule.segments != 1:
        yield Objection(0, 0, None, "it claims to be one shot: only an all-reduce of one segment can be")
        return
    for rank in range(schedule.size):
        program = schedule.program(rank)
        for number, ops in enumerate(program):
            for op in ops:
                if not isinstance(op, Finish) and (number > 0 or not _is_shot(op, rank, schedule.size)):
                    yield Objection(rank, number, op, "it claims to be one shot, and does something else")


def _is_shot(op: Operation, rank: int, size: int) -> bool:
    """Whether an operation sends this rank's whole input to all others, or folds all inputs in the order of ranks."""
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
        yield Objection(0, 0, None, "it claims to be mirrored, and needs acc apart")
    everything, handing_out = tuple(range(schedule.segments)), _messages_of_results(schedule)
    for rank in range(schedule.size):
        _, owed = placement(schedule.collective, schedule.size, schedule.segments, schedule.root, rank)
        if owed != everything:
            yield Objection(rank, 0, None, "it claims to be mirrored, and does not end with all segments")
        places = _Places()
        for number, ops in enumerate(schedule.program(rank)):
            for op in ops:
                reason = places.against(op) or _against_message(op, rank, handing_out[number])
                if reason:
                    yield Objection(rank, number, op, f"it claims to be mirrored: {reason}")
            places.pass_round(ops)


class _Places:
    """What one rank has done with the places of its segments in earlier rounds; `in`, `out` and `acc` are one place."""

    def __init__(self) -> None:
        self.used: set[int] = set()  # read or written by this rank's own operations, or received
        self.sent: dict[int, set[int]] = {}  # to whom

    def against(self, op: Operation) -> str:
        """Why an operation may touch what a peer still reads, or what this rank does."""
        match op:
            case Recv(dst, source):
                for segment in dst.segments:
                    if segment in self.used or self.sent.get(segment, {source}) != {source}:
                        return f"rank {source} is not the only one that had to read segment {segment}"
            case Fold(dst) | Finish(dst) | Copy(dst):
                for segment in dst.segments:
                    if segment in self.sent:
                        return f"ranks that segment {segment} was sent to may still read it"
        return ""

    def pass_round(self, ops: Round) -> None:
        for op in ops:
            match op:
                case Send(piece, to):
                    for segment in piece.segments:
                        self.sent.setdefault(segment, set()).update(to)
                case Recv(dst) | Fold(dst) | Finish(dst) | Copy(dst):
                    self.used.update(dst.segments)


def _messages_of_results(schedule: Schedule) -> list[set[tuple[int, int]]]:
    """By round, the pairs of ranks of which the first sends the second something that may be a part of its result."""
    found: list[set[tuple[int, int]]] = [set() for _ in range(schedule.rounds)]
    for rank in range(schedule.size):
        for pairs, ops in zip(found, schedule.program(rank), strict=True):
            for op in ops:
                if isinstance(op, Send) and op.slice.buffer != "in":
                    pairs.update((rank, to) for to in op.to)
    return found


def _against_message(op: Operation, rank: int, handing_out: set[tuple[int, int]]) -> str:
    """Why a message may not be written straight into its receiver's result."""
    match op:
        case Send(piece):
            if piece.buffer == "acc":
                return "a partial result is sent, which may lie where the result does"
        case Recv(dst):
            if dst.buffer != "out":
                return "it receives something that is no part of the result"
        case Fold(_, terms):
            for term in terms:
                if isinstance(term, From) and (term.rank, rank) in handing_out:
                    return f"rank {term.rank} sends a part of the result, which is folded here"
    return ""
