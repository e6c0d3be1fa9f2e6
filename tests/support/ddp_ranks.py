"""Ranks that train a wrapped torch model. Each rank is a thread, and backward runs on the thread that calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import gradwire as gw
from support.ranks import run_ranks
from support.small_models import assert_same_bits, batch, filled, gradients, loss

DDP = gw.torch.DistributedDataParallel


def step(model: Any, seed: int, rank: int) -> None:
    x, y = batch(seed, rank)
    loss(model(x), y).backward()


def normed() -> Any:
    """Return a model with buffers."""
    return filled(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), 4).double()


def averaged(
    make: Callable[[], Any], size: int, backward: Callable[[Any, int], None], times: int = 2
) -> dict[str, Any]:
    """Return the gradients after the last of `times` backwards, after checking that all ranks have the same bits.

    The first backward learns the order of the gradients; later ones overlap with communication.
    """

    def train(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(make(), group)
        for _ in range(times):
            ddp.zero_grad()
            backward(ddp, group.rank)
        return gradients(ddp.module)

    of_ranks = run_ranks(gw.local_group(size), train)
    assert_same_bits(of_ranks)
    return of_ranks[0]
