"""The star algorithm: all data goes through one rank, the hub. The hub is the root, or rank 0 if there is no root.

It needs one hop in each direction and the fewest messages, but the hub carries all of the traffic. It is for small
arrays and few ranks.

With n ranks, in units of S, the bytes of the whole array (of one rank's input for all_to_all):

| collective | rounds      | most sent by a rank | most received by a rank |
|------------|-------------|---------------------|-------------------------|
| all_reduce | 2 * (n > 1) | n - 1               | n - 1                   |
| broadcast  | 1 * (n > 1) | n - 1               | 1 * (n > 1)             |
| reduce     | 1 * (n > 1) | 1 * (n > 1)         | n - 1                   |
| gather     | 1 * (n > 1) | 1 / n * (n > 1)     | (n - 1) / n             |
| scatter    | 1 * (n > 1) | (n - 1) / n         | 1 / n * (n > 1)         |
| all_to_all | 2 * (n > 1) | (n - 1) ** 2 / n    | (n - 1) ** 2 / n        |
"""

from __future__ import annotations

from itertools import pairwise

from gradwire.collectives.combine import finish, relabel, then
from gradwire.collectives.schedule import Builder, Copy, Fold, From, Operation, Phase, Program, Recv, Round, Send, Slice


def all_reduce(size: int, root: int) -> Phase:
    """All ranks send their inputs to the hub, which folds them in rank order and sends the result to all ranks."""
    return then(reduce(size, root), relabel(broadcast(size, root), buffers={"in": "out"}))


def broadcast(size: int, root: int) -> Phase:
    others = tuple(rank for rank in range(size) if rank != root)

    def make(rank: int) -> Program:
        if rank != root:
            return ((Recv(Slice("out", 0), root),),)
        copy = Copy(Slice("out", 0), Slice("in", 0))
        return ((copy, Send(Slice("in", 0), others)) if others else (copy,),)

    return Phase(range(size), 1, 1, make)


def reduce(size: int, root: int) -> Phase:
    def make(rank: int) -> Program:
        if rank != root:
            return ((Send(Slice("in", 0), (root,)),),)
        terms = tuple(From(r, partial=False) if r != root else Slice("in", 0) for r in range(size))
        return ((Fold(Slice("acc", 0), terms),),)

    return then(Phase(range(size), 1, 1, make), finish((root,), 1, lambda _: range(1)))


def gather(size: int, root: int) -> Phase:
    def make(rank: int) -> Program:
        if rank != root:
            return ((Send(Slice("in", rank), (root,)),),)
        receives = (Recv(Slice("out", r), r) for r in range(size) if r != root)
        return ((Copy(Slice("out", root), Slice("in", root)), *receives),)

    return Phase(range(size), size, 1, make)


def scatter(size: int, root: int) -> Phase:
    def make(rank: int) -> Program:
        if rank != root:
            return ((Recv(Slice("out", rank), root),),)
        sends = (Send(Slice("in", r), (r,)) for r in range(size) if r != root)
        return ((Copy(Slice("out", root), Slice("in", root)), *sends),)

    return Phase(range(size), size, 1, make)


def all_to_all(size: int, root: int) -> Phase:
    """Each rank sends the hub all segments for other ranks, and the hub forwards them.

    The hub receives the segments that are for itself in `out` and the others in `acc`.
    """

    def make(rank: int) -> Program:
        return _all_to_all_of_hub(size, root) if rank == root else _all_to_all_of_other(size, root, rank)

    return Phase(range(size), size * size, 2, make)


def _all_to_all_of_other(size: int, root: int, rank: int) -> Program:
    own = rank * size + rank
    collect: list[Operation] = [Copy(Slice("out", own), Slice("in", own))]
    collect += [Send(Slice("in", first, count), (root,)) for first, count in _runs_for_the_hub(size, root, rank)]
    deliver: Round = tuple(Recv(Slice("out", i * size + rank), root) for i in range(size) if i != rank)
    return tuple(collect), deliver


def _all_to_all_of_hub(size: int, root: int) -> Program:
    own = root * size + root
    collect: list[Operation] = [Copy(Slice("out", own), Slice("in", own))]
    deliver: list[Operation] = []
    for rank in range(size):
        if rank == root:
            continue
        for first, count in _runs_for_the_hub(size, root, rank):
            collect.append(Recv(Slice("out" if first == rank * size + root else "acc", first, count), rank))
        for i in range(size):
            if i != rank:
                deliver.append(Send(Slice("in" if i == root else "acc", i * size + rank), (rank,)))
    return tuple(collect), tuple(deliver)


def _runs_for_the_hub(size: int, root: int, rank: int) -> list[tuple[int, int]]:
    """Return runs of the segments that a rank sends to the hub: all but its own. The segment for the hub is one run."""
    cuts = sorted({0, rank, rank + 1, root, root + 1, size})
    runs = ((first, stop - first) for first, stop in pairwise(cuts) if first != rank)
    return [(rank * size + first, count) for first, count in runs]


PHASES: dict[str, Builder] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
}
