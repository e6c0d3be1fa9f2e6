"""The all-reduce as a JAX primitive: what `jit`, `grad` and `vmap` see of it.

A compiled program calls back into Python in the order of the program (an ordered effect: JAX keeps the order from one
program to the next, too). The operands come as NumPy views of XLA's own memory. `io_callback` would put them on a
device first, with a thread of the pool that the program itself may be waiting in; so the callback is emitted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gradwire.arrays import Array
from gradwire.errors import UnsupportedOp
from gradwire.jax import failures, reduction, trees

all_reduce_p = Primitive("gradwire_all_reduce")
all_reduce_p.multiple_results = True


@cache
def _order() -> Any:
    """JAX's effect of what must happen in the order of the program."""
    callback = partial(jax.experimental.io_callback, lambda: None, None, ordered=True)
    (effect,) = jax.make_jaxpr(callback)().effects
    return effect


def _outside(*leaves: Any, names: tuple[str, ...], source: Any, op: str, check_finite: bool) -> list[Any]:
    """The values are there: `grad` without `jit`, say."""
    results = reduction.reduced(source, names, trees.on_host(names, leaves), op, check_finite)
    return trees.as_jax(results, leaves)


def _abstract(*leaves: Any, **_: Any) -> tuple[Sequence[Any], set[Any]]:
    return leaves, {_order()}


def _lower(ctx: Any, *operands: Any, names: tuple[str, ...], source: Any, op: str, check_finite: bool) -> Any:
    def callback(*arrays: Array) -> Sequence[Array]:
        with failures.carried():
            return reduction.reduced(source, names, [np.asarray(array) for array in arrays], op, check_finite)

    token = ctx.tokens_in.get(_order())
    results, token, _ = mlir.emit_python_callback(
        ctx, callback, token, list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=True
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_order(): token})))
    return results


def _some(names: tuple[str, ...], values: Sequence[Any], **how: Any) -> list[Any]:
    """The all-reduce of those values that are not known to be zero: the same on all ranks, as their programs are."""
    live = [at for at, value in enumerate(values) if type(value) is not ad.Zero]
    results: list[Any] = list(values)
    if live:
        reduced = all_reduce_p.bind(*(values[at] for at in live), names=tuple(names[at] for at in live), **how)
        for at, value in zip(live, reduced, strict=True):
            results[at] = value
    return results


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, op: str, **how: Any) -> tuple[list[Any], list[Any]]:
    if op not in ("sum", "mean") and any(type(tangent) is not ad.Zero for tangent in tangents):
        raise UnsupportedOp(
            f"all_reduce(op={op!r}) has no gradient here; sum and mean have. Where none is wanted: jax.lax.stop_gradient",
            operation="all_reduce",
        )
    return all_reduce_p.bind(*primals, op=op, **how), _some(how.pop("names"), tangents, op=op, **how)


def _transpose(cotangents: Sequence[Any], *leaves: Any, names: tuple[str, ...], **how: Any) -> list[Any]:
    """The loss is the sum over the ranks' losses: what each result adds to it comes back from every rank."""
    return _some(names, cotangents, **how)


def _batch(leaves: Sequence[Any], axes: Sequence[Any], **how: Any) -> tuple[list[Any], Sequence[Any]]:
    return all_reduce_p.bind(*leaves, **how), axes


all_reduce_p.def_impl(_outside)
all_reduce_p.def_effectful_abstract_eval(_abstract)
mlir.register_lowering(all_reduce_p, _lower)
ad.primitive_jvps[all_reduce_p] = _jvp
ad.primitive_transposes[all_reduce_p] = _transpose
batching.primitive_batchers[all_reduce_p] = _batch
