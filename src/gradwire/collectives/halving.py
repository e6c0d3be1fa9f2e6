"""The halving and doubling algorithm: as many bytes as a ring in as many rounds as a tree, for any number of ranks.

The core is 2**k of the n ranks, for the largest possible k. Each of the other n - 2**k ranks is an odd rank 2i + 1. It
sends its input to its even neighbour 2i in the first round, and receives its result from this neighbour in the last
round. In between, the core folds by exchanging halves with partners, at half the distance in each round. It gathers by
the same exchanges in reverse order. A core rank with an odd neighbour owns the segments of both ranks, so the segments
of a core rank are always one run. This algorithm is for arrays of medium size and many ranks.

With k = ⌊log2 n⌋ and x = 1 if n is not a power of two, else 0, in units of S, the bytes of the whole array (a value
with `<=` is exact if n is a power of two, otherwise a bound):

| collective     | rounds        | most sent by a rank            | most received by a rank        |
|----------------|---------------|--------------------------------|--------------------------------|
| all_reduce     | 2 * k + 2 * x | <= 2 * (n - 1) / n + x * 4 / 3 | <= 2 * (n - 1) / n + x * 4 / 3 |
| all_gather     | k + 2 * x     | <= (n - 1) / n + x * 4 / 3     | (n - 1) / n                    |
| reduce_scatter | k + 2 * x     | (n - 1) / n + x / n            | <= (n - 1) / n + x * 4 / 3     |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradwire.collectives.combine import finish, then
from gradwire.collectives.schedule import (
    Buffer,
    Builder,
    Copy,
    Fold,
    From,
    Operation,
    Phase,
    Program,
    Recv,
    Round,
    Send,
    Slice,
)


@dataclass(frozen=True)
class _Core:
    """The 2**steps ranks that exchange halves. Each has a place in the core.

    The first `pairs` places belong to ranks that also act for an odd neighbour.
    """

    size: int
    steps: int
    pairs: int

    @classmethod
    def of(cls, size: int) -> _Core:
        steps = size.bit_length() - 1
        return cls(size, steps, size - (1 << steps))

    def rank(self, place: int) -> int:
        return self.start(place)

    def start(self, place: int) -> int:
        """Return the first segment of a place. Its segments end where those of the next place start."""
        return place + min(place, self.pairs)

    def place(self, rank: int) -> int | None:
        """Return the rank's place in the core; None for an odd rank of a pair."""
        if rank < 2 * self.pairs:
            return None if rank % 2 else rank // 2
        return rank - self.pairs

    def run(self, buffer: Buffer, first: int, places: int) -> Slice:
        """Return the segments of `places` consecutive places."""
        start = self.start(first)
        return Slice(buffer, start, self.start(first + places) - start)

    def segments_of(self, rank: int) -> range:
        place = self.place(rank)
        return range(0) if place is None else range(self.start(place), self.start(place + 1))


def all_reduce(size: int, root: int) -> Phase:
    core = _Core.of(size)
    own = finish(range(size), size, core.segments_of)
    return then(_fold_pairs(core), _halve(core), own, _double(core), _send_result_to_odd(core, include_own=True))


def reduce_scatter(size: int, root: int) -> Phase:
    core = _Core.of(size)
    own = finish(range(size), size, lambda rank: range(rank, rank + 1))
    return then(_fold_pairs(core), _halve(core), _send_segment_to_odd(core), own)


def all_gather(size: int, root: int) -> Phase:
    core = _Core.of(size)
    return then(_gather_pairs(core), _double(core), _send_result_to_odd(core, include_own=False))


def _fold_pairs(core: _Core) -> Phase:
    """Odd ranks send their input to their even neighbours."""

    def make(rank: int) -> Round:
        inputs = Slice("in", 0, core.size)
        if rank % 2:
            return (Send(inputs, (rank - 1,)),)
        return (Fold(Slice("acc", 0, core.size), (inputs, From(rank + 1, partial=False))),)

    return _round_of_pairs(core, make)


def _halve(core: _Core) -> Phase:
    """Each step halves the segments that a rank folds, and sends the other half to its partner."""

    def make(rank: int) -> Program:
        if core.size == 1:
            return ((Fold(Slice("acc", 0), (Slice("in", 0),)),),)
        place = core.place(rank)
        return tuple(() if place is None else _halving_step(core, place, step) for step in range(core.steps))

    return Phase(range(core.size), core.size, max(core.steps, 1), make)


def _halving_step(core: _Core, place: int, step: int) -> Round:
    distance = 1 << (core.steps - 1 - step)
    partner = place ^ distance
    kept, given = place & -distance, partner & -distance

    def holds_partial(place: int) -> bool:
        return step > 0 or place < core.pairs

    source: Buffer = "acc" if holds_partial(place) else "in"
    own = core.run(source, kept, distance)
    arriving = From(core.rank(partner), partial=holds_partial(partner))
    terms = (own, arriving) if place < partner else (arriving, own)
    send = Send(core.run(source, given, distance), (core.rank(partner),))
    return send, Fold(core.run("acc", kept, distance), terms)


def _double(core: _Core) -> Phase:
    """The exchanges of `_halve` in reverse order: each step doubles the results that a rank has."""

    def make(rank: int) -> Program:
        place = core.place(rank)
        return tuple(() if place is None else _doubling_step(core, place, step) for step in range(core.steps))

    return Phase(range(core.size), core.size, core.steps, make)


def _doubling_step(core: _Core, place: int, step: int) -> Round:
    distance = 1 << step
    partner = place ^ distance
    send = Send(core.run("out", place & -distance, distance), (core.rank(partner),))
    return send, Recv(core.run("out", partner & -distance, distance), core.rank(partner))


def _gather_pairs(core: _Core) -> Phase:
    """Each rank copies its own segment to `out`, and even ranks receive the segment of their odd neighbour."""

    def make(rank: int) -> Program:
        ops: list[Operation] = [Copy(Slice("out", rank), Slice("in", rank))]
        if rank < 2 * core.pairs:
            if rank % 2:
                ops.append(Send(Slice("in", rank), (rank - 1,)))
            else:
                ops.append(Recv(Slice("out", rank + 1), rank + 1))
        return (tuple(ops),)

    return Phase(range(core.size), core.size, 1, make)


def _send_segment_to_odd(core: _Core) -> Phase:
    """Odd ranks receive the partial result of their segment."""

    def make(rank: int) -> Round:
        if rank % 2:
            return (Recv(Slice("acc", rank), rank - 1),)
        return (Send(Slice("acc", rank + 1), (rank + 1,)),)

    return _round_of_pairs(core, make)


def _send_result_to_odd(core: _Core, *, include_own: bool) -> Phase:
    """Odd ranks receive the result from their even neighbours, with or without the segment of their own input."""

    def make(rank: int) -> Round:
        odd = rank | 1
        runs = [range(core.size)] if include_own else [range(odd), range(odd + 1, core.size)]
        slices = [Slice("out", run.start, len(run)) for run in runs if run]
        if rank % 2:
            return tuple(Recv(piece, rank - 1) for piece in slices)
        return tuple(Send(piece, (rank + 1,)) for piece in slices)

    return _round_of_pairs(core, make)


def _round_of_pairs(core: _Core, make: Callable[[int], Round]) -> Phase:
    """One round of the ranks in pairs; no round if there are no pairs."""
    return Phase(range(2 * core.pairs), core.size, min(core.pairs, 1), lambda rank: (make(rank),))


PHASES: dict[str, Builder] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
}
