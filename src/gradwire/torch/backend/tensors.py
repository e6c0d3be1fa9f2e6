"""Tensors as NumPy arrays over the same memory, and torch's reduce ops as ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch.distributed import ReduceOp

from gradwire.arrays import Array
from gradwire.errors import ArrayError, UnsupportedOp

# What NumPy has no name for travels as something of the same width. Of these only bfloat16 can be reduced.
_STAND_INS: dict[torch.dtype, tuple[torch.dtype, Any]] = {torch.bfloat16: (torch.int16, ml_dtypes.bfloat16)}
_STAND_INS |= {
    kind: (torch.uint8, np.uint8)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if (kind := getattr(torch, name, None)) is not None
}
if hasattr(torch, "complex32"):
    _STAND_INS[torch.complex32] = (torch.int32, np.int32)

_NAMES = {"SUM": "sum", "AVG": "mean", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}
_FOLDS: dict[str, Callable[[Array, Array], Array]] = {
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def array_of(tensor: torch.Tensor) -> Array:
    """The memory of a tensor as an array."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    stand_in = _STAND_INS.get(tensor.dtype)
    try:
        if stand_in is None:
            return tensor.numpy()  # type: ignore[no-any-return]
        array: Array = tensor.view(stand_in[0]).numpy()
        return array.view(stand_in[1])
    except (TypeError, RuntimeError) as error:
        raise ArrayError(f"{describe(tensor)} cannot be exchanged: {error}") from error


def arrays_of(tensors: Sequence[torch.Tensor]) -> list[Array]:
    return [array_of(tensor) for tensor in tensors]


def describe(tensor: torch.Tensor) -> str:
    """A tensor as error messages show it."""
    kind = str(tensor.dtype).removeprefix("torch.")
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    layout = "" if tensor.layout == torch.strided else f" ({tensor.layout})"
    return f"{kind}[{', '.join(map(str, tensor.shape))}]{layout}{where}"


class Reduction(NamedTuple):
    """A reduce op of torch: what to do before, our op, and what to do after.

    `fold`, where there is one, says how gathered arrays are combined instead: our collectives know no bitwise ops.
    """

    op: str
    factor: Any = None  # each rank's part is multiplied by it first
    divides: bool = False  # the sum of integers is divided in the end
    fold: Callable[[Array, Array], Array] | None = None

    @property
    def plain(self) -> bool:
        return self.factor is None and not self.divides and self.fold is None


_PLAIN = {name: Reduction(op) for name, op in _NAMES.items()}
_FOLDING = {name: Reduction("sum", fold=fold) for name, fold in _FOLDS.items()}
_DIVIDING = Reduction("sum", divides=True)
_KINDS = {getattr(ReduceOp, name): name for name in (*_NAMES, *_FOLDS, "PREMUL_SUM")}


def reduction(op: Any, tensor: torch.Tensor) -> Reduction:
    """What torch's op means for tensors like this one."""
    name = _KINDS.get(getattr(op, "op", op))
    if name is None:
        raise UnsupportedOp(f"gradwire has no reduce op {op!r}", operation="reduce")
    if tensor.dtype in _STAND_INS and tensor.dtype is not torch.bfloat16:
        raise UnsupportedOp(f"{describe(tensor)} cannot be reduced, only moved", operation="reduce")
    if name in _FOLDING:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            raise UnsupportedOp(f"{name} has no meaning for {describe(tensor)}", operation="reduce")
        return _FOLDING[name]
    if name == "PREMUL_SUM":
        return Reduction("sum", factor=_factor(op))
    if name == "AVG" and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return _DIVIDING
    return _PLAIN[name]


def _factor(op: Any) -> Any:
    """The factor of PREMUL_SUM, a number or a tensor; only pickling tells it."""
    state = op.__getstate__()
    factor = state[1]
    return factor.item() if isinstance(factor, torch.Tensor) and factor.numel() == 1 else factor
