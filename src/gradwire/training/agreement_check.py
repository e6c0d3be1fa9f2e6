"""Checks that all ranks describe the same tensors and settings before they exchange data by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from gradwire.errors import ConfigError
from gradwire.training.engine_group import AnyGroup


def check_and_gather(group: AnyGroup, operation: str, items: Sequence[str], value: Any = None) -> list[Any]:
    """Return the `value` of every rank, by rank, after checking that all ranks pass the same `items`.

    If the items differ, every rank raises the same `ConfigError`. It names the first rank that differs from rank 0 and
    the first item that differs. The items themselves are exchanged only in that case.
    """
    digest = xxhash.xxh3_128_hexdigest("\n".join(items).encode())
    gathered = group.all_gather_values([digest, value])
    if all(one[0] == gathered[0][0] for one in gathered):
        return [one[1] for one in gathered]
    items_by_rank = group.all_gather_values(list(items))
    raise _difference(group, operation, items_by_rank)


def _difference(group: AnyGroup, operation: str, items_by_rank: Sequence[Sequence[str]]) -> ConfigError:
    """Return the error about the first rank that differs from rank 0. Its text is the same on every rank."""
    expected = items_by_rank[0]
    rank = next(rank for rank, items in enumerate(items_by_rank) if list(items) != list(expected))
    found = items_by_rank[rank]
    at = next((at for at, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        at = min(len(expected), len(found))
    here, there = (items[at] if at < len(items) else "missing" for items in (found, expected))
    return ConfigError(
        f"ranks differ in {operation}: item {at + 1} is {here} on rank {rank}, but {there} on rank 0",
        culprit=rank,
        operation=operation,
        generation=group.generation,
    )
