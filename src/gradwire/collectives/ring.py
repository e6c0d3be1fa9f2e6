"""The ring algorithm: each rank sends only to the next rank, one segment in each round.

It needs the fewest bytes of all algorithms, spread evenly over ranks and links, but the most rounds. It is for large
arrays.

With n ranks, in units of S, the bytes of the whole array:

| collective     | rounds      | most sent by a rank | most received by a rank |
|----------------|-------------|---------------------|-------------------------|
| all_reduce     | 2 * (n - 1) | 2 * (n - 1) / n     | 2 * (n - 1) / n         |
| all_gather     | n - 1       | (n - 1) / n         | (n - 1) / n             |
| reduce_scatter | n - 1       | (n - 1) / n         | (n - 1) / n             |
"""

from __future__ import annotations

from gradwire.collectives.combine import finish, relabel, then
from gradwire.collectives.schedule import Builder, Copy, Fold, From, Operation, Phase, Program, Recv, Send, Slice


def all_reduce(size: int, root: int) -> Phase:
    return then(reduce_scatter(size, root), relabel(all_gather(size, root), buffers={"in": "out"}))


def reduce_scatter(size: int, root: int) -> Phase:
    return then(fold_along_ring(size), finish(range(size), size, lambda rank: range(rank, rank + 1)))


def fold_along_ring(size: int) -> Phase:
    """Rank r ends with segment r folded over all ranks, not finished.

    The fold of segment s starts at rank s + 1, each rank adds its input, and rank s adds the last.
    """

    def make(rank: int) -> Program:
        if size == 1:
            return ((Fold(Slice("acc", 0), (Slice("in", 0),)),),)
        after, before = (rank + 1) % size, (rank - 1) % size
        rounds = []
        for step in range(size - 1):
            leaving, arriving = (rank - 1 - step) % size, (rank - 2 - step) % size
            send = Send(Slice("acc" if step else "in", leaving), (after,))
            terms = (From(before, partial=step > 0), Slice("in", arriving))
            rounds.append((send, Fold(Slice("acc", arriving), terms)))
        return tuple(rounds)

    return Phase(range(size), size, max(size - 1, 1), make)


def all_gather(size: int, root: int) -> Phase:
    """Each rank first sends its own segment, and in each later round the segment that it received in the last round."""

    def make(rank: int) -> Program:
        own = Copy(Slice("out", rank), Slice("in", rank))
        if size == 1:
            return ((own,),)
        after, before = (rank + 1) % size, (rank - 1) % size
        rounds: list[tuple[Operation, ...]] = []
        for step in range(size - 1):
            leaving = Slice("out" if step else "in", (rank - step) % size)
            ops = Send(leaving, (after,)), Recv(Slice("out", (before - step) % size), before)
            rounds.append(ops if step else (own, *ops))
        return tuple(rounds)

    return Phase(range(size), size, max(size - 1, 1), make)


PHASES: dict[str, Builder] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
}
