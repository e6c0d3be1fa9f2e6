"""Tensors whose memory does not hold their values are refused before any read or send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gradwire as gw
from gradwire.torch.backend.tensors import array_of
from support.ranks import run_group


class Wrapper(torch.Tensor):  # type: ignore[misc]  # torch is Any to mypy
    """A tensor subclass without its own memory, like DTensor."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class Named(torch.Tensor):  # type: ignore[misc]
    """A tensor subclass with memory."""


def fake() -> Any:
    with FakeTensorMode():
        return torch.ones(3)


def freed(dtype: torch.dtype) -> Any:
    tensor = torch.ones(6, dtype=dtype)[2:]
    tensor.untyped_storage().resize_(0)
    return tensor


ODD: dict[str, tuple[Any, str]] = {
    "a wrapper subclass": (lambda: Wrapper((3,)), "without memory"),
    "a fake": (fake, "without memory"),
    "negative": (lambda: torch.tensor([1 + 2j]).conj().imag, r"pass x\.resolve_conj\(\)\.resolve_neg\(\)"),
    "conjugate": (lambda: torch.tensor([1 + 2j]).conj(), r"pass x\.resolve_conj\(\)\.resolve_neg\(\)"),
    "zeros": (lambda: torch._efficientzerotensor(3), r"pass torch\.zeros_like\(x\)"),
    "freed": (lambda: freed(torch.float32), "storage was freed"),
    "freed halves": (lambda: freed(torch.bfloat16), "storage was freed"),
    "meta": (lambda: torch.ones(3, device="meta"), "memory"),
}


@pytest.mark.parametrize("kind", ODD)
def test_array_of_tensor_without_values_in_memory_raises_array_error(kind: str) -> None:
    make, reason = ODD[kind]
    with pytest.raises(gw.ArrayError, match=reason):
        array_of(make())
    with gw.init() as group, pytest.raises(gw.ArrayError, match=reason):
        group.all_reduce(make())


def test_array_of_tensor_subclass_with_memory_is_accepted() -> None:
    named = torch.arange(3.0).as_subclass(Named)
    assert array_of(named).tolist() == [0, 1, 2]
    with gw.init() as group:
        assert torch.equal(group.all_reduce(named), torch.arange(3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_weighted_mean_of_tensors_is_weighted_by_samples(dtype: torch.dtype) -> None:
    def mean(group: gw.Group) -> Any:
        return gw.weighted_mean(group, torch.tensor([2, 4 * group.rank], dtype=dtype), weight=1 + 2 * group.rank)

    for found in run_group(2, mean):
        assert found.tolist() == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_mean_tensor_with_a_graph_raises_and_suggests_detach(dtype: torch.dtype) -> None:
    with gw.init() as group, pytest.raises(gw.ArrayError, match=r"detach\(\)"):
        gw.weighted_mean(group, torch.ones(1, dtype=dtype, requires_grad=True).sum(), weight=1)
