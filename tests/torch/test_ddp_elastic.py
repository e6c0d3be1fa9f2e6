"""A torch model and its optimizer as the state of an elastic run that loses and gains members."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.training.state import State, memory_for
from support.elastic_ranks import Joiner, Left
from support.ranks import run_ranks
from support.small_models import assert_close, assert_same_bits, batch, filled, loss, weights

DDP = gw.torch.DistributedDataParallel
STEPS, SAMPLES = 8, 12


def model_of(dtype: Any, seed: int) -> Any:
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return filled(body, seed).to(dtype)


def train(group: gw.Group, dtype: Any, dies_at: int | None = None, meanwhile: Any = None) -> Any:
    model = model_of(dtype, group.rank + 10 * group.generation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run = gw.Elastic({"model": model, "optimizer": optimizer}, group, 1)
    ddp = DDP(model, run)
    seen = []
    try:
        for step in run.steps(STEPS):
            with step:
                if step.index == dies_at:
                    raise Left
                seen.append(step.index)
                x, y = batch(step.index, 0, SAMPLES, dtype)
                share = slice(run.group.rank, None, run.group.size)
                ddp.weigh(len(x[share]))
                loss(ddp(x[share]), y[share]).backward()
                optimizer.step()
                optimizer.zero_grad()  # a failed step leaves gradients, which must not count in the repeated step
                if meanwhile is not None:
                    meanwhile(step.index)
    except Left:
        run.close()
        return None
    assert run.identical
    return weights(model), run.digest, run.group.size, seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ddp_elastic_after_a_lost_member_the_others_finish_with_equal_weights(dtype: Any) -> None:
    results = run_ranks(gw.local_group(3), lambda group: train(group, dtype, dies_at=3 if group.rank == 1 else None))
    assert results.pop(1) is None
    assert_same_bits([found for found, *_ in results])
    assert len({digest for _, digest, *_ in results}) == 1
    assert [size for *_, size, _ in results] == [2, 2]
    assert int(results[0][0]["1.num_batches_tracked"]) == STEPS


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ddp_elastic_joiner_receives_the_state_without_a_checkpoint(dtype: Any) -> None:
    joiner = Joiner(lambda group: train(group, dtype))

    def let_in(step: int) -> None:
        if step == 3:
            joiner.let_in()

    results, joined = joiner.run(lambda group: train(group, dtype, meanwhile=let_in))
    assert_same_bits([found for found, *_ in [*results, joined]])
    assert {digest for _, digest, *_ in results} == {joined[1]}
    assert joined[2:] == (3, list(range(4, STEPS)))


def test_ddp_elastic_result_does_not_depend_on_the_members() -> None:
    """Without layers that depend on the whole batch, the result equals that of one process."""

    def go(group: gw.Group, dies_at: int | None = None) -> Any:
        model = filled(nn.Linear(6, 3), group.rank).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = gw.Elastic({"model": model, "optimizer": optimizer}, group, 1)
        ddp = DDP(model, run)
        try:
            for step in run.steps(STEPS):
                with step:
                    x, y = batch(step.index, 0, SAMPLES)
                    mine = slice(run.group.rank, None, run.group.size)
                    optimizer.zero_grad()
                    ddp.weigh(len(x[mine]))
                    loss(ddp(x[mine]), y[mine]).backward()
                    if step.index == dies_at:
                        raise Left
                    optimizer.step()
        except Left:
            run.close()
            return None
        return weights(model)

    results = run_ranks(gw.local_group(3), lambda group: go(group, 4 if group.rank == 2 else None))
    with gw.init() as group:
        alone = go(group)
    assert_same_bits(results[:2])
    assert_close(results[0], alone, 1e-9)


def test_state_bfloat16_tensors_are_restored_in_place() -> None:
    ours = {"w": torch.arange(5, dtype=torch.bfloat16), "n": torch.tensor(3.0, dtype=torch.bfloat16)}
    kept = ours["w"]
    skeleton, leaves = State({"w": kept + 1, "n": ours["n"] + 1}).take_apart()
    memory = memory_for(skeleton)
    for mine, theirs in zip(memory, leaves, strict=True):
        mine[...] = theirs.reshape(mine.shape)
    State(ours).put_together(skeleton, memory)
    assert ours["w"] is kept
    assert kept.tolist() == [1, 2, 3, 4, 5]
    assert (ours["n"].dtype, float(ours["n"])) == (torch.bfloat16, 4.0)
    fresh: dict[str, Any] = {}
    State(fresh).put_together(skeleton, memory)
    assert fresh["w"].dtype is torch.bfloat16
