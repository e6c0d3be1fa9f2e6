"""All-reduces the named arrays of a tree. Called from plain Python and from compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from gradwire.arrays import Array
from gradwire.errors import NotFinite
from gradwire.group.schedule_runner import Site
from gradwire.jax import failures, trees
from gradwire.operations import named
from gradwire.training import norms
from gradwire.training.engine_group import AnyGroup, group_for, internals_of
from gradwire.training.finite import all_finite, faults
from gradwire.training.weights import Weights


class How(NamedTuple):
    """The settings of an all-reduce.

    `weigh` says where a mean is weighted: each rank scales its input, or its result. One is the transpose of the other.
    """

    op: str
    check_finite: bool
    site: Site  # the user's line, for errors
    weigh: Literal["input", "result"] | None = None

    def transposed(self) -> How:
        """Return the settings of the transposed reduction, for gradients."""
        return self if self.weigh is None else self._replace(weigh="result" if self.weigh == "input" else "input")


def values(leaves: Sequence[Any]) -> list[Array]:
    """Return the leaves as NumPy arrays, without a copy on the CPU.

    First wait until all compiled programs have made their calls: a group has one order of calls.
    """
    with failures.typed_errors():
        jax.effects_barrier()
        return [np.asarray(leaf) for leaf in leaves]


def reduced(source: Any, names: Sequence[str], operands: Sequence[Array], how: How) -> list[Array]:
    """Reduce arrays over all ranks into new memory. If `how.weigh` is set, the first operand is the weight."""
    group = group_for(source)
    arrays = operands if how.weigh is None else operands[1:]
    weights = None if how.weigh is None else _weights(group, float(operands[0]), how)
    results = trees.copied(group, arrays)
    if weights is not None and how.weigh == "input":
        _scale_inputs(weights, results)
    internals = internals_of(group)
    operation = named.all_reduce_named(internals.position, dict(zip(names, results, strict=True)), how.op)
    internals.run(operation, site=how.site)
    # A NaN or infinite value of any rank is still in the sum, so all ranks find it here without another exchange.
    if how.check_finite and how.op in ("sum", "mean") and not all(map(_finite, results)):
        ignored = weights is not None and how.weigh == "input" and not weights.mine
        raise _not_finite(group, {} if ignored else dict(zip(names, arrays, strict=True)))
    if weights is not None:
        _scale_results(weights, results, how)
    return results


def _weights(group: AnyGroup, mine: float, how: How) -> Weights:
    """Return the weights of all ranks. Raise the same error on all ranks if a weight is invalid or all are 0."""
    weights = Weights(mine, group.size, "gw.jax.all_reduce")
    internals_of(group).run(weights.operation(), site=how.site)
    weights.check(group.generation)
    return weights


def _scale_inputs(weights: Weights, arrays: Sequence[Array]) -> None:
    for array in arrays:
        if weights.mine:
            weights.scale_input(array.reshape(-1))
        else:
            array.fill(0)


def _scale_results(weights: Weights, arrays: Sequence[Array], how: How) -> None:
    for array in arrays:
        if how.weigh == "input":
            weights.scale_result(array.reshape(-1))
        elif weights.mine:
            norms.scale([array.reshape(-1)], weights.share * weights.by_rank.size)
        else:
            array.fill(0)


def _finite(array: Array) -> bool:
    return not trees.is_inexact(array.dtype) or all_finite(array)


def _not_finite(group: AnyGroup, arrays: dict[str, Array]) -> NotFinite:
    """Return the error that names the lowest rank with a NaN or infinite value, and its first such leaf.

    All ranks call it, each with the arrays that it has added to the sum.
    """
    mine = next(([name, faults(one)] for name, one in arrays.items() if not _finite(trees.contiguous(one))), None)
    facts: dict[str, Any] = {"operation": "all_reduce", "generation": group.generation}
    for rank, found in enumerate(group.all_gather_values(mine)):
        if found is not None:
            name, what = found
            return NotFinite(f"{name!r} of rank {rank} is not finite: {what}", culprit=rank, tensor=name, **facts)
    return NotFinite(
        "the sum over all ranks is too large: each rank's values are finite, but their sum is not", **facts
    )
