"""DistributedDataParallel with accumulated gradients and with unused parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from support.ddp_ranks import DDP, averaged, step
from support.ranks import run_ranks
from support.small_models import assert_close, assert_same_bits, batch, filled, gradients, loss, mean_gradients, mlp

# -- accumulated gradients --------------------------------------------------------------------------------------------


def test_ddp_no_sync_accumulates_until_the_next_backward() -> None:
    def train(group: gw.Group) -> tuple[dict[str, Any], dict[str, Any]]:
        ddp = DDP(mlp(), group)
        step(ddp, 9, group.rank)
        ddp.zero_grad()
        with ddp.no_sync():
            for seed in range(group.rank):  # a different number of backward passes on each rank: nothing is exchanged
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


def test_ddp_several_backwards_accumulate_gradients() -> None:
    def backward(model: Any, rank: int) -> None:
        for seed in range(3):
            step(model, seed, rank)

    assert_close(averaged(mlp, 2, backward, times=1), mean_gradients(mlp, 2, backward))


def test_ddp_two_forwards_with_one_or_two_backwards_give_the_mean() -> None:
    def twice(model: Any, rank: int) -> None:
        (x, y), (u, v) = batch(0, rank), batch(1, rank)
        first, second = loss(model(x), y), loss(model(u), v)
        (first + second).backward()
        third, fourth = loss(model(u), y), loss(model(x), v)
        third.backward()
        fourth.backward()

    assert_close(averaged(mlp, 2, twice, times=1), mean_gradients(mlp, 2, twice))


# -- unused parameters ------------------------------------------------------------------------------------------------


class Branches(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Any, way: str) -> Any:
        return x.sum() * 2 if way == "none" else getattr(self, way)(x)


def branches() -> Any:
    return filled(Branches(), 3).double()


def test_ddp_parameter_unused_on_all_ranks_has_no_gradient_else_zeros_count() -> None:
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


def test_ddp_rank_that_uses_no_parameter_takes_part() -> None:
    def backward(model: Any, rank: int) -> None:
        x = batch(0, rank)[0].requires_grad_()
        model(x, "none" if rank else "one").sum().backward()

    assert_close(averaged(branches, 2, backward), mean_gradients(branches, 2, backward))


@pytest.mark.parametrize("size", [2, 3])
def test_ddp_gradient_of_an_earlier_backward_stays_if_no_rank_adds_to_it(size: int) -> None:
    def train(group: gw.Group) -> tuple[Any, ...]:
        ddp, x = DDP(branches(), group), batch(0, group.rank)[0] / 3
        found = []
        for way in (
            "one",
            "two",
            "one" if group.rank else "two",
        ):  # in the last backward pass, each half is used by some ranks only
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


def test_ddp_no_sync_gradient_untouched_by_the_last_backward_is_averaged() -> None:
    def backward(model: Any, rank: int) -> None:
        x = batch(0, rank)[0]
        with model.no_sync() if isinstance(model, DDP) else torch.enable_grad():
            model(x, "one").sum().backward()
        model(x, "two").sum().backward()

    assert_close(averaged(branches, 2, backward), mean_gradients(branches, 2, backward))
