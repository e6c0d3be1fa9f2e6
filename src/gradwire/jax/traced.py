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
from gradwire.group.schedule_runner import Site
from gradwire.jax import failures, reduction, trees

all_reduce_p = Primitive("gradwire_all_reduce")
all_reduce_p.multiple_results = True


@cache
def _order() -> Any:
    """Return JAX's effect for operations that must run in program order."""
    (effect,) = jax.make_jaxpr(partial(io_callback, lambda: None, None, ordered=True))().effects
    return effect


def _eager(*leaves: Any, names: tuple[str, ...], source: Any, op: str, check_finite: bool, site: Site) -> list[Any]:
    """Run the primitive outside of compiled programs: in plain Python, or in `grad` without `jit`."""
    results = reduction.reduced(source, names, reduction.values(leaves), op, check_finite, site)
    return trees.as_jax(results, leaves)


def _shapes(*leaves: Any, **_: Any) -> tuple[Sequence[Any], set[Any]]:
    return leaves, {_order()}


def _lower(
    ctx: Any, *operands: Any, names: tuple[str, ...], source: Any, op: str, check_finite: bool, site: Site
) -> Any:
    def callback(*arrays: Array) -> Sequence[Array]:
        with failures.stored_errors():
            return reduction.reduced(source, names, [np.asarray(array) for array in arrays], op, check_finite, site)

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


def _of_nonzero(values: Sequence[Any], names: tuple[str, ...], **how: Any) -> list[Any]:
    """All-reduce the values that are not symbolic zeros, which are the same on all ranks: all trace one program."""
    results = list(values)
    live = [at for at, value in enumerate(values) if type(value) is not ad.Zero]
    if live:
        reduced = all_reduce_p.bind(*(values[at] for at in live), names=tuple(names[at] for at in live), **how)
        for at, value in zip(live, reduced, strict=True):
            results[at] = value
    return results


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> tuple[list[Any], list[Any]]:
    op = how["op"]
    if op not in ("sum", "mean") and any(type(tangent) is not ad.Zero for tangent in tangents):
        raise UnsupportedOp(
            f"all_reduce(op={op!r}) has no gradient; only sum and mean have one. If no gradient is needed, pass "
            "jax.lax.stop_gradient(x)",
            operation="all_reduce",
        )
    return all_reduce_p.bind(*primals, **how), _of_nonzero(tangents, **how)


def _transpose(cotangents: Sequence[Any], *leaves: Any, **how: Any) -> list[Any]:
    """All-reduce the cotangents: the loss is the sum of all ranks' losses, and each operand is part of every result."""
    return _of_nonzero(cotangents, **how)


def _batch(leaves: Sequence[Any], axes: Sequence[Any], **how: Any) -> tuple[list[Any], Sequence[Any]]:
    return all_reduce_p.bind(*leaves, **how), axes


all_reduce_p.def_impl(_eager)
all_reduce_p.def_effectful_abstract_eval(_shapes)
mlir.register_lowering(all_reduce_p, _lower)
ad.primitive_jvps[all_reduce_p] = _jvp
ad.primitive_transposes[all_reduce_p] = _transpose
batching.primitive_batchers[all_reduce_p] = _batch
