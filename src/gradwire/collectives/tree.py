"""The tree algorithm: a binomial tree, for any number of ranks and any root.

It needs few rounds and few messages, but each message is a whole array. It is for small arrays and many ranks. The tree
is built over places: place p is rank (p + root) % n, so the root has place 0.

With n ranks and k = ⌈log2 n⌉, in units of S, the bytes of the whole array:

| collective | rounds | most sent by a rank | most received by a rank |
|------------|--------|---------------------|-------------------------|
| all_reduce | 2 * k  | k                   | k                       |
| broadcast  | k      | k                   | 1 * (n > 1)             |
| reduce     | k      | 1 * (n > 1)         | k                       |
"""

from __future__ import annotations

from gradwire.collectives.combine import finish, relabel, then
from gradwire.collectives.schedule import Builder, Copy, Fold, From, Operation, Phase, Program, Recv, Round, Send, Slice


def all_reduce(size: int, root: int) -> Phase:
    return then(reduce(size, root), relabel(broadcast(size, root), buffers={"in": "out"}))


def reduce(size: int, root: int) -> Phase:
    """In round k, a rank sends its partial result if k is the lowest set bit of its place.

    The receiver is the place without that bit.
    """

    def make(place: int) -> Program:
        if size == 1:
            return ((Fold(Slice("acc", 0), (Slice("in", 0),)),),)
        return tuple(_towards_the_root(size, place, k) for k in range(_depth(size)))

    phase = _from_places(Phase(range(size), 1, max(_depth(size), 1), make), root)
    return then(phase, finish((root,), 1, lambda _: range(1)))


def _towards_the_root(size: int, place: int, k: int) -> Round:
    bit = 1 << k
    own = Slice("acc" if _has_children(size, place, k) else "in", 0)
    match place % (2 * bit):
        case 0 if place + bit < size:
            child = place + bit
            return (Fold(Slice("acc", 0), (own, From(child, partial=_has_children(size, child, k)))),)
        case lowest if lowest == bit:
            return (Send(own, (place - bit,)),)
    return ()


def _has_children(size: int, place: int, k: int) -> bool:
    """Return whether a place that is a multiple of 2**k has folded a message before round k."""
    return k > 0 and place + 1 < size


def broadcast(size: int, root: int) -> Phase:
    """The tree of `reduce` in the other direction; a rank sends to its largest subtree first."""

    def make(place: int) -> Program:
        rounds: list[Round] = []
        for k in reversed(range(_depth(size))):
            bit = 1 << k
            ops: list[Operation] = []
            if place % (2 * bit) == 0 and place + bit < size:
                ops.append(Send(Slice("out" if place else "in", 0), (place + bit,)))
            elif place % (2 * bit) == bit:
                ops.append(Recv(Slice("out", 0), place - bit))
            rounds.append(tuple(ops))
        if place == 0:
            rounds[:1] = [(Copy(Slice("out", 0), Slice("in", 0)), *(rounds[0] if rounds else ()))]
        return tuple(rounds)

    return _from_places(Phase(range(size), 1, max(_depth(size), 1), make), root)


def _from_places(phase: Phase, root: int) -> Phase:
    """Return a phase over ranks for a phase over places. Place 0 is the root, and the others follow in rank order."""
    size = len(phase.ranks)
    return relabel(phase, ranks=[(place + root) % size for place in range(size)])


def _depth(size: int) -> int:
    return (size - 1).bit_length()


PHASES: dict[str, Builder] = {"all_reduce": all_reduce, "broadcast": broadcast, "reduce": reduce}
