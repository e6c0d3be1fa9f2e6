"""The all-reduce of trees on NumPy arrays, called from plain Python and from compiled programs."""

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
    """A group, or the group of whatever has one: of an elastic run, always the present generation's."""
    group = source if isinstance(source, Group) else getattr(source, "group", None)
    if not isinstance(group, Group):
        raise ConfigError(f"expected a group, or a run that has one, not {type(source).__name__}")
    return group


def values(leaves: Sequence[Any]) -> list[Array]:
    """The leaves for NumPy, when every compiled program before has made its calls: a group has one order.

    On the CPU nothing is copied.
    """
    with failures.typed_errors():
        jax.effects_barrier()
        return [np.asarray(leaf) for leaf in leaves]


def reduced(
    source: Any, names: Sequence[str], arrays: Sequence[Array], op: str, check_finite: bool, site: Site
) -> list[Array]:
    """The arrays of all ranks reduced, in fresh memory; those given are only read. `site` is the user's line."""
    group = group_of(source)
    results = trees.copied(group, arrays)
    internals = GroupInternals(group)
    operation = named.all_reduce_named(internals.position, dict(zip(names, results, strict=True)), op)
    internals.run(operation, site=site)
    # A NaN or Inf of any rank is still there in the sum, on all ranks alike: nothing more need be exchanged to see it.
    if check_finite and op in ("sum", "mean") and not all(map(_finite, results)):
        raise _blame(group, names, arrays)
    return results


def _finite(array: Array) -> bool:
    return not trees.is_inexact(array.dtype) or all_finite(array)


def _blame(group: Group, names: Sequence[str], arrays: Sequence[Array]) -> NotFinite:
    """Who brought what is not finite: all ranks are here, and each tells the first of its own."""
    named = zip(names, arrays, strict=True)
    mine = next(([name, faults(array)] for name, array in named if not _finite(trees.contiguous(array))), None)
    facts: dict[str, Any] = {"operation": "all_reduce", "generation": group.generation}
    for rank, told in enumerate(group.all_gather_values(mine)):
        if told is not None:
            name, what = told
            return NotFinite(f"{name!r} of rank {rank} is not finite: {what}", culprit=rank, tensor=name, **facts)
    return NotFinite("the sum over all ranks is not finite, though each rank's part is: it is too large", **facts)
