"""Makes wrong schedules from correct ones: one operation is removed, doubled, reordered or redirected.

Every mutation here is wrong, for the reason given where it is made. Mutations that give another correct schedule (two
independent operations in the other order, a later copy) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gradwire.collectives import (
    REDUCING,
    Buffer,
    Copy,
    Finish,
    Fold,
    From,
    Operation,
    Program,
    Recv,
    Round,
    Schedule,
    Send,
    Slice,
)

Mutant = tuple[str, Schedule]

UNLIKE = frozenset({"reduce", "reduce_scatter", "gather", "scatter", "all_to_all"})
"""Collectives whose results differ from rank to rank, so that no schedule of them is mirrored."""
PARTIAL = frozenset({("all_reduce", name) for name in ("ring", "halving", "tree", "hierarchical", "oneshot")})
"""All-reduces that, with more than 3 ranks, send partial results or fold while their inputs are still being read."""


def mutants(schedule: Schedule) -> Iterator[Mutant]:
    """Return all mutations of a schedule, each with a description."""
    for rank in range(schedule.size):
        for number, ops in enumerate(schedule.program(rank)):
            for i, op in enumerate(ops):
                spot = _Spot(schedule, rank, number, i)
                for what, changed in _single(spot, op):
                    yield f"rank {rank}, round {number}, {op}: {what}", changed
            yield from _swapped_messages(schedule, rank, number)
    yield from _repeated_rounds(schedule)
    yield from false_claims(schedule)


class _Spot:
    """The position of an operation in a schedule."""

    def __init__(self, schedule: Schedule, rank: int, number: int, index: int) -> None:
        self.schedule, self.rank, self.number, self.index = schedule, rank, number, index

    def replaced(self, *ops: Operation) -> Schedule:
        program = list(self.schedule.program(self.rank))
        old = program[self.number]
        program[self.number] = (*old[: self.index], *ops, *old[self.index + 1 :])
        return with_program(self.schedule, self.rank, tuple(program))

    def moved(self, number: int) -> Schedule:
        program = list(self.schedule.program(self.rank))
        op = program[self.number][self.index]
        program[self.number] = tuple(o for i, o in enumerate(program[self.number]) if i != self.index)
        program[number] = (*program[number], op)
        return with_program(self.schedule, self.rank, tuple(program))


def with_program(schedule: Schedule, rank: int, program: Program) -> Schedule:
    programs = {r: schedule.program(r) for r in range(schedule.size)} | {rank: program}
    return with_programs(schedule, [programs[r] for r in range(schedule.size)])


def with_programs(schedule: Schedule, programs: list[Program]) -> Schedule:
    changed = replace(schedule.phase, ranks=range(schedule.size), rounds=len(programs[0]), make=programs.__getitem__)
    return replace(schedule, phase=changed)


def claiming(schedule: Schedule, *, one_shot: bool = False, mirrored: bool = False) -> Schedule:
    """Return the same schedule with other claims about itself."""
    return replace(schedule, phase=replace(schedule.phase, one_shot=one_shot, mirrored=mirrored))


def false_claims(schedule: Schedule) -> Iterator[Mutant]:
    """Return correct schedules with false claims that the native executor would rely on."""
    kind = schedule.collective, schedule.algorithm
    if kind != ("all_reduce", "oneshot") and schedule.size > 1:
        yield "claims to be one shot", claiming(schedule, one_shot=True)
    if schedule.size > 1 and (schedule.collective in UNLIKE or (kind in PARTIAL and schedule.size > 3)):
        yield "claims to be mirrored", claiming(schedule, mirrored=True)


def _single(spot: _Spot, op: Operation) -> Iterator[Mutant]:
    yield "removed", spot.replaced()
    yield "doubled", spot.replaced(op, op)
    for number in range(len(spot.schedule.program(spot.rank))):
        if number != spot.number and _must_not_move(spot, op, number):
            yield f"moved to round {number}", spot.moved(number)
    for what, changed in _redirections(spot, op):
        yield what, spot.replaced(changed)


def _must_not_move(spot: _Spot, op: Operation, to: int) -> bool:
    """Whether moving an operation to another round makes the schedule wrong.

    The other end of a message stays in its round. A result must be finished after it is folded and before it is used.
    """
    program = spot.schedule.program(spot.rank)
    match op:
        case Send() | Recv():
            return True
        case Fold(terms=terms) if any(isinstance(term, From) for term in terms):
            return True
        case Finish(dst, src):
            return _is_before(program, src, to) or _is_after(program, dst, to)
        case Fold(dst):
            return _is_after(program, dst, to)
    return False


def _is_before(program: Program, piece: Slice, number: int) -> bool:
    """Whether a round comes no later than the last one that writes some of a slice."""
    return any(isinstance(op, Fold | Recv) and _meet(_target(op), piece) for ops in program[number:] for op in ops)


def _is_after(program: Program, piece: Slice, number: int) -> bool:
    """Whether a round comes no earlier than the first one that reads some of a slice."""
    return any(_meet(src, piece) for ops in program[: number + 1] for op in ops if (src := _source(op)) is not None)


def _target(op: Fold | Recv) -> Slice:
    return op.dst if isinstance(op, Fold) else op.slice


def _source(op: Operation) -> Slice | None:
    match op:
        case Send(src) | Finish(src=src) | Copy(src=src):
            return src
    return None


def _meet(one: Slice, other: Slice) -> bool:
    return one.buffer == other.buffer and not set(one.segments).isdisjoint(other.segments)


def _redirections(spot: _Spot, op: Operation) -> Iterator[tuple[str, Operation]]:
    match op:
        case Send(piece, to):
            for i in range(len(to)):
                for rank in range(spot.schedule.size):
                    if rank not in to:  # the new receiver does not expect the message, and the old one still does
                        yield f"to {rank}", Send(piece, (*to[:i], rank, *to[i + 1 :]))
            for other in _other_segments(piece):  # the receiver expects the old segments
                yield f"of {other}", Send(other, to)
            for buffer in _wrong_sources(spot.schedule, piece):
                yield f"from {buffer}", Send(replace(piece, buffer=buffer), to)
        case Recv(piece, source):
            for rank in set(range(spot.schedule.size)) - {source}:
                yield f"from {rank}", Recv(piece, rank)
            for other in _other_segments(piece):
                yield f"into {other}", Recv(other, source)
            for buffer in _others(piece.buffer):  # the result is missing, or is of another type
                yield f"into {buffer}", Recv(replace(piece, buffer=buffer), source)
        case Copy(dst, src):
            yield from _redirected_move(Copy, dst, src)
        case Finish(dst, src):
            yield from _redirected_move(Finish, dst, src)
        case Fold(dst, terms):
            yield from _redirected_fold(spot, dst, terms)


def _redirected_move(kind: type[Copy] | type[Finish], dst: Slice, src: Slice) -> Iterator[tuple[str, Operation]]:
    for other in _other_segments(dst):
        yield f"into {other}", kind(other, src)
        # No other operation writes the old segments: the verifier does not allow values that are written in vain.
        yield f"of {other}", kind(other, replace(other, buffer=src.buffer))
    for other in _other_segments(src):
        yield f"from {other}", kind(dst, other)
    for buffer in _others(dst.buffer):
        yield f"into {buffer}", kind(replace(dst, buffer=buffer), src)
    for buffer in _others(src.buffer):
        yield f"from {buffer}", kind(dst, replace(src, buffer=buffer))


def _redirected_fold(spot: _Spot, dst: Slice, terms: tuple[Slice | From, ...]) -> Iterator[tuple[str, Operation]]:
    for other in _other_segments(dst):
        yield f"into {other}", Fold(other, terms)
    for buffer in _others("acc"):
        yield f"into {buffer}", Fold(replace(dst, buffer=buffer), terms)
    for i, term in enumerate(terms):
        before, after = terms[:i], terms[i + 1 :]
        yield f"without {term}", Fold(dst, (*before, *after))
        yield f"with {term} twice", Fold(dst, (*before, term, term, *after))
        for changed in _redirected_term(spot, term):
            yield f"{changed} for {term}", Fold(dst, (*before, changed, *after))
    if spot.schedule.algorithm == "oneshot" and len(terms) > 1:  # all ranks must fold in the same order
        yield "in another order", Fold(dst, terms[::-1])


def _redirected_term(spot: _Spot, term: Slice | From) -> Iterator[Slice | From]:
    if isinstance(term, Slice):
        yield from _other_segments(term)
        yield from (replace(term, buffer=buffer) for buffer in _others(term.buffer))
        return
    yield replace(term, partial=not term.partial)
    yield from (replace(term, rank=rank) for rank in range(spot.schedule.size) if rank != term.rank)


def _wrong_sources(schedule: Schedule, piece: Slice) -> Iterator[Buffer]:
    """Return the buffers from which sending would be wrong.

    In a collective that does not reduce, `in` and `out` may hold the same data, so that both are correct.
    """
    for buffer in _others(piece.buffer):
        if schedule.collective in REDUCING or "acc" in (buffer, piece.buffer):
            yield buffer


def _other_segments(piece: Slice) -> list[Slice]:
    others = [replace(piece, first=piece.first + 1), replace(piece, first=piece.first - 1)]
    others.append(replace(piece, count=piece.count + 1))
    return [*others, replace(piece, count=piece.count - 1)]


def _others(buffer: Buffer) -> list[Buffer]:
    buffers: tuple[Buffer, ...] = ("in", "out", "acc")
    return [other for other in buffers if other != buffer]


def _swapped_messages(schedule: Schedule, rank: int, number: int) -> Iterator[Mutant]:
    """Swap two messages to or from one rank in a round."""
    program = schedule.program(rank)
    ops = program[number]
    for i, first in enumerate(ops):
        for j in range(i + 1, len(ops)):
            second = ops[j]
            if isinstance(first, Send) and isinstance(second, Send) and set(first.to) & set(second.to):
                pass
            elif not (isinstance(first, Recv) and isinstance(second, Recv) and first.source == second.source):
                continue
            swapped: Round = (*ops[:i], second, *ops[i + 1 : j], first, *ops[j + 1 :])
            what = f"rank {rank}, round {number}: {first} and {second} swapped"
            yield what, with_program(schedule, rank, (*program[:number], swapped, *program[number + 1 :]))


def _repeated_rounds(schedule: Schedule) -> Iterator[Mutant]:
    """Repeat a round on all ranks: its values are written in vain or folded twice."""
    programs = [schedule.program(rank) for rank in range(schedule.size)]
    for number in range(schedule.rounds):
        if any(program[number] for program in programs):
            repeated = [(*p[: number + 1], p[number], *p[number + 1 :]) for p in programs]
            yield f"round {number} twice", with_programs(schedule, repeated)
