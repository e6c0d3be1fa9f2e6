"""Selects the members of a generation and their order. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from gradwire.membership.types import Member


def initial_order(members: Sequence[Member]) -> list[str]:
    """The ids of a first generation in rank order: whoever named a rank gets it, the others fill the gaps as they came.

    If fewer came than were expected, what is left of the order is closed up.
    """
    named = {member.rank: member.id for member in members if member.rank is not None}
    unnamed = iter([member.id for member in members if member.rank is None])
    order: list[str] = []
    for rank in range(max([len(members), *(1 + rank for rank in named)])):
        name = named.get(rank) or next(unnamed, None)
        if name is not None:
            order.append(name)
    return order


def missing(wishes: Sequence[int | None], size: int) -> tuple[int, ...]:
    """The ranks of `size` that nobody has yet, if those who came asked for these; None took any."""
    free = sorted(set(range(size)).difference(wishes))
    return tuple(free[wishes.count(None) :])


def cut_off(
    order: Sequence[str], complaints: Mapping[str, AbstractSet[str]], strangers: AbstractSet[str] = frozenset()
) -> list[str]:
    """Who of `order` must go so that nobody is left who cannot reach another; `complaints` are by witness.

    The one that complaints keep apart from the most others goes first, whoever made them: of two sides only the first
    to notice may complain, and one that reaches nobody complains of all. Of several it is the one with the most
    witnesses against it, and then the one with the highest rank. Complaints of and about those who went count no more.

    `strangers` do not have the state of the training yet; the last one that has it never goes for their sake.
    """
    rank = {name: position for position, name in enumerate(order)}
    against = {name: {other for other in complaints.get(name, ()) if other in rank and other != name} for name in order}
    witnesses = Counter(accused for names in against.values() for accused in names)
    apart: dict[str, set[str]] = {}
    for witness, names in against.items():
        for accused in names:
            apart.setdefault(witness, set()).add(accused)
            apart.setdefault(accused, set()).add(witness)
    knowing = [name for name in order if name not in strangers]
    gone: list[str] = []
    while apart:
        candidates = apart.keys() - knowing if len(knowing) == 1 else apart
        name = max(candidates, key=lambda name: (len(apart[name]), witnesses[name], rank[name]))
        gone.append(name)
        knowing = [other for other in knowing if other != name]
        witnesses.subtract(against[name])
        for other in apart.pop(name):
            apart[other].discard(name)
            if not apart[other]:
                del apart[other]
    return gone
