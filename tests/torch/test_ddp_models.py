"""DistributedDataParallel with tied, frozen and empty parameters, several dtypes, and buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradwire as gw
from support.ddp_ranks import DDP, averaged, normed, step
from support.ranks import run_ranks
from support.small_models import (
    assert_close,
    assert_same_bits,
    batch,
    filled,
    gradients,
    loss,
    mean_gradients,
    mlp,
    weights,
)

# -- kinds of parameters ----------------------------------------------------------------------------------------------


class Tied(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back, self.out = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False), nn.Linear(6, 3)
        self.back.weight = self.there.weight

    def forward(self, x: Any) -> Any:
        return self.out(nn.functional.linear(torch.tanh(self.there(x)), self.back.weight.T))


def test_ddp_tied_weights_have_one_gradient() -> None:
    def tied() -> Any:
        return filled(Tied(), 5).double()

    def train(group: gw.Group) -> tuple[dict[str, Any], list[str]]:
        ddp = DDP(tied(), group)
        for _ in range(2):
            ddp.zero_grad()
            step(ddp, 0, group.rank)
        return gradients(ddp.module), list(ddp.reducer.sync.gradients)

    of_ranks = run_ranks(gw.local_group(2), train)
    assert_same_bits([found for found, _ in of_ranks])
    assert_close(of_ranks[0][0], mean_gradients(tied, 2, lambda model, rank: step(model, 0, rank)))
    assert of_ranks[0][1] == ["there.weight", "out.weight", "out.bias"]


def test_ddp_frozen_layer_is_not_exchanged_and_unfreezing_raises_config_error() -> None:
    def train(group: gw.Group) -> dict[str, Any]:
        model = mlp()
        model[2].requires_grad_(False)
        ddp = DDP(model, group)
        step(ddp, 0, group.rank)
        assert "2.weight" not in ddp.reducer.sync.gradients
        found = gradients(model)
        model[0].requires_grad_(False)  # freezing more parameters is allowed
        ddp.zero_grad()
        step(ddp, 0, group.rank)
        assert model[0].weight.grad is None
        model[2].requires_grad_()
        with pytest.raises(gw.ConfigError, match=r"'2\.weight' was unfrozen after the model was wrapped"):
            step(ddp, 0, group.rank)
        return found

    found = run_ranks(gw.local_group(2), train)[0]
    expected = mean_gradients(mlp, 2, lambda model, rank: step(model, 0, rank))
    expected["2.weight"] = expected["2.bias"] = None
    assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64])
def test_ddp_each_dtype_gives_the_mean(dtype: Any) -> None:
    def backward(model: Any, rank: int) -> None:
        x, _ = batch(0, rank, dtype=dtype)
        model(x).abs().float().sum().backward()

    def make() -> Any:
        return mlp(0, dtype)

    found = averaged(make, 2, backward)
    assert found["0.weight"].dtype is dtype
    tolerance = {torch.bfloat16: 0.2, torch.float16: 0.02}.get(dtype, 1e-5)
    assert_close(found, mean_gradients(make, 2, backward), tolerance)


def test_ddp_mixed_dtypes_empty_parameters_and_channels_last_give_the_mean() -> None:
    class Mixed(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.head = nn.Linear(4, 2).double()
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, x: Any) -> Any:
            return {"out": [self.head(self.convolution(x).mean((2, 3)).double()).sum() + self.empty.sum()]}

    def make() -> Any:
        return filled(Mixed(), 2)

    def backward(model: Any, rank: int) -> None:
        x = np.random.default_rng(rank).normal(size=(2, 3, 6, 6))
        model(torch.from_numpy(x).float())["out"][0].backward()
        if isinstance(model, DDP):
            assert model.module.convolution.weight.grad.is_contiguous(memory_format=torch.channels_last)

    found, expected = averaged(make, 2, backward), mean_gradients(make, 2, backward)
    assert expected.pop("empty").shape == found.pop("empty").shape
    assert_close(found, expected, 1e-6)


# -- buffers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broadcast", [True, False])
def test_ddp_broadcast_buffers_gives_all_ranks_the_buffers_of_rank_0(broadcast: bool) -> None:
    def train(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(normed(), group, broadcast_buffers=broadcast)
        for seed in range(3):
            ddp.zero_grad()
            step(ddp, seed, group.rank)
        return weights(ddp.module)

    of_ranks = run_ranks(gw.local_group(2), train)
    alone = normed()
    for seed in range(3):
        step(alone, seed, 0)
    assert int(of_ranks[1]["1.num_batches_tracked"]) == 3
    assert torch.allclose(of_ranks[0]["1.running_mean"], alone[1].running_mean, rtol=0, atol=1e-12)
    same = torch.equal(of_ranks[0]["1.running_mean"], of_ranks[1]["1.running_mean"])
    assert same is broadcast


def test_ddp_replaced_buffer_is_still_broadcast() -> None:
    class Counter(nn.Linear):  # type: ignore[misc]  # torch is Any to mypy
        seen: Any

        def forward(self, x: Any) -> Any:
            self.seen = self.seen + x.shape[0]
            return super().forward(x)

    def train(group: gw.Group) -> int:
        model = Counter(6, 3).double()
        model.register_buffer("seen", torch.tensor(0))
        model.register_buffer("nothing", None)
        ddp = DDP(model, group)
        x, y = batch(0, group.rank, samples=5 + group.rank)
        loss(ddp(x), y).backward()
        return int(ddp.module.seen)

    assert run_ranks(gw.local_group(2), train) == [5, 5]


def test_ddp_forward_does_not_wait_for_other_ranks() -> None:
    """One rank may run a forward pass without the others, even in training mode and with gradients."""

    def train(group: gw.Group) -> None:
        ddp = DDP(normed(), group)
        if group.rank == 0:
            ddp(batch(0, 0)[0])
            with torch.no_grad():
                ddp(batch(0, 0)[0])
        step(ddp, 0, group.rank)

    run_ranks(gw.local_group(2), train)
