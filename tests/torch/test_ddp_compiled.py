"""DistributedDataParallel and torch.compile: of the inner model, or of the wrapped model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch._dynamo  # import it once, before ranks are forked

import gradwire as gw
from support.ddp_ranks import DDP, step
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.small_models import assert_close, gradients, mlp

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("default")  # the compiler itself emits warnings
@pytest.mark.parametrize(("inside", "backend"), [(True, "aot_eager"), (False, "aot_eager"), (False, "inductor")])
def test_ddp_compiled_gives_the_gradients_of_the_plain_model(inside: bool, backend: str) -> None:
    """This test has one rank, because the compiler does not support ranks as threads."""

    def train(make: Any) -> dict[str, Any]:
        model = make()
        for seed in range(3):
            model.zero_grad()
            step(model, seed, 0)
        return {re.sub(r"_orig_mod\.|module\.", "", name): one for name, one in gradients(model).items()}

    with gw.init() as group:

        def compiled() -> Any:
            if inside:
                return DDP(torch.compile(mlp(), backend=backend), group)
            return torch.compile(DDP(mlp(), group), backend=backend)

        assert_close(train(compiled), train(mlp))


def trains_compiled(here: Here) -> None:
    torch.set_num_threads(1)
    with gw.init() as group:
        for inside in (mlp(), torch.compile(mlp(), backend="inductor")):
            model = DDP(inside, group)
            for seed in range(3):
                model.zero_grad()
                step(model, seed, group.rank)
            here.send(gradients=torch.cat([one.grad.flatten() for one in model.parameters()]).tolist())


def test_ddp_compiled_in_processes_gives_the_uncompiled_gradients(job: StartJob) -> None:
    with job(trains_compiled, 2) as ranks:
        plain, compiled = ([rank.receive()["gradients"] for rank in ranks] for _ in range(2))
        for rank in ranks:
            assert rank.ended() == 0, rank.output()
    assert plain[0] == plain[1]
    assert compiled[0] == compiled[1]
    assert compiled[0] == pytest.approx(plain[0], rel=1e-9)
