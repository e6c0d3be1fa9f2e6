"""Elastic torch runs: optimizers whose state has its own types, and skipped steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers need it: import it once, before the threads of the ranks start
from torch import nn

import gradwire as gw
from support.elastic_ranks import Joiner
from support.ranks import run_group

DDP = gw.torch.DistributedDataParallel


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_ddp_elastic_joiner_receives_the_state_of_each_optimizer(make: Any, dtype: Any) -> None:
    def train(group: gw.Group, meanwhile: Callable[[], None] | None = None) -> tuple[bool, str, int]:
        model = nn.Linear(3, 2).to(dtype)
        optimizer = make(model.parameters())
        run = gw.Elastic({"model": model, "optimizer": optimizer}, group, 1)
        ddp = DDP(model, run)
        for step in run.steps(6):
            with step:
                optimizer.zero_grad()
                ddp(torch.ones(2, 3, dtype=dtype)).sum().backward()
                optimizer.step()
                if meanwhile and step.index == 2:
                    meanwhile()
        return run.identical, run.digest, run.group.size

    joiner = Joiner(train)
    old, new = joiner.run(lambda group: train(group, joiner.let_in))
    assert old == [new, new]
    assert new[0]
    assert new[2] == 3


def test_ddp_elastic_buffers_are_equal_after_a_skipped_step() -> None:
    def train(group: gw.Group) -> list[bool]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        run = gw.Elastic({"model": model}, group, 1)
        ddp = DDP(model, run)
        same = []
        for step in run.steps(3):
            with step:
                ddp.zero_grad()
                loss = ddp(torch.full((5, 3), float(group.rank)) + torch.arange(15.0).reshape(5, 3)).sum()
                try:
                    (loss * float("nan") if step.index == 1 and group.rank else loss).backward()
                except gw.NotFinite:
                    same.append(False)
            same.append(run.identical)
        return same

    assert run_group(2, train) == [[True, False, True, True]] * 2
