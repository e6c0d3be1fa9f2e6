"""The direct algorithm: every rank exchanges with every other rank.

A reduction has two exchanges. First rank s receives and folds segment s of all inputs, in rank order. Then it sends the
result to the other ranks. This needs as many bytes as a ring and only two rounds, but n² messages: it is for few ranks,
or for links that do not share a network. The one-shot all-reduce (`oneshot`) sends all inputs to all ranks, and each
rank folds them in the same order: it needs one round and is for tiny arrays.

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

    # Each rank folds while its own input may still be read by others.
    fold = Phase(range(size), 1, 1, make, separate_acc=True)
    return replace(then(fold, finish(range(size), 1, lambda _: range(1))), one_shot=True)


def broadcast(size: int, root: int) -> Phase:
    """The root sends one segment to each rank, then each rank sends its segment to the other ranks."""
    return then(scatter_segments(size, root), share_segments(size, root))


def reduce(size: int, root: int) -> Phase:
    """Rank s folds segment s; the root receives the partial results and finishes them."""

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
    """One round, after which rank r has segment r of all inputs folded in rank order, not finished."""

    def make(rank: int) -> Program:
        sends = (Send(Slice("in", r), (r,)) for r in _others(size, rank))
        return ((*sends, Fold(Slice("acc", rank), _in_rank_order(size, rank, Slice("in", rank)))),)

    return Phase(range(size), size, 1, make)


def scatter_segments(size: int, root: int) -> Phase:
    """One round, after which rank r has segment r of the root's input, and the root has its complete output."""

    def make(rank: int) -> Program:
        if rank != root:
            return ((Recv(Slice("out", rank), root),),)
        sends = (Send(Slice("in", r), (r,)) for r in _others(size, root))
        return ((Copy(Slice("out", 0, size), Slice("in", 0, size)), *sends),)

    return Phase(range(size), size, 1, make)


def share_segments(size: int, root: int) -> Phase:
    """One round, in which rank r sends segment r to all other ranks except the root, which has all segments."""

    def make(rank: int) -> Program:
        receivers = tuple(r for r in _others(size, rank) if r != root)
        ops: list[Operation] = [Send(Slice("out", rank), receivers)] if receivers else []
        if rank != root:
            ops += [Recv(Slice("out", r), r) for r in _others(size, rank)]
        return (tuple(ops),)

    return Phase(range(size), size, 1, make)


def _others(size: int, rank: int) -> tuple[int, ...]:
    """Return all other ranks, starting with the next one, so that not all ranks send to the same rank first."""
    return (*range(rank + 1, size), *range(rank))


def _in_rank_order(size: int, rank: int, own: Slice) -> tuple[Slice | From, ...]:
    return tuple(own if r == rank else From(r, partial=False) for r in range(size))


PHASES: dict[str, Builder] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    # A gather or scatter with one hop is the same in both algorithms.
    "gather": star.gather,
    "scatter": star.scatter,
    "all_to_all": all_to_all,
}
