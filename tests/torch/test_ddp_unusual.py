"""DistributedDataParallel in programs that change hooks, gradients, parts of the model or wrappers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers need it: import it once, before the threads of the ranks start
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from support.ranks import run_group
from support.small_models import assert_close, assert_same_bits, batch, filled, gradients, loss, mean_gradients, mlp

DDP = gw.torch.DistributedDataParallel
SMALL: Any = {"bucket_mb": 0.0001, "first_bucket_mb": 0.0001}  # a bucket for each tensor


def backward(model: Any, seed: int, rank: int) -> None:
    x, y = batch(seed, rank)
    loss(model(x), y).backward()


def expected(seed: int, size: int = 2) -> dict[str, Any]:
    return mean_gradients(mlp, size, lambda model, rank: backward(model, seed, rank))


class Interrupted(Exception):
    """Interrupts a backward pass."""


class CallInBackward(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """Return the input unchanged, and call a function when backward reaches this point."""

    @staticmethod
    def forward(ctx: Any, x: Any, when: Callable[[], None]) -> Any:
        ctx.when = when
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.when()
        return gradient, None


# -- gradients ---------------------------------------------------------------------------------------------------------


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def test_ddp_hooks_added_after_wrapping_run_before_the_mean() -> None:
    def run(group: gw.Group) -> list[dict[str, Any]]:
        ddp = DDP(mlp(), group, **SMALL)
        for parameter in ddp.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        found = []
        for seed in range(8):
            ddp.zero_grad()
            backward(ddp, seed, group.rank)
            found.append(gradients(ddp))
        return found

    for seed, of_ranks in enumerate(zip(*run_group(2, run), strict=True)):
        assert_same_bits(list(of_ranks))
        assert_close(of_ranks[0], {name: 0.5 * mean for name, mean in expected(seed).items()})


def test_ddp_clip_uses_the_current_grad_values() -> None:
    def run(group: gw.Group) -> tuple[float, float, dict[str, Any]]:
        ddp = DDP(mlp(), group)
        backward(ddp, 0, group.rank)
        for name, parameter in ddp.named_parameters():
            parameter.grad = None if name == "0.weight" else torch.full_like(parameter, 7.0)
        before = float(nn.utils.get_total_norm([one.grad for one in ddp.parameters() if one.grad is not None]))
        return before, ddp.clip(1.0), gradients(ddp)

    for before, norm, after in run_group(2, run):
        assert norm == pytest.approx(before)
        assert after.pop("0.weight") is None
        assert float(nn.utils.get_total_norm(after.values())) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("norm", [-1.0, float("nan")])
def test_ddp_clip_invalid_norm_raises_config_error(norm: float) -> None:
    with gw.init() as group:
        ddp = DDP(mlp(), group)
        backward(ddp, 0, 0)
        with pytest.raises(gw.ConfigError, match="max_norm is"):
            ddp.clip(norm)


def test_ddp_backward_with_create_graph_raises_unsupported_op() -> None:
    with gw.init() as group:
        ddp = DDP(mlp(), group)
        x, y = batch(0, 0)
        with pytest.raises(gw.UnsupportedOp, match="create_graph"):
            loss(ddp(x), y).backward(create_graph=True)


@pytest.mark.parametrize("samples", [-1, float("nan"), "2"])
def test_ddp_weigh_invalid_weight_raises_config_error(samples: Any) -> None:
    with gw.init() as group:
        ddp = DDP(mlp(), group)
        with pytest.raises(gw.ConfigError, match="weight"):
            ddp.weigh(samples)
        backward(ddp, 0, 0)


# -- interrupted backward passes, threads, uneven data -----------------------------------------------------------------


def test_ddp_second_graph_after_an_interrupted_backward_gives_the_mean() -> None:
    def run(group: gw.Group) -> dict[str, Any]:
        cuts = [True]

        def when() -> None:
            if cuts:
                cuts.pop()
                raise Interrupted

        model = mlp()
        model.append(nn.Identity())
        model[-1].forward = lambda x: CallInBackward.apply(x, when)
        ddp = DDP(model, group, **SMALL)
        x, y = batch(0, group.rank)
        one, two = ddp(x), ddp(x)
        with pytest.raises(Interrupted):
            loss(one, y).backward()
        loss(two, y).backward()
        return gradients(ddp)

    of_ranks = run_group(2, run)
    assert_same_bits(of_ranks)
    assert_close(of_ranks[0], expected(0))


def test_ddp_forward_in_another_thread_during_backward_is_harmless() -> None:
    def run(group: gw.Group) -> dict[str, Any]:
        model = mlp()
        looked = []

        def when() -> None:
            if group.rank == 0:
                thread = threading.Thread(target=lambda: looked.append(ddp(batch(1, 0)[0])))
                thread.start()
                thread.join()

        first = model[0].forward
        model[0].forward = lambda x: CallInBackward.apply(first(x), when)
        ddp = DDP(model, group, **SMALL)
        for seed in range(2):
            ddp.zero_grad()
            backward(ddp, seed, group.rank)
        assert len(looked) == (2 if group.rank == 0 else 0)
        return gradients(ddp)

    of_ranks = run_group(2, run)
    assert_same_bits(of_ranks)
    assert_close(of_ranks[0], expected(1))


def test_ddp_join_nan_can_be_skipped_while_other_ranks_have_no_data() -> None:
    def run(group: gw.Group) -> int:
        ddp = DDP(mlp(), group)
        skipped = 0
        with ddp.join():
            for seed in range(4 if group.rank else 1):
                ddp.zero_grad()
                x, y = batch(seed, group.rank)
                if seed == 2:
                    x[0, 0] = float("nan")
                try:
                    loss(ddp(x), y).backward()
                except gw.NotFinite:
                    skipped += 1
        return skipped

    assert run_group(2, run) == [0, 1]


class Twice(nn.Module):  # type: ignore[misc]
    """A layer that is used in two checkpointed parts, so that backward adds to its gradient twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.both, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.both, x, use_reentrant=True)
        return self.last(x)


