"""DistributedDataParallel: averaged gradients, initial weights, different models and state dicts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from support.ddp_ranks import DDP, normed, step
from support.ranks import run_ranks
from support.small_models import assert_close, assert_same_bits, filled, gradients, mean_gradients, mlp, weights


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ddp_gradients_are_the_mean_over_ranks_in_every_backward(size: int, overlap: bool) -> None:
    def train(group: gw.Group) -> list[dict[str, Any]]:
        ddp, found = DDP(mlp(group.rank), group, bucket_mb=0.001, first_bucket_mb=0.0001, overlap=overlap), []
        for seed in range(4):
            ddp.zero_grad()
            step(ddp, seed, group.rank)
            found.append(gradients(ddp.module))
        return found

    of_ranks = run_ranks(gw.local_group(size), train)
    for seed in range(4):
        assert_same_bits([found[seed] for found in of_ranks])
        expected = mean_gradients(mlp, size, lambda model, rank, seed=seed: step(model, seed, rank))  # type: ignore[misc]
        assert_close(of_ranks[0][seed], expected)


def test_ddp_initial_parameters_and_buffers_are_those_of_rank_0() -> None:
    def begin(group: gw.Group) -> dict[str, Any]:
        model = filled(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), group.rank)
        model[1].running_mean.fill_(group.rank + 5)
        model[0].weight.requires_grad_(False)  # frozen parameters are broadcast too
        return weights(DDP(model, group).module)

    of_ranks = run_ranks(gw.local_group(3), begin)
    assert_same_bits(of_ranks)
    assert torch.equal(of_ranks[2]["1.running_mean"], torch.full((4,), 5.0))


def test_ddp_grad_is_a_view_of_the_exchange_buffer() -> None:
    def train(group: gw.Group) -> None:
        ddp = DDP(mlp(), group)
        for set_to_none in (True, False, True):
            ddp.zero_grad(set_to_none=set_to_none)
            step(ddp, 0, group.rank)
            for name, parameter in ddp.named_parameters():
                place = ddp.reducer.sync.gradients[name]
                assert parameter.grad.data_ptr() == place.__array_interface__["data"][0]
                assert parameter.grad.stride() == parameter.stride()

    run_ranks(gw.local_group(2), train)


def test_ddp_without_a_group_uses_the_group_of_init() -> None:
    with gw.init() as group:
        assert DDP(mlp()).group is group


# -- different models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: model.add_module("more", nn.Linear(2, 2)), "missing on rank 0"),
        (lambda model: model.to(torch.float32), r"item 1 is '0.weight': torch.float32\[12, 6\]"),
        (lambda model: model[0].weight.requires_grad_(False), "'0.weight': .*, frozen on rank 1"),
        (lambda model: model.register_buffer("steps", torch.zeros(2)), r"'steps': float32\[2\] on rank 1"),
    ],
)
def test_ddp_different_models_raise_on_all_ranks_and_the_group_stays_usable(change: Any, text: str) -> None:
    def begin(group: gw.Group) -> float:
        model = mlp()
        if group.rank == 1:
            change(model)
        with pytest.raises(gw.ConfigError, match=text) as failure:
            DDP(model, group)
        assert failure.value.culprit == 1
        return float(group.all_reduce(1.0))

    assert run_ranks(gw.local_group(3), begin) == [3.0] * 3


def test_ddp_model_without_trainable_memory_is_refused() -> None:
    with gw.init() as group:
        with pytest.raises(gw.ConfigError, match="no parameter that requires a gradient"):
            DDP(nn.ReLU(), group)
        with pytest.raises(gw.ConfigError, match="'weight' has no shape yet"):
            DDP(nn.LazyLinear(3), group)
        with pytest.raises(gw.ArrayError, match="'weight' is a tensor of meta"):
            DDP(nn.Linear(2, 2, device="meta"), group)


# -- names and states of the wrapped model ----------------------------------------------------------------------------


def test_ddp_names_have_no_prefix_and_prefixed_states_load() -> None:
    with gw.init() as group:
        ddp = DDP(normed(), group)
        plain = normed()
        assert list(ddp.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in ddp.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert [name for name, _ in ddp.named_buffers()] == [name for name, _ in plain.named_buffers()]
        assert next(ddp.parameters()) is ddp.module[0].weight
        plain.load_state_dict(ddp.state_dict())
        other = {f"module.{name}": value + 1 for name, value in plain.state_dict().items()}
        ddp.load_state_dict(other)
        assert torch.equal(ddp.module[0].weight, plain[0].weight + 1)
        with pytest.raises(RuntimeError, match="Missing key"):
            ddp.load_state_dict({})
        with pytest.raises(gw.ConfigError, match="load the state before you wrap the model"):
            ddp.load_state_dict(plain.state_dict(), assign=True)


def test_ddp_inside_another_module_adds_no_prefix() -> None:
    with gw.init() as group:
        outer = nn.ModuleDict({"body": DDP(mlp(), group), "head": nn.Linear(3, 2)})
        plain = nn.ModuleDict({"body": mlp(1), "head": nn.Linear(3, 2)})
        assert list(outer.state_dict()) == list(plain.state_dict())
        outer.load_state_dict(plain.state_dict())
        assert torch.equal(outer["body"].module[0].weight, plain["body"][0].weight)


def test_ddp_copy_or_pickle_raises_and_suggests_module() -> None:
    with gw.init() as group:
        ddp = DDP(mlp(), group)
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"copy or pickle its \.module"):
                attempt(ddp)
        copy.deepcopy(ddp.module)


def test_gw_torch_attribute_is_found_and_unknown_names_raise() -> None:
    assert gw.torch.DistributedDataParallel is DDP
    with pytest.raises(AttributeError, match="'gradwire' has no attribute 'tensorflow'"):
        gw.tensorflow  # type: ignore[attr-defined]
