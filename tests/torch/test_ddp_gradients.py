"""DistributedDataParallel with lazy conjugate, negated or zero gradients, and gradients of another size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from support.ddp_ranks import DDP
from support.ranks import run_ranks


class Conjugated(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A model whose gradient has torch's lazy conjugate flag: the reader must conjugate the values."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Any) -> Any:
        return (self.w.conj() * x).sum().abs()


class Negated(nn.Module):  # type: ignore[misc]
    """A model whose gradient has torch's lazy negative flag."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Any) -> Any:
        return (torch.complex(torch.zeros(()), self.w).conj() * (1 + 1j)).real * x.abs().sum()


@pytest.mark.parametrize("model", [Conjugated, Negated])
def test_ddp_lazy_conjugate_or_negated_gradient_is_resolved(model: type[nn.Module]) -> None:
    x = torch.tensor([1 + 2j, 3 - 1j, 2j, 5], dtype=torch.complex64)
    plain = model()
    plain(x).backward()
    assert plain.w.grad.is_conj() or plain.w.grad.is_neg()

    def train(group: gw.Group) -> Any:
        ddp = DDP(model(), group)
        for _ in range(2):
            ddp.zero_grad()
            ddp(x).backward()
        return ddp.module.w.grad

    for found in run_ranks(gw.local_group(2), train):
        assert torch.allclose(found, plain.w.grad)


class Unused(nn.Module):  # type: ignore[misc]
    """A model that does not use its first parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Parameter(torch.ones(1 << 20)), nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        return (self.used * x).sum()


def test_ddp_gradient_without_memory_counts_as_zeros() -> None:
    with gw.local_group(1)[0] as group:
        model = Unused()
        ddp = DDP(model, group)
        model.unused.grad = torch._efficientzerotensor((1 << 20,))
        ddp(torch.ones(4)).backward()
        assert not model.unused.grad.any()
        assert model.used.grad.tolist() == [1.0] * 4


def test_ddp_gradient_of_another_size_raises_runtime_error() -> None:
    with gw.local_group(1)[0] as group:
        model = Unused()
        ddp = DDP(model, group)
        model.unused.data = torch.zeros(3)
        model.unused.grad = torch.ones(3)
        with pytest.raises(RuntimeError, match="size"):
            ddp(torch.ones(4)).backward()
