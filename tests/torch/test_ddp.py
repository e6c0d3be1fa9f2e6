"""DistributedDataParallel: the gradients of all ranks, averaged. Ranks are threads; backward runs in the thread it is
called from."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradwire as gw
from ranks import run_ranks
from small_models import (
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

DDP = gw.torch.DistributedDataParallel


def step(model: Any, seed: int, rank: int) -> None:
    x, y = batch(seed, rank)
    loss(model(x), y).backward()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_the_mean_over_ranks_in_every_backward(size: int, overlap: bool) -> None:
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


def test_all_begin_with_the_parameters_and_buffers_of_rank_0() -> None:
    def begin(group: gw.Group) -> dict[str, Any]:
        model = filled(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), group.rank)
        model[1].running_mean.fill_(group.rank + 5)
        model[0].weight.requires_grad_(False)  # frozen ones too
        return weights(DDP(model, group).module)

    of_ranks = run_ranks(gw.local_group(3), begin)
    assert_same_bits(of_ranks)
    assert torch.equal(of_ranks[2]["1.running_mean"], torch.full((4,), 5.0))


def test_gradients_are_held_once_where_they_are_exchanged() -> None:
    def train(group: gw.Group) -> None:
        ddp = DDP(mlp(), group)
        for set_to_none in (True, False, True):
            ddp.zero_grad(set_to_none=set_to_none)
            step(ddp, 0, group.rank)
            for name, parameter in ddp.named_parameters():
                place = ddp._reducer.sync.gradients[name]
                assert parameter.grad.data_ptr() == place.__array_interface__["data"][0]
                assert parameter.grad.stride() == parameter.stride()

    run_ranks(gw.local_group(2), train)


def test_without_a_group_it_takes_that_of_init() -> None:
    with gw.init() as group:
        assert DDP(mlp()).group is group


# -- ranks that differ ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.add_module("more", nn.Linear(2, 2)), "nothing more on rank 0"),
        (lambda model: model.to(torch.float32), r"number 1 is '0.weight': torch.float32\[12, 6\]"),
        (lambda model: model[0].weight.requires_grad_(False), "'0.weight': .*, frozen on rank 1"),
        (lambda model: model.register_buffer("steps", torch.zeros(2)), r"'steps': float32\[2\] on rank 1"),
    ],
)
def test_models_that_differ_are_named_on_all_ranks_and_the_group_goes_on(change: Any, told: str) -> None:
    def begin(group: gw.Group) -> float:
        model = mlp()
        if group.rank == 1:
            change(model)
        with pytest.raises(gw.ConfigError, match=told) as failure:
            DDP(model, group)
        assert failure.value.culprit == 1
        return float(group.all_reduce(1.0))

    assert run_ranks(gw.local_group(3), begin) == [3.0] * 3


def test_a_model_without_anything_to_train_is_refused() -> None:
    with gw.init() as group:
        with pytest.raises(gw.ConfigError, match="no parameter that is trained"):
            DDP(nn.ReLU(), group)
        with pytest.raises(gw.ConfigError, match="'weight' has no shape yet"):
            DDP(nn.LazyLinear(3), group)
        with pytest.raises(gw.ArrayError, match="'weight' is a tensor of meta"):
            DDP(nn.Linear(2, 2, device="meta"), group)


# -- accumulating -----------------------------------------------------------------------------------------------------


def test_in_no_sync_nothing_is_exchanged_and_the_next_backward_takes_all() -> None:
    def train(group: gw.Group) -> tuple[dict[str, Any], dict[str, Any]]:
        ddp = DDP(mlp(), group)
        step(ddp, 9, group.rank)
        ddp.zero_grad()
        with ddp.no_sync():
            for seed in range(group.rank):  # other numbers on each rank: nothing is exchanged
                step(ddp, seed, group.rank)
        assert ddp.require_backward_grad_sync
        alone = gradients(ddp.module)
        step(ddp, 7, group.rank)
        return alone, gradients(ddp.module)

    def alone(model: Any, rank: int) -> None:
        for seed in (*range(rank), 7):
            step(model, seed, rank)

    of_ranks = run_ranks(gw.local_group(3), train)
    assert of_ranks[0][0]["0.weight"] is None
    assert not torch.equal(of_ranks[1][0]["0.weight"], of_ranks[2][0]["0.weight"])
    assert_same_bits([found for _, found in of_ranks])
    assert_close(of_ranks[0][1], mean_gradients(mlp, 3, alone))


def test_several_backwards_add_up() -> None:
    def backward(model: Any, rank: int) -> None:
        for seed in range(3):
            step(model, seed, rank)

    def train(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(mlp(), group)
        backward(ddp, group.rank)
        return gradients(ddp.module)

    of_ranks = run_ranks(gw.local_group(2), train)
    assert_same_bits(of_ranks)
    assert_close(of_ranks[0], mean_gradients(mlp, 2, backward))


def test_two_forwards_and_one_backward_or_two() -> None:
    def twice(model: Any, rank: int) -> None:
        (x, y), (u, v) = batch(0, rank), batch(1, rank)
        first, second = loss(model(x), y), loss(model(u), v)
        (first + second).backward()
        third, fourth = loss(model(u), y), loss(model(x), v)
        third.backward()
        fourth.backward()

    def train(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(mlp(), group)
        twice(ddp, group.rank)
        return gradients(ddp.module)

    of_ranks = run_ranks(gw.local_group(2), train)
    assert_same_bits(of_ranks)
    assert_close(of_ranks[0], mean_gradients(mlp, 2, twice))


# -- parameters that are not used -------------------------------------------------------------------------------------


class Branches(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Any, way: str) -> Any:
        return x.sum() * 2 if way == "none" else getattr(self, way)(x)


def branches() -> Any:
    return filled(Branches(), 3).double()


def test_what_no_rank_uses_has_no_gradient_and_what_one_does_not_use_is_zero_there() -> None:
    ways = [["one", "two"], ["two", "two"], ["two", "one"], ["one", "one"]]

    def train(group: gw.Group) -> list[dict[str, Any]]:
        ddp, found = DDP(branches(), group), []
        for turn in ways:
            ddp.zero_grad()
            ddp(batch(0, group.rank)[0], turn[group.rank]).sum().backward()
            found.append(gradients(ddp.module))
        return found

    of_ranks = run_ranks(gw.local_group(2), train)
    for number, turn in enumerate(ways):

        def backward(model: Any, rank: int, turn: list[str] = turn) -> None:
            model(batch(0, rank)[0], turn[rank]).sum().backward()

        assert_same_bits([found[number] for found in of_ranks])
        assert_close(of_ranks[0][number], mean_gradients(branches, 2, backward))
        assert of_ranks[0][number]["never.weight"] is None


def test_a_rank_that_uses_no_parameter_takes_part() -> None:
    def backward(model: Any, rank: int) -> None:
        x = batch(0, rank)[0].requires_grad_()
        model(x, "none" if rank else "one").sum().backward()

    def train(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(branches(), group)
        for _ in range(2):
            ddp.zero_grad()
            backward(ddp, group.rank)
        return gradients(ddp.module)

    of_ranks = run_ranks(gw.local_group(2), train)
    assert_same_bits(of_ranks)
    assert_close(of_ranks[0], mean_gradients(branches, 2, backward))


@pytest.mark.parametrize("size", [2, 3])
def test_a_gradient_from_an_earlier_backward_stays_when_nobody_adds_to_it(size: int) -> None:
    def train(group: gw.Group) -> tuple[Any, ...]:
        ddp, x = DDP(branches(), group), batch(0, group.rank)[0] / 3
        found = []
        for way in ("one", "two", "one" if group.rank else "two"):  # the last: only some add to either
            ddp(x, way).sum().backward()
            found.append(gradients(ddp.module))
        return tuple(found)

    def backward(model: Any, rank: int) -> None:
        for way in ("one", "two", "one" if rank else "two"):
            model(batch(0, rank)[0] / 3, way).sum().backward()

    of_ranks = run_ranks(gw.local_group(size), train)
    assert_same_bits([found[2] for found in of_ranks])
    first, second, _ = of_ranks[1]
    assert torch.equal(second["one.weight"], first["one.weight"])
    assert_close(of_ranks[0][2], mean_gradients(branches, size, backward))


def test_what_was_added_in_no_sync_counts_although_the_last_backward_does_not_touch_it() -> None:
    def backward(model: Any, rank: int) -> None:
        x = batch(0, rank)[0]
        with model.no_sync() if isinstance(model, DDP) else torch.enable_grad():
            model(x, "one").sum().backward()
        model(x, "two").sum().backward()

    def train(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(branches(), group)
        for _ in range(2):
            ddp.zero_grad()
            backward(ddp, group.rank)
        return gradients(ddp.module)

    of_ranks = run_ranks(gw.local_group(2), train)
    assert_same_bits(of_ranks)
    assert_close(of_ranks[0], mean_gradients(branches, 2, backward))


# -- shapes of models -------------------------------------------------------------------------------------------------


class Tied(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back, self.out = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False), nn.Linear(6, 3)
        self.back.weight = self.there.weight

    def forward(self, x: Any) -> Any:
        return self.out(nn.functional.linear(torch.tanh(self.there(x)), self.back.weight.T))


def test_tied_weights_have_one_gradient() -> None:
    def tied() -> Any:
        return filled(Tied(), 5).double()

    def train(group: gw.Group) -> tuple[dict[str, Any], list[str]]:
        ddp = DDP(tied(), group)
        for _ in range(2):
            ddp.zero_grad()
            step(ddp, 0, group.rank)
        return gradients(ddp.module), list(ddp._reducer.sync.gradients)

    of_ranks = run_ranks(gw.local_group(2), train)
    assert_same_bits([found for found, _ in of_ranks])
    assert_close(of_ranks[0][0], mean_gradients(tied, 2, lambda model, rank: step(model, 0, rank)))
    assert of_ranks[0][1] == ["there.weight", "out.weight", "out.bias"]


def test_frozen_layers_have_no_place_and_are_found_when_they_thaw() -> None:
    def train(group: gw.Group) -> dict[str, Any]:
        model = mlp()
        model[2].requires_grad_(False)
        ddp = DDP(model, group)
        step(ddp, 0, group.rank)
        assert "2.weight" not in ddp._reducer.sync.gradients
        found = gradients(model)
        model[0].requires_grad_(False)  # freezing more is fine
        ddp.zero_grad()
        step(ddp, 0, group.rank)
        assert model[0].weight.grad is None
        model[2].requires_grad_()
        with pytest.raises(gw.ConfigError, match=r"'2\.weight' was frozen when the model was wrapped"):
            step(ddp, 0, group.rank)
        return found

    found = run_ranks(gw.local_group(2), train)[0]
    expected = mean_gradients(mlp, 2, lambda model, rank: step(model, 0, rank))
    expected["2.weight"] = expected["2.bias"] = None
    assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64])
def test_dtypes(dtype: Any) -> None:
    def backward(model: Any, rank: int) -> None:
        x, _ = batch(0, rank, dtype=dtype)
        model(x).abs().float().sum().backward()

    def make() -> Any:
        return mlp(0, dtype)

    def train(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(make(), group)
        for _ in range(2):
            ddp.zero_grad()
            backward(ddp, group.rank)
        return gradients(ddp.module)

    of_ranks = run_ranks(gw.local_group(2), train)
    assert_same_bits(of_ranks)
    assert of_ranks[0]["0.weight"].dtype is dtype
    tolerance = {torch.bfloat16: 0.2, torch.float16: 0.02}.get(dtype, 1e-5)
    assert_close(of_ranks[0], mean_gradients(make, 2, backward), tolerance)


def test_several_dtypes_empty_parameters_and_channels_last() -> None:
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

    def train(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(make(), group)
        for _ in range(2):
            ddp.zero_grad()
            backward(ddp, group.rank)
        weight = ddp.module.convolution.weight
        assert weight.grad.is_contiguous(memory_format=torch.channels_last)
        return gradients(ddp.module)

    of_ranks = run_ranks(gw.local_group(2), train)
    assert_same_bits(of_ranks)
    expected = mean_gradients(make, 2, backward)
    assert expected.pop("empty").shape == of_ranks[0].pop("empty").shape
    assert_close(of_ranks[0], expected, 1e-6)


# -- buffers ----------------------------------------------------------------------------------------------------------


def normed() -> Any:
    return filled(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), 4).double()


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_are_those_of_rank_0_after_each_backward(broadcast: bool) -> None:
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


def test_a_buffer_that_is_replaced_is_still_found() -> None:
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


def test_forward_never_waits_for_other_ranks() -> None:
    """One rank may evaluate alone, in training mode and with gradients, too."""

    def train(group: gw.Group) -> None:
        ddp = DDP(normed(), group)
        if group.rank == 0:
            ddp(batch(0, 0)[0])
            with torch.no_grad():
                ddp(batch(0, 0)[0])
        step(ddp, 0, group.rank)

    run_ranks(gw.local_group(2), train)


# -- as if it were not wrapped ----------------------------------------------------------------------------------------


def test_names_have_no_prefix_and_states_with_one_are_understood() -> None:
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
        with pytest.raises(gw.ConfigError, match="load first, then wrap it"):
            ddp.load_state_dict(plain.state_dict(), assign=True)


def test_inside_another_module_there_is_no_prefix_either() -> None:
    with gw.init() as group:
        outer = nn.ModuleDict({"body": DDP(mlp(), group), "head": nn.Linear(3, 2)})
        plain = nn.ModuleDict({"body": mlp(1), "head": nn.Linear(3, 2)})
        assert list(outer.state_dict()) == list(plain.state_dict())
        outer.load_state_dict(plain.state_dict())
        assert torch.equal(outer["body"].module[0].weight, plain["body"][0].weight)


def test_it_cannot_be_copied_and_says_what_can() -> None:
    with gw.init() as group:
        ddp = DDP(mlp(), group)
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"copy or pickle its \.module"):
                attempt(ddp)
        copy.deepcopy(ddp.module)


def test_gw_torch_is_found_by_name() -> None:
    assert gw.torch.DistributedDataParallel is DDP
    with pytest.raises(AttributeError, match="'gradwire' has no attribute 'tensorflow'"):
        gw.tensorflow  # type: ignore[attr-defined]
