"""Direct: every rank talks to every other rank.

Reductions run in two shots: segment s is folded by rank s, in rank order and in one go, and then handed out. The bytes
of a ring in two rounds, at the price of n² messages: for few ranks, or where links do not share a wire. The one-shot
all-reduce (`oneshot`) sends all inputs to all ranks, and each rank folds them alike: one round, for tiny arrays.

With n ranks, in units of S, the bytes of the whole array (of one rank's input for all_to_all):

| collective     | rounds      | most sent by a rank | most received by a rank |
|----------------|-------------|---------------------|-------------------------|
| all_reduce     | 2 * (n > 1) | 2 * (n - 1) / n     | 2 * (n - 1) / n         |
| oneshot        | 1 * (n > 1) | n - 1               | n - 1                   |
| broadcast      | 2 * (n > 1) | 2 * (n - 1) / n     | 1 * (n > 1)             |
| reduce         | 2 * (n > 1) | 1 * (n > 1)         | 2 * (n - 1) / n         |
| all_gather     | 1 * (n > 1) | (n - 1) / n         | (n - 1) / n             |
| reduce_scatter | 1 * (n > 1) | (n - 1) / n         | (n - 1) / n             |
| gather         | 1 * (n > 1) | 1 / n * (n > 1)     | (n - 1) / n             |
| scatter        | 1 * (n > 1) | (n - 1) / n         | 1 / n * (n > 1)         |
| all_to_all     | 1 * (n > 1) | (n - 1) / n         | (n - 1) / n             |
"""

from __future__ import annotations

from dataclasses import replace

from gradwire.collectives import star
from gradwire.collectives.combine import finish, relabel, then
from gradwire.collectives.schedule import Builder, Copy, Fold, From, Operation, Phase, Program, Recv, Send, Slice


def all_reduce(size: int, root: int) -> Phase:
    both = then(reduce_scatter(size, root), relabel(all_gather(size, root), buffers={"in": "out"}))
    return replace(both, mirrored=True)


def oneshot(size: int, root: int) -> Phase:
    def make(rank: int) -> Program:
        fold = Fold(Slice("acc", 0), _in_rank_order(size, rank, Slice("in", 0)))
        others = _others(size, rank)
        return ((Send(Slice("in", 0), others), fold) if others else (fold,),)

    # Each rank folds while its own input may still be on its way to others.
    fold = Phase(range(size), 1, 1, make, separate_acc=True)
    return replace(then(fold, finish(range(size), 1, lambda _: range(1))), one_shot=True)


def broadcast(size: int, root: int) -> Phase:
    """The root hands each rank a segment, and each rank its segment to those that lack it."""
    return then(hand_out(size, root), complete(size, root))


def reduce(size: int, root: int) -> Phase:
    """Segment s is folded by rank s; the root collects the sums and finishes them."""

    def make(rank: int) -> Program:
        if rank != root:
            return ((Send(Slice("acc", rank), (root,)),),)
        return (tuple(Recv(Slice("acc", r), r) for r in range(size) if r != root),)

    collect = Phase(range(size), size, 1, make)
    return then(fold_own(size), collect, finish((root,), size, lambda _: range(size)))


def all_gather(size: int, root: int) -> Phase:
    def make(rank: int) -> Program:
        own = Slice("in", rank)
        ops: list[Operation] = [Copy(Slice("out", rank), own)]
        if others := _others(size, rank):
            ops.append(Send(own, others))
            ops += [Recv(Slice("out", r), r) for r in others]
        return (tuple(ops),)

    return Phase(range(size), size, 1, make)


def reduce_scatter(size: int, root: int) -> Phase:
    return then(fold_own(size), finish(range(size), size, lambda rank: range(rank, rank + 1)))


def all_to_all(size: int, root: int) -> Phase:
    def make(rank: int) -> Program:
        own = rank * size + rank
        ops: list[Operation] = [Copy(Slice("out", own), Slice("in", own))]
        ops += [Send(Slice("in", rank * size + r), (r,)) for r in _others(size, rank)]
        ops += [Recv(Slice("out", r * size + rank), r) for r in _others(size, rank)]
        return (tuple(ops),)

    return Phase(range(size), size * size, 1, make)


def fold_own(size: int) -> Phase:
    """One round: rank r ends with segment r of all inputs folded in rank order, not finished."""

    def make(rank: int) -> Program:
        leaving = (Send(Slice("in", r), (r,)) for r in _others(size, rank))
        return ((*leaving, Fold(Slice("acc", rank), _in_rank_order(size, rank, Slice("in", rank)))),)

    return Phase(range(size), size, 1, make)


def hand_out(size: int, root: int) -> Phase:
    """One round: rank r gets segment r of the root's input, and the root has its output."""

    def make(rank: int) -> Program:
        if rank != root:
            return ((Recv(Slice("out", rank), root),),)
        leaving = (Send(Slice("in", r), (r,)) for r in _others(size, root))
        return ((Copy(Slice("out", 0, size), Slice("in", 0, size)), *leaving),)

    return Phase(range(size), size, 1, make)


def complete(size: int, root: int) -> Phase:
    """One round: rank r, which holds segment r, sends it to all that lack it; the root lacks nothing."""

    def make(rank: int) -> Program:
        lacking = tuple(r for r in _others(size, rank) if r != root)
        ops: list[Operation] = [Send(Slice("out", rank), lacking)] if lacking else []
        if rank != root:
            ops += [Recv(Slice("out", r), r) for r in _others(size, rank)]
        return (tuple(ops),)

    return Phase(range(size), size, 1, make)


def _others(size: int, rank: int) -> tuple[int, ...]:
    """All other ranks, beginning with the next one: so that not all ranks send to the same one first."""
    return (*range(rank + 1, size), *range(rank))


def _in_rank_order(size: int, rank: int, own: Slice) -> tuple[Slice | From, ...]:
    return tuple(own if r == rank else From(r, partial=False) for r in range(size))


PHASES: dict[str, Builder] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    # With one hop there is only one way to gather and to scatter.
    "gather": star.gather,
    "scatter": star.scatter,
    "all_to_all": all_to_all,
}
