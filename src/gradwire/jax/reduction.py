"""All-reduces the named arrays of a tree. Called from plain Python and from compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gradwire.arrays import Array
from gradwire.errors import ConfigError, NotFinite
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.group.schedule_runner import Site
from gradwire.jax import failures, trees
from gradwire.operations import named
from gradwire.training.finite import all_finite, faults


def group_of(source: Any) -> Group:
    """Return `source` if it is a group, else its current group (`source` is then an elastic run)."""
    group = source if isinstance(source, Group) else getattr(source, "group", None)
    if not isinstance(group, Group):
        raise ConfigError(f"expected a group or an elastic run, got {type(source).__name__}")
    return group


def values(leaves: Sequence[Any]) -> list[Array]:
    """Return the leaves as NumPy arrays, without a copy on the CPU.

    First wait until all compiled programs have made their calls: a group has one order of calls.
    """
    with failures.typed_errors():
        jax.effects_barrier()
        return [np.asarray(leaf) for leaf in leaves]


def reduced(
    source: Any, names: Sequence[str], arrays: Sequence[Array], op: str, check_finite: bool, site: Site
) -> list[Array]:
    """Reduce the arrays over all ranks into new memory. `site` is the user's line, for errors."""
    group = group_of(source)
    results = trees.copied(group, arrays)
    internals = GroupInternals(group)
    operation = named.all_reduce_named(internals.position, dict(zip(names, results, strict=True)), op)
    internals.run(operation, site=site)
    # A NaN or infinite value of any rank is still in the sum, so all ranks find it here without another exchange.
    if check_finite and op in ("sum", "mean") and not all(map(_finite, results)):
        raise _not_finite(group, names, arrays)
    return results


def _finite(array: Array) -> bool:
    return not trees.is_inexact(array.dtype) or all_finite(array)


def _not_finite(group: Group, names: Sequence[str], arrays: Sequence[Array]) -> NotFinite:
    """Return the error that names the lowest rank with a NaN or infinite value, and its first such leaf.

    All ranks call it.
    """
    named = zip(names, arrays, strict=True)
    mine = next(([name, faults(array)] for name, array in named if not _finite(trees.contiguous(array))), None)
    facts: dict[str, Any] = {"operation": "all_reduce", "generation": group.generation}
    for rank, found in enumerate(group.all_gather_values(mine)):
        if found is not None:
            name, what = found
            return NotFinite(f"{name!r} of rank {rank} is not finite: {what}", culprit=rank, tensor=name, **facts)
    return NotFinite(
        "the sum over all ranks is too large: each rank's values are finite, but their sum is not", **facts
    )
