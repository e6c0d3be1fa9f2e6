"""Selects the members of a generation and their order. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from gradwire.membership.types import Member


def initial_order(members: Sequence[Member]) -> list[str]:
    """Return the ids of a first generation in rank order.

    A member that asked for a rank gets it, and the others fill the gaps in the order of their arrival. If ranks stay
    unfilled because there are fewer members than expected, the ranks after them move up.
    """
    with_rank = {member.rank: member.id for member in members if member.rank is not None}
    without_rank = iter([member.id for member in members if member.rank is None])
    order: list[str] = []
    for rank in range(max([len(members), *(1 + rank for rank in with_rank)])):
        name = with_rank.get(rank) or next(without_rank, None)
        if name is not None:
            order.append(name)
    return order


def missing(wanted: Sequence[int | None], size: int) -> tuple[int, ...]:
    """Return the ranks below `size` that are still free, if members asked for the `wanted` ranks (None: any rank)."""
    free = sorted(set(range(size)).difference(wanted))
    return tuple(free[wanted.count(None) :])


def cut_off(
    order: Sequence[str], lost: Mapping[str, AbstractSet[str]], stateless: AbstractSet[str] = frozenset()
) -> list[str]:
    """Return the members of `order` to remove, so that every two remaining members can reach each other.

    `lost` maps each member to the members that it could not reach. Such a report separates two members, whichever of
    them made it: often only the first to notice reports a broken link, and a member that reaches no other reports all
    others. The member that is separated from the most others is removed first. Among equals it is the one that the most
    members reported, then the one with the highest rank. After that its reports, and reports about it, no longer count.

    `stateless` are members that do not have the training state yet. The last member that has the state is never removed
    because of them.
    """
    rank = {name: position for position, name in enumerate(order)}
    reports = {name: {other for other in lost.get(name, ()) if other in rank and other != name} for name in order}
    report_count = Counter(other for names in reports.values() for other in names)
    separated: dict[str, set[str]] = {}
    for reporter, names in reports.items():
        for other in names:
            separated.setdefault(reporter, set()).add(other)
            separated.setdefault(other, set()).add(reporter)
    with_state = [name for name in order if name not in stateless]
    removed: list[str] = []
    while separated:
        candidates = separated.keys() - with_state if len(with_state) == 1 else separated
        name = max(candidates, key=lambda name: (len(separated[name]), report_count[name], rank[name]))
        removed.append(name)
        with_state = [other for other in with_state if other != name]
        report_count.subtract(reports[name])
        for other in separated.pop(name):
            separated[other].discard(name)
            if not separated[other]:
                del separated[other]
    return removed
