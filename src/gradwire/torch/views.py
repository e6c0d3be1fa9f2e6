"""Converts tensors to NumPy views of the same memory, and back, including bfloat16, which NumPy itself lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gradwire.arrays import Array, bfloat16
from gradwire.errors import ArrayError


def as_array(name: str, tensor: Any) -> Array:
    """Return a NumPy view of a tensor's memory; raise `ArrayError` if it is not a dense CPU tensor."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        where = str(tensor.device) if tensor.device.type != "cpu" else str(tensor.layout)
        raise ArrayError(f"{name!r} is a tensor of {where}: gradwire exchanges only dense tensors in CPU memory")
    plain = tensor.detach()
    try:
        if plain.dtype is torch.bfloat16:
            array: Array = plain.view(torch.int16).numpy().view(bfloat16())
            return array
        array = plain.numpy()
    except (TypeError, RuntimeError) as error:
        raise ArrayError(f"{name!r} cannot be exchanged: {error}") from error
    return array


def as_tensor(array: Array) -> Any:
    """Return a tensor that uses the memory of an array."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def laid_out_like(flat: Any, parameter: Any) -> Any:
    """Return a view of flat memory with the parameter's shape, and with its strides if these leave no gaps.

    Optimizers are fastest if a gradient has the memory layout of its parameter, for example channels_last.
    """
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        return flat.as_strided(parameter.size(), parameter.stride())
    return flat.view(parameter.size())


def in_memory_order(tensor: Any) -> Any:
    """Return a flat view of a tensor without gaps, in the order of its elements in memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def tensors_in(value: Any) -> list[Any]:
    """Return all tensors in the output of a model: a tensor, or a nested container or dataclass of tensors."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    if isinstance(value, (list, tuple)):
        return [tensor for entry in value for tensor in tensors_in(entry)]
    return []
