"""Ranks that train a wrapped torch model: each is a thread, and backward runs in the thread it is called from."""

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
    """A model with buffers."""
    return filled(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), 4).double()


def averaged(
    make: Callable[[], Any], size: int, backward: Callable[[Any, int], None], times: int = 2
) -> dict[str, Any]:
    """The gradients that all ranks have after the last backward, in the same bits; the first learns, others overlap."""

    def train(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(make(), group)
        for _ in range(times):
            ddp.zero_grad()
            backward(ddp, group.rank)
        return gradients(ddp.module)

    of_ranks = run_ranks(gw.local_group(size), train)
    assert_same_bits(of_ranks)
    return of_ranks[0]
