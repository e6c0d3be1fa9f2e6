"""DistributedDataParallel in training loops: uneven data, checkpointing, autocast and failures."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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

# -- uneven data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [[3, 1, 5], [5, 1, 3], [2, 2, 2], [0, 2, 1]])
def test_ddp_join_uneven_data_averages_over_the_ranks_with_data(batches: list[int]) -> None:
    epochs = 2

    def train(group: gw.Group) -> tuple[dict[str, Any], int]:
        ddp = DDP(normed(), group)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        for epoch in range(epochs):
            with ddp.join(optimizer):
                for number in range(batches[group.rank]):
                    optimizer.zero_grad()
                    step(ddp, 10 * epoch + number, group.rank)
                    optimizer.step()
        moments = {name: optimizer.state[one]["exp_avg"] for name, one in ddp.named_parameters()}
        return weights(ddp.module) | {f"{name} moment": one for name, one in moments.items()}, group.size

    of_ranks = run_ranks(gw.local_group(3), train)
    assert_same_bits([found for found, _ in of_ranks])

    # The same training in one process: in each round, the mean over the ranks that have data.
    model = normed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        for number in range(max(batches)):
            active = [rank for rank in range(3) if number < batches[rank]]
            optimizer.zero_grad()
            before = {name: one.clone() for name, one in model.named_buffers()}
            for rank in reversed(active):  # reversed, so that the buffers are those of the lowest rank
                model.load_state_dict(before, strict=False)
                x, y = batch(10 * epoch + number, rank)
                (loss(model(x), y) / len(active)).backward()
            optimizer.step()
    found = {name: one for name, one in of_ranks[0][0].items() if not name.endswith(" moment")}
    assert_close(found, weights(model), 1e-9)


def test_ddp_join_error_inside_propagates() -> None:
    with gw.init() as group:
        ddp = DDP(mlp(), group)
        with pytest.raises(ZeroDivisionError), ddp.join():
            raise ZeroDivisionError
        step(ddp, 0, 0)


def test_ddp_weigh_gives_the_mean_over_samples() -> None:
    samples = [7, 0, 2]

    def train(group: gw.Group) -> dict[str, Any]:
        ddp, mine = DDP(mlp(), group), samples[group.rank]
        for seed in range(2):
            ddp.zero_grad()
            if not mine:
                ddp.sit_out()
                continue
            ddp.weigh(mine)
            x, y = batch(seed, group.rank, mine)
            loss(ddp(x), y).backward()
        return gradients(ddp.module)

    of_ranks = run_ranks(gw.local_group(3), train)
    assert_same_bits(of_ranks)
    model = mlp()
    data = [batch(1, rank, mine) for rank, mine in enumerate(samples) if mine]
    loss(model(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])).backward()
    assert_close(of_ranks[0], gradients(model))


# -- features of autograd ---------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A model with two checkpointed parts that share one layer."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.reentrant = use_reentrant
        self.first, self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def part(self, x: Any) -> Any:
        return torch.tanh(self.shared(torch.tanh(x)))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.part, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return self.last(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_ddp_checkpointed_layer_used_twice_gives_the_mean(use_reentrant: bool) -> None:
    def make() -> Any:
        return filled(Checkpointed(use_reentrant), 6).double()

    def train(group: gw.Group) -> list[dict[str, Any]]:
        ddp, found = DDP(make(), group, bucket_mb=1e-4, first_bucket_mb=1e-5), []
        for seed in range(3):
            ddp.zero_grad()
            step(ddp, seed, group.rank)
            found.append(gradients(ddp.module))
        return found

    of_ranks = run_ranks(gw.local_group(2), train)
    for seed in range(3):
        assert_same_bits([found[seed] for found in of_ranks])
        expected = mean_gradients(make, 2, lambda model, rank, seed=seed: step(model, seed, rank))  # type: ignore[misc]
        assert_close(of_ranks[0][seed], expected)


def test_ddp_checkpoint_of_the_wrapped_model_gives_the_mean() -> None:
    def backward(model: Any, rank: int) -> None:
        x, y = batch(0, rank)
        loss(checkpoint(model, x, use_reentrant=False, preserve_rng_state=False), y).backward()

    assert_close(averaged(mlp, 2, backward), mean_gradients(mlp, 2, backward))


def test_ddp_autocast_gives_the_mean_in_float32() -> None:
    def make() -> Any:
        return mlp(0, torch.float32)

    def backward(model: Any, rank: int) -> None:
        x, y = batch(0, rank, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        assert out.dtype is torch.bfloat16
        loss(out.float(), y).backward()

    found = averaged(make, 2, backward)
    assert found["0.weight"].dtype is torch.float32
    assert_close(found, mean_gradients(make, 2, backward), 1e-6)


def test_ddp_autograd_grad_exchanges_nothing_and_a_gradient_penalty_trains() -> None:
    def backward(model: Any, rank: int) -> None:
        x = batch(0, rank)[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope**2).sum().backward()

    def train(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(mlp(), group)
        for _ in range(2):
            ddp.zero_grad()
            for _ in range(
                group.rank
            ):  # a different number of calls on each rank, which would hang if they communicated
                x = batch(3, group.rank)[0].requires_grad_()
                torch.autograd.grad(ddp(x).sum(), x)
                torch.autograd.grad(ddp(x).sum(), list(ddp.parameters()))
            backward(ddp, group.rank)
        return gradients(ddp.module)

    of_ranks = run_ranks(gw.local_group(2), train)
    assert_same_bits(of_ranks)
    assert_close(of_ranks[0], mean_gradients(mlp, 2, backward))


def test_ddp_clip_uses_the_norm_of_the_mean() -> None:
    def train(group: gw.Group) -> tuple[float, dict[str, Any]]:
        ddp = DDP(mlp(), group)
        step(ddp, 0, group.rank)
        return ddp.clip(0.1), gradients(ddp.module)

    of_ranks = run_ranks(gw.local_group(2), train)
    assert of_ranks[0][0] == of_ranks[1][0]
    assert_same_bits([found for _, found in of_ranks])
    expected = mlp()
    for name, mean in mean_gradients(mlp, 2, lambda model, rank: step(model, 0, rank)).items():
        expected.get_parameter(name).grad = mean
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    assert of_ranks[0][0] == pytest.approx(float(norm), rel=1e-12)
    assert_close(of_ranks[0][1], gradients(expected))


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [0, 1]
)  # in the first backward pass, which learns the order, and in the second, which overlaps
def test_ddp_nan_on_one_rank_raises_on_all_and_training_can_continue(seed: int) -> None:
    def train(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(mlp(), group)
        for number in range(seed):
            step(ddp, number, group.rank)
        ddp.zero_grad()
        x, y = batch(seed, group.rank)
        if group.rank == 1:
            y[2, 1] = float("nan")
        with pytest.raises(gw.NotFinite, match="of rank 1 is not finite") as failure:
            loss(ddp(x), y).backward()
        assert failure.value.culprit == 1
        ddp.zero_grad()
        step(ddp, 7, group.rank)
        return gradients(ddp.module)

    of_ranks = run_ranks(gw.local_group(3), train)
    assert_same_bits(of_ranks)
    assert_close(of_ranks[0], mean_gradients(mlp, 3, lambda model, rank: step(model, 7, rank)))


def test_ddp_check_finite_false_does_not_raise() -> None:
    def train(group: gw.Group) -> bool:
        ddp = DDP(mlp(), group, check_finite=False)
        (ddp(batch(0, group.rank)[0]).sum() * (float("inf") if group.rank else 1.0)).backward()
        return bool(torch.isfinite(ddp.module[4].bias.grad).all())

    assert run_ranks(gw.local_group(2), train) == [False, False]


@pytest.mark.parametrize("compression", [None, "f16", "bf16", "int8", "topk"])
def test_ddp_contract_flipped_bit_is_named_at_the_next_check(compression: str | None) -> None:
    def train(group: gw.Group) -> tuple[Any, ...]:
        ddp = DDP(mlp(), group, compression=compression, contract_every=2)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for number in range(6):
            optimizer.zero_grad()
            try:
                step(ddp, number, group.rank)
            except gw.ReplicasDiverged as error:
                return number, error.culprit, error.tensor
            optimizer.step()
            if group.rank == 2 and number == 3:
                ddp.module[2].weight.data.view(torch.int64)[3, 5] ^= 1
        return ()

    assert run_ranks(gw.local_group(3), train) == [(5, 2, "2.weight")] * 3


def test_ddp_gradient_that_changes_after_completion_raises_config_error() -> None:
    class Sometimes(Checkpointed):
        twice = False

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for _ in range(2 if self.twice else 1):
                x = checkpoint(self.part, x, use_reentrant=True, preserve_rng_state=False)
            return self.last(x)

    with gw.init() as group:
        ddp = DDP(filled(Sometimes(True), 6).double(), group)
        step(ddp, 0, 0)
        ddp.module.twice = True
        ddp.zero_grad()
        with pytest.raises(gw.ConfigError, match=r"'shared\.\w+' after its exchange had begun.*overlap=False"):
            step(ddp, 1, 0)


def test_ddp_abort_on_one_rank_raises_aborted_in_backward() -> None:
    def train(group: gw.Group) -> str:
        ddp = DDP(mlp(), group)
        step(ddp, 0, group.rank)
        if group.rank == 1:
            group.abort("no more")
            return ""
        with pytest.raises(gw.Aborted) as failure:
            step(ddp, 1, group.rank)
        assert failure.value.culprit == 1
        return str(failure.value)

    assert "no more" in run_ranks(gw.local_group(2), train)[0]


def test_ddp_sparse_gradient_raises_unsupported_op() -> None:
    with gw.init() as group:
        ddp = DDP(nn.Embedding(5, 3, sparse=True), group)
        with pytest.raises(gw.UnsupportedOp, match="the gradient of 'weight' is sparse"):
            ddp(torch.tensor([1, 2])).sum().backward()


class FailingBackward(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    fails = True

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if FailingBackward.fails:
            raise ZeroDivisionError("in backward")
        return gradient


@pytest.mark.parametrize("begun", [False, True])
def test_ddp_interrupted_backward_is_dropped_unless_exchange_has_begun(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is discarded if no exchange has begun. Otherwise the process has to end, so that the others get an error."""
    with gw.init() as group:
        first, second = nn.Linear(6, 4), nn.Linear(4, 3)

        class Model(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = first, second

            def forward(self, x: Any) -> Any:
                return second(FailingBackward.apply(first(x)))

        ddp = DDP(Model().double(), group, bucket_mb=1e-4, first_bucket_mb=1e-5)
        if begun:
            monkeypatch.setattr(FailingBackward, "fails", False)
            step(ddp, 0, 0)
            ddp.zero_grad()
        monkeypatch.setattr(FailingBackward, "fails", True)
        with pytest.raises(ZeroDivisionError):
            step(ddp, 0, 0)
        monkeypatch.setattr(FailingBackward, "fails", False)
        ddp.zero_grad()
        if begun:
            with pytest.raises(gw.ConfigError, match="End this process, so that the other ranks get an error"):
                step(ddp, 0, 0)
        else:
            step(ddp, 0, 0)


def test_ddp_released_wrapper_is_freed() -> None:
    with gw.init() as group:
        model = mlp()
        ddp = DDP(model, group)
        step(ddp, 0, 0)
        gone = weakref.ref(ddp), weakref.ref(ddp.reducer)
        del ddp
        gc.collect()
        assert [one() for one in gone] == [None, None]
        step(model, 0, 0)  # the hooks are still there, but their reducer is gone
