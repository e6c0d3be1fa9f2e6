"""Halving and doubling: the bytes of a ring in the rounds of a tree, for any number of ranks.

The core is the largest power of two, 2**k, of the n ranks. Each of the n - 2**k ranks too many (an odd one, 2i + 1)
hands its input to its even neighbour 2i first and is served by it last. The core folds by exchanging halves with
partners at half the distance each round, and gathers by the same exchanges backwards. A core rank of a pair owns both
segments of the pair, so what a core rank holds is always one run of segments. For arrays of middling size and many
ranks.

With k = ⌊log2 n⌋ and x = 1 if n is not a power of two, else 0, in units of S, the bytes of the whole array (`<=`: exact
for powers of two, and a bound for others):

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
    """The power of two of ranks that exchange halves; the first `pairs` of them stand for an odd rank as well."""

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
        """The first segment of a place; its bundle ends where the next one's starts."""
        return place + min(place, self.pairs)

    def place(self, rank: int) -> int | None:
        """The rank's place in the core; None for an odd rank of a pair."""
        if rank < 2 * self.pairs:
            return None if rank % 2 else rank // 2
        return rank - self.pairs

    def run(self, buffer: Buffer, first: int, places: int) -> Slice:
        """What so many places own together."""
        start = self.start(first)
        return Slice(buffer, start, self.start(first + places) - start)

    def bundle(self, rank: int) -> range:
        place = self.place(rank)
        return range(0) if place is None else range(self.start(place), self.start(place + 1))


def all_reduce(size: int, root: int) -> Phase:
    core = _Core.of(size)
    own = finish(range(size), size, core.bundle)
    return then(_fold_pairs(core), _halve(core), own, _double(core), _serve_odd(core, with_their_own=True))


def reduce_scatter(size: int, root: int) -> Phase:
    core = _Core.of(size)
    own = finish(range(size), size, lambda rank: range(rank, rank + 1))
    return then(_fold_pairs(core), _halve(core), _hand_back(core), own)


def all_gather(size: int, root: int) -> Phase:
    core = _Core.of(size)
    return then(_pool_pairs(core), _double(core), _serve_odd(core, with_their_own=False))


def _fold_pairs(core: _Core) -> Phase:
    """Odd ranks hand their input to the even ones."""

    def make(rank: int) -> Round:
        inputs = Slice("in", 0, core.size)
        if rank % 2:
            return (Send(inputs, (rank - 1,)),)
        return (Fold(Slice("acc", 0, core.size), (inputs, From(rank + 1, partial=False))),)

    return _among_pairs(core, make)


def _halve(core: _Core) -> Phase:
    """Each step halves the places that a rank is responsible for; the other half goes to its partner."""

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
    """The exchanges of `_halve` backwards: each step doubles the places whose results a rank has."""

    def make(rank: int) -> Program:
        place = core.place(rank)
        return tuple(() if place is None else _doubling_step(core, place, step) for step in range(core.steps))

    return Phase(range(core.size), core.size, core.steps, make)


def _doubling_step(core: _Core, place: int, step: int) -> Round:
    distance = 1 << step
    partner = place ^ distance
    send = Send(core.run("out", place & -distance, distance), (core.rank(partner),))
    return send, Recv(core.run("out", partner & -distance, distance), core.rank(partner))


def _pool_pairs(core: _Core) -> Phase:
    """Everybody has its own segment in `out`, and even ranks their neighbour's too."""

    def make(rank: int) -> Program:
        ops: list[Operation] = [Copy(Slice("out", rank), Slice("in", rank))]
        if rank < 2 * core.pairs:
            if rank % 2:
                ops.append(Send(Slice("in", rank), (rank - 1,)))
            else:
                ops.append(Recv(Slice("out", rank + 1), rank + 1))
        return (tuple(ops),)

    return Phase(range(core.size), core.size, 1, make)


def _hand_back(core: _Core) -> Phase:
    """Odd ranks get the sum of their segment."""

    def make(rank: int) -> Round:
        if rank % 2:
            return (Recv(Slice("acc", rank), rank - 1),)
        return (Send(Slice("acc", rank + 1), (rank + 1,)),)

    return _among_pairs(core, make)


def _serve_odd(core: _Core, *, with_their_own: bool) -> Phase:
    """Odd ranks get the whole result from the even ones, or all of it but the segment they brought."""

    def make(rank: int) -> Round:
        odd = rank | 1
        runs = [range(core.size)] if with_their_own else [range(odd), range(odd + 1, core.size)]
        slices = [Slice("out", run.start, len(run)) for run in runs if run]
        if rank % 2:
            return tuple(Recv(piece, rank - 1) for piece in slices)
        return tuple(Send(piece, (rank + 1,)) for piece in slices)

    return _among_pairs(core, make)


def _among_pairs(core: _Core, make: Callable[[int], Round]) -> Phase:
    """A round of the pairs, or nothing if there are none."""
    return Phase(range(2 * core.pairs), core.size, min(core.pairs, 1), lambda rank: (make(rank),))


PHASES: dict[str, Builder] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
}
