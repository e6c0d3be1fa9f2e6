"""The all-reduce as a JAX primitive, for `jit`, `grad` and `vmap`.

A compiled program calls back into Python. The callback is an ordered effect, so JAX keeps the order of calls within a
program and from one program to the next. The operands are NumPy views of XLA's own memory. `io_callback` would copy
them to a device first; that copy may need a thread of the same pool whose threads wait here, which is a deadlock. So
this module emits the callback itself, and uses `io_callback` only to get its ordering effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gradwire.arrays import Array
from gradwire.errors import UnsupportedOp
from gradwire.jax import failures, reduction, trees
from gradwire.jax.reduction import How

all_reduce_p = Primitive("gradwire_all_reduce")
all_reduce_p.multiple_results = True


@cache
def _order() -> Any:
    """Return JAX's effect for operations that must run in program order."""
    (effect,) = jax.make_jaxpr(partial(io_callback, lambda: None, None, ordered=True))().effects
    return effect


def _eager(*operands: Any, names: tuple[str, ...], source: Any, how: How) -> list[Any]:
    """Run the primitive outside of compiled programs: in plain Python, or in `grad` without `jit`."""
    results = reduction.reduced(source, names, reduction.values(operands), how)
    return trees.as_jax(results, _leaves(operands, how))


def _leaves(operands: Sequence[Any], how: How) -> Sequence[Any]:
    """Return the operands without the weight, which is the first one of a weighted mean."""
    return operands if how.weigh is None else operands[1:]


def _shapes(*operands: Any, how: How, **_: Any) -> tuple[Sequence[Any], set[Any]]:
    return _leaves(operands, how), {_order()}


def _lower(ctx: Any, *operands: Any, names: tuple[str, ...], source: Any, how: How) -> Any:
    def callback(*arrays: Array) -> Sequence[Array]:
        with failures.stored_errors():
            return reduction.reduced(source, names, [np.asarray(array) for array in arrays], how)

    results, token, _ = mlir.emit_python_callback(
        ctx,
        callback,
        ctx.tokens_in.get(_order()),
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_order(): token})))
    return results


def _of_nonzero(
    weight: Sequence[Any], values: Sequence[Any], *, names: tuple[str, ...], source: Any, how: How
) -> list[Any]:
    """All-reduce the values that are not symbolic zeros, which are the same on all ranks: all trace one program.

    `weight` holds the weight of a weighted mean, or nothing.
    """
    results = list(values)
    live = [at for at, value in enumerate(values) if type(value) is not ad.Zero]
    if live:
        some = tuple(names[at] for at in live)
        reduced = all_reduce_p.bind(*weight, *(values[at] for at in live), names=some, source=source, how=how)
        for at, value in zip(live, reduced, strict=True):
            results[at] = value
    return results


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    how: How = params["how"]
    live = _leaves(tangents, how)  # the API stops the gradient of the weight
    if how.op not in ("sum", "mean") and any(type(tangent) is not ad.Zero for tangent in live):
        raise UnsupportedOp(
            f"all_reduce(op={how.op!r}) has no gradient; only sum and mean have one. If no gradient is needed, pass "
            "jax.lax.stop_gradient(x)",
            operation="all_reduce",
        )
    weight = primals[: len(primals) - len(live)]
    return all_reduce_p.bind(*primals, **params), _of_nonzero(weight, live, **params)


def _transpose(cotangents: Sequence[Any], *operands: Any, how: How, **params: Any) -> list[Any]:
    """All-reduce the cotangents: the loss is the sum of all ranks' losses, and each operand is part of every result.

    In a weighted mean, a rank scales its operand before the sum. So it scales the sum of the cotangents here.
    """
    weight = operands[: len(operands) - len(cotangents)]
    return [None for _ in weight] + _of_nonzero(weight, cotangents, how=how.transposed(), **params)


def _batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[Any], Sequence[Any]]:
    how: How = params["how"]
    if how.weigh is not None and axes[0] is not None:
        raise UnsupportedOp("all_reduce takes one weight, so vmap cannot map over weights", operation="all_reduce")
    return all_reduce_p.bind(*operands, **params), _leaves(axes, how)


all_reduce_p.def_impl(_eager)
all_reduce_p.def_effectful_abstract_eval(_shapes)
mlir.register_lowering(all_reduce_p, _lower)
ad.primitive_jvps[all_reduce_p] = _jvp
ad.primitive_transposes[all_reduce_p] = _transpose
batching.primitive_batchers[all_reduce_p] = _batch
