"""Compares what ranks must have in common before they exchange tensors by name, and names the rank that differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from gradwire.errors import ConfigError
from gradwire.group import Group


def tell(group: Group, what: str, items: Sequence[str], value: Any = None) -> list[Any]:
    """Every rank's value, if all ranks describe the same items; else an error on all that names rank and item."""
    digest = xxhash.xxh3_128_hexdigest("\n".join(items).encode())
    told = group.all_gather_values([digest, value])
    if all(one[0] == told[0][0] for one in told):
        return [one[1] for one in told]
    everyones = group.all_gather_values(list(items))
    raise _difference(group, what, everyones)


def _difference(group: Group, what: str, everyones: Sequence[Sequence[str]]) -> ConfigError:
    """The first rank that differs from rank 0, and in what: the same text on every rank."""
    first = everyones[0]
    rank = next(rank for rank, items in enumerate(everyones) if list(items) != list(first))
    mine = everyones[rank]
    at = next((at for at, pair in enumerate(zip(first, mine, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        at = min(len(first), len(mine))
    here, there = (items[at] if at < len(items) else "nothing more" for items in (mine, first))
    return ConfigError(
        f"ranks differ in {what}: number {at + 1} is {here} on rank {rank}, {there} on rank 0",
        culprit=rank,
        operation=what,
        generation=group.generation,
    )
