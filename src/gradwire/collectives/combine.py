"""Combines phases of schedules: with renamed ranks and segments, one after the other, or at the same time.

A combined phase does not inherit the claims (`one_shot`, `mirrored`) of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from gradwire.collectives.schedule import (
    Buffer,
    Copy,
    Finish,
    Fold,
    From,
    Operation,
    Phase,
    Program,
    Recv,
    Round,
    Send,
    Slice,
    Term,
)
from gradwire.errors import InvalidSize


def relabel(
    phase: Phase,
    *,
    ranks: Sequence[int] | None = None,
    bounds: Sequence[int] | None = None,
    segments: int | None = None,
    buffers: Mapping[Buffer, Buffer] | None = None,
) -> Phase:
    """Return the same phase with other ranks, segments and buffers.

    Rank i becomes ranks[i]. Segment i becomes the segments bounds[i] … bounds[i + 1] - 1 of `segments` segments. These
    runs are adjacent, so a slice stays a slice. Buffers that are not in `buffers` stay the same. Operations that would
    copy a slice onto itself are removed.
    """
    labels = _Labels(ranks, bounds, buffers or {})
    members: Collection[int] = phase.ranks
    index: Mapping[int, int] | None = None
    if ranks is not None:
        members = index = {ranks[i]: i for i in phase.ranks}

    def make(rank: int) -> Program:
        program = phase.make(rank if index is None else index[rank])
        return tuple(tuple(op for old in ops if (op := labels.operation(old)) is not None) for ops in program)

    return Phase(members, segments or phase.segments, phase.rounds, make, phase.separate_acc)


class _Labels:
    def __init__(
        self, ranks: Sequence[int] | None, bounds: Sequence[int] | None, buffers: Mapping[Buffer, Buffer]
    ) -> None:
        self.ranks, self.bounds, self.buffers = ranks, bounds, buffers

    def operation(self, op: Operation) -> Operation | None:
        match op:
            case Send(piece, to):
                return Send(self.slice(piece), tuple(map(self.rank, to)))
            case Recv(piece, source):
                return Recv(self.slice(piece), self.rank(source))
            case Fold(dst, terms):
                fold = Fold(self.slice(dst), tuple(map(self.term, terms)))
                return None if fold.terms == (fold.dst,) else fold
            case Finish(dst, src):
                return Finish(self.slice(dst), self.slice(src))
            case Copy(dst, src):
                dst, src = self.slice(dst), self.slice(src)
                return None if dst == src else Copy(dst, src)

    def rank(self, rank: int) -> int:
        return rank if self.ranks is None else self.ranks[rank]

    def slice(self, piece: Slice) -> Slice:
        buffer = self.buffers.get(piece.buffer, piece.buffer)
        if self.bounds is None:
            return Slice(buffer, piece.first, piece.count)
        first = self.bounds[piece.first]
        return Slice(buffer, first, self.bounds[piece.first + piece.count] - first)

    def term(self, term: Term) -> Term:
        if isinstance(term, Slice):
            return self.slice(term)
        # A term that arrives in type T was sent from `in`. If `in` becomes `acc`, the term arrives in type A.
        return From(self.rank(term.rank), term.partial or self.buffers.get("in") == "acc")


def then(*phases: Phase) -> Phase:
    """Return the phases one after the other."""
    rounds = sum(phase.rounds for phase in phases)

    def make(rank: int) -> Program:
        return tuple(ops for phase in phases for ops in phase.program(rank))

    return _composed(phases, rounds, make)


def beside(*phases: Phase) -> Phase:
    """Return the phases at the same time. A rank may take part in several phases if they use different segments."""
    rounds = max(phase.rounds for phase in phases)

    def make(rank: int) -> Program:
        merged: list[Round] = [()] * rounds
        for phase in phases:
            if rank in phase.ranks:
                for i, ops in enumerate(phase.make(rank)):
                    merged[i] += ops
        return tuple(merged)

    return _composed(phases, rounds, make)


def finish(ranks: Collection[int], segments: int, owned: Callable[[int], range]) -> Phase:
    """Return one round without messages, in which each rank finishes the segments that it owns."""

    def make(rank: int) -> Program:
        own = owned(rank)
        ops: Round = (Finish(Slice("out", own.start, len(own)), Slice("acc", own.start, len(own))),) if own else ()
        return (ops,)

    return Phase(ranks, segments, 1, make)


def _composed(phases: Sequence[Phase], rounds: int, make: Callable[[int], Program]) -> Phase:
    if len({phase.segments for phase in phases}) != 1:
        raise InvalidSize("phases over different numbers of segments cannot be composed")
    members = phases[0].ranks
    if any(phase.ranks != members for phase in phases):
        members = frozenset(rank for phase in phases for rank in phase.ranks)
    separate = any(phase.separate_acc for phase in phases)
    return Phase(members, phases[0].segments, rounds, make, separate)