def test_ddp_rank_that_sat_out_the_first_backward_learns_the_order_in_the_next() -> None:
    def make() -> Any:
        return filled(Twice(), 0).double()

    def run(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(make(), group, **SMALL)
        if group.rank:
            ddp.sit_out()
        else:
            ddp.weigh(1)
            backward(ddp, 0, 0)
        for seed in (1, 2):
            ddp.zero_grad()
            backward(ddp, seed, group.rank)
        return gradients(ddp)

    of_ranks = run_group(2, run)
    assert_same_bits(of_ranks)
    assert_close(of_ranks[0], mean_gradients(make, 2, lambda model, rank: backward(model, 2, rank)))


# -- wrappers ----------------------------------------------------------------------------------------------------------


def test_ddp_wrapping_a_model_again_disables_the_old_wrapper() -> None:
    def run(group: gw.Group) -> dict[str, Any]:
        model = mlp()
        old = DDP(model, group, **SMALL)
        backward(old, 0, group.rank)
        new = DDP(model, group, **SMALL)
        for seed in range(4):
            new.zero_grad()
            backward(new, seed, group.rank)
        with pytest.raises(gw.ConfigError, match="wrapped again"):
            old(batch(0, 0)[0])
        with torch.no_grad():
            old(batch(0, 0)[0])
        return gradients(new)

    of_ranks = run_group(2, run)
    assert_same_bits(of_ranks)
    assert_close(of_ranks[0], expected(3))


def test_ddp_failed_second_wrapping_leaves_the_old_wrapper_usable() -> None:
    def run(group: gw.Group) -> None:
        model = mlp()
        old = DDP(model, group)
        with pytest.raises(gw.ConfigError, match="differ"):
            DDP(model, group, bucket_mb=1 + group.rank)
        backward(old, 0, group.rank)

    run_group(2, run)


class Branches(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Any, skip: bool) -> Any:
        return self.always(x) if skip else self.sometimes(self.always(x))


@pytest.mark.parametrize("weighted", [False, True])
def test_ddp_two_wrapped_models_in_one_backward_give_the_mean(weighted: bool) -> None:
    def run(group: gw.Group) -> dict[str, Any]:
        one, two = DDP(mlp(), group, **SMALL), DDP(filled(Branches(), 1).double(), group, **SMALL)
        for seed in range(4):
            for model in (one, two):
                model.zero_grad()
                if weighted:
                    model.weigh(1)
            x, y = batch(seed, group.rank)
            loss(two(one(x), skip=seed > 1 and group.rank == 1), y).backward()
        return gradients(one) | gradients(two)

    def alone(rank: int) -> dict[str, Any]:
        one, two = mlp(), filled(Branches(), 1).double()
        x, y = batch(3, rank)
        loss(two(one(x), skip=rank == 1), y).backward()
        return gradients(one) | gradients(two)

    of_ranks = run_group(2, run)
    assert_same_bits(of_ranks)
    parts = [alone(rank) for rank in range(2)]
    means = {name: sum(one[name] for one in parts if one[name] is not None) / 2 for name in parts[0]}
    assert_close(of_ranks[0], means)


def test_ddp_repeated_wrapping_does_not_accumulate_hooks() -> None:
    class Recording(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            return x * self.weight, self.weight

    model = Recording()
    with gw.init() as group:
        for _ in range(3):
            ddp = DDP(model, group)
            for _ in range(5):
                ddp(torch.ones(3))[0].sum().backward()
        assert len(model.weight._backward_hooks) <= 3


# -- the model ---------------------------------------------------------------------------------------------------------


def replace_layer(model: Any) -> None:
    model[2] = nn.Linear(12, 8).double()


def replace_parameter(model: Any) -> None:
    model[2].bias = nn.Parameter(torch.zeros(8).double())


def add_parameter(model: Any) -> None:
    model.extra = nn.Parameter(torch.zeros(8).double())


def assign(model: Any) -> None:
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [replace_layer, replace_parameter, add_parameter, assign])
def test_ddp_parameter_changed_after_wrapping_raises_config_error(change: Callable[[Any], None]) -> None:
    with gw.init() as group:
        model = mlp()
        ddp = DDP(model, group)
        backward(ddp, 0, 0)
        change(model)
        with pytest.raises(gw.ConfigError, match="after it was wrapped"):
            ddp(batch(0, 0)[0])


def test_ddp_untrained_parts_may_be_replaced() -> None:
    with gw.init() as group:
        model = mlp()
        ddp = DDP(model, group)
        model[1], model[3] = nn.ReLU(), nn.Identity()
        model.extra = nn.Parameter(torch.zeros(2), requires_grad=False)
        for seed in range(2):
            backward(ddp, seed, 0)


def test_ddp_functional_call_raises_and_suggests_module() -> None:
    with gw.init() as group:
        ddp = DDP(nn.Linear(6, 3).double(), group)
        zeros = {name: torch.zeros_like(one) for name, one in ddp.named_parameters()}
        with pytest.raises(gw.ConfigError, match=r"\.module"):
            torch.func.functional_call(ddp, zeros, batch(0, 0)[0])
        assert not torch.func.functional_call(ddp.module, zeros, batch(0, 0)[0]).any()
        backward(ddp, 0, 0)


def test_ddp_buffers_of_different_dtypes_raise_mismatch() -> None:
    def run(group: gw.Group, ranks: tuple[int, ...]) -> Any:
        model = nn.Linear(3, 1)
        model.register_buffer("kept", torch.full((4,), 1.5))
        ddp = DDP(model, group)
        ddp(torch.ones(1, 3)).sum().backward()
        if group.rank in ranks:
            model.kept = torch.full((2, 2), 3, dtype=torch.int32)  # the same number of bytes
        ddp(torch.ones(1, 3)).sum().backward()
        return model.kept.tolist()

    assert run_group(2, lambda group: run(group, (0, 1))) == [[[3, 3], [3, 3]]] * 2
    with pytest.raises(gw.CollectiveMismatch):
        run_group(2, lambda group: run(group, (1,)))


def test_ddp_model_with_a_child_called_module_loads_its_state() -> None:
    class Inner(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 1)

    with gw.init() as group:
        outer = nn.ModuleDict({"net": DDP(Inner(), group)})
        state = {name: torch.full_like(one, 5.0) for name, one in outer.state_dict().items()}
        assert list(state) == ["net.module.weight", "net.module.bias"]
        outer.load_state_dict(state)
        assert outer["net"].module.module.bias.tolist() == [5.0]


def test_ddp_compression_of_complex_parameters_raises_array_error() -> None:
    with gw.init() as group, pytest.raises(gw.ArrayError, match="complex64 cannot be compressed"):
        DDP(nn.Linear(2, 1, dtype=torch.complex64), group, compression="f16")


def test_ddp_other_call_during_a_backward_names_the_lines_of_both_ranks() -> None:
    def train(group: gw.Group) -> str:
        ddp = DDP(mlp(), group)
        with pytest.raises(gw.CollectiveMismatch) as caught:
            if group.rank == 0:
                backward(ddp, 0, group.rank)
            else:
                group.all_reduce(np.ones(1))
        return str(caught.value)

    for text in run_group(2, train):
        assert text.count(Path(__file__).name) == 2, text  # not the lines of torch, which calls the hooks
