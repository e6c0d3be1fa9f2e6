"""Converts tensors to NumPy arrays over the same memory, and torch's reduce ops to gradwire's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import ReduceOp

from gradwire.arrays import Array, bfloat16, torch_objection
from gradwire.errors import ArrayError, UnsupportedOp


def _types() -> dict[torch.dtype, np.dtype[Any]]:
    same = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128"
    types = {getattr(torch, name): np.dtype(name) for name in same.split()}
    types[torch.bfloat16] = bfloat16()
    # These types cannot be reduced, but they can be moved, as unsigned integers of the same width.
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32"):
        if hasattr(torch, name):
            kind = getattr(torch, name)
            _ONLY_MOVED.add(kind)
            types[kind] = np.dtype(f"u{kind.itemsize}")
    return types


_ONLY_MOVED: set[torch.dtype] = set()
_TYPES = _types()
_NAMES = {"SUM": "sum", "AVG": "mean", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}
_FOLDS: dict[str, Callable[[Array, Array], Array]] = {
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


class _Memory(ctypes.c_char * (1 << 62)):  # type: ignore[misc]  # NumPy only checks that it is long enough
    """The memory at an address, with a reference to the tensor that owns it.

    `tensor.numpy()` is not used, because it marks the tensor's storage as not resizable for good. FSDP needs to resize
    storages to free memory early.
    """

    tensor: torch.Tensor


def array_of(tensor: torch.Tensor) -> Array:
    """Return the memory of a tensor as an array; raise `ArrayError` if that is not possible."""
    if type(tensor) is not torch.Tensor and hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()  # the result of a functional collective, which may still be running
    dtype = _TYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or not tensor.is_cpu:
        raise ArrayError(f"{describe(tensor)} cannot be exchanged: gradwire supports only dense tensors in CPU memory")
    objection = torch_objection(tensor)
    if objection is not None:
        raise ArrayError(f"{describe(tensor)} {objection}")
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return np.empty(shape, dtype)
    memory = _Memory.from_address(tensor.data_ptr())
    memory.tensor = tensor
    if tensor.is_contiguous():
        return np.ndarray(shape, dtype, memory)
    return np.ndarray(shape, dtype, memory, strides=tuple(step * dtype.itemsize for step in tensor.stride()))


def arrays_of(tensors: Sequence[torch.Tensor]) -> list[Array]:
    return [array_of(tensor) for tensor in tensors]


def describe(tensor: torch.Tensor) -> str:
    """Describe a tensor for error messages."""
    kind = str(tensor.dtype).removeprefix("torch.")
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    layout = "" if tensor.layout == torch.strided else f" ({tensor.layout})"
    return f"{kind}[{', '.join(map(str, tensor.shape))}]{layout}{where}"


class Reduction(NamedTuple):
    """A reduce op of torch in terms of gradwire's: a step before, the op, and a step after.

    With `fold`, the arrays of all ranks are gathered and combined by that function instead: gradwire's collectives have
    no bitwise ops.
    """

    op: str
    factor: Any = None  # each rank's values are multiplied by it before the exchange
    divides: bool = False  # the sum of integers is divided by the number of ranks afterwards
    fold: Callable[[Array, Array], Array] | None = None

    @property
    def plain(self) -> bool:
        """Whether gradwire's op alone is enough."""
        return self.factor is None and not self.divides and self.fold is None


_PLAIN = {name: Reduction(op) for name, op in _NAMES.items()}
_FOLDING = {name: Reduction("sum", fold=fold) for name, fold in _FOLDS.items()}
_DIVIDING = Reduction("sum", divides=True)
_KINDS = {getattr(ReduceOp, name): name for name in (*_NAMES, *_FOLDS, "PREMUL_SUM")}


def reduction(op: Any, tensor: torch.Tensor) -> Reduction:
    """Convert torch's reduce op for a tensor of this dtype; raise `UnsupportedOp` if there is no equivalent."""
    name = _KINDS.get(getattr(op, "op", op))
    if name is None:
        raise UnsupportedOp(f"gradwire has no reduce op {op!r}", operation="reduce")
    if tensor.dtype in _ONLY_MOVED:
        raise UnsupportedOp(f"{describe(tensor)} cannot be reduced, only moved", operation="reduce")
    if name in _FOLDING:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            raise UnsupportedOp(f"{name} is not defined for {describe(tensor)}", operation="reduce")
        return _FOLDING[name]
    if name == "PREMUL_SUM":
        return Reduction("sum", factor=_factor(op))
    if name == "AVG" and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return _DIVIDING
    return _PLAIN[name]


def _factor(op: Any) -> Any:
    """Return the factor of PREMUL_SUM, a number or a tensor. torch exposes it only through pickling."""
    state = op.__getstate__()
    factor = state[1]
    return factor.item() if isinstance(factor, torch.Tensor) and factor.numel() == 1 else factor
