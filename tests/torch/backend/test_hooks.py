"""DDP communication hooks of torch on the gradwire backend: identical bits on all ranks, and the results of Gloo."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP needs it: import it once, before ranks are forked
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.small_models import filled

Group = Any
SIZE = 3
STEPS = 6
KEPT: list[
    Group
] = []  # until the process ends: if one of Gloo's own threads let go of it last, it would wait for itself
VERY_LONG = 100.0  # seconds: a few are enough, unless the machine is busy


def low_rank(group: Group, **options: Any) -> Any:
    """PowerSGD that begins in the third backward pass, when DDP has rebuilt its buckets and no longer changes them."""
    return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2, **options)


def bf16(group, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations of hooks
    """torch's bfloat16 hook under another name, because torch reserves its own name for GPUs."""
    return default_hooks.bf16_compress_hook(group, bucket)


# name: state, hook, tolerance to Gloo (which adds 16-bit floats in 16 bits), least factor of saved bytes
HOOKS: dict[str, tuple[Callable[[Group], Any], Callable[..., Any], float, float]] = {
    "plain": (lambda group: group, default_hooks.allreduce_hook, 1e-6, 1.0),
    "fp16": (lambda group: group, default_hooks.fp16_compress_hook, 5e-4, 1.9),
    "bf16": (lambda group: group, bf16, 3e-3, 1.9),
    "PowerSGD": (low_rank, powerSGD_hook.powerSGD_hook, 1e-5, 8.0),
    "PowerSGD, cold": (
        lambda group: low_rank(group, warm_start=False, use_error_feedback=False),
        powerSGD_hook.powerSGD_hook,
        1e-5,
        8.0,
    ),
    "PowerSGD in fp16": (
        low_rank,
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        5e-4,
        16.0,
    ),
}


def model() -> Any:
    return filled(nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 64)), 1)


def trained(name: str, group: Group) -> tuple[Tensor, int]:
    """Return the weights after some steps, and the bytes that the gradwire group sent in the last step."""
    make_state, hook, _, _ = HOOKS[name]
    net = nn.parallel.DistributedDataParallel(model(), process_group=group)
    net.register_comm_hook(make_state(group), hook)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    random = torch.Generator().manual_seed(100 + dist.get_rank())
    before, wire = 0, dist.group.WORLD.group
    for _ in range(STEPS):
        before = wire.bytes_sent
        optimizer.zero_grad()
        net(torch.randn(8, 64, generator=random)).square().mean().backward()
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in net.parameters()]), wire.bytes_sent - before


def environ(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "GLOO_SOCKET_IFNAME": "lo"}


def join(file: str) -> None:
    torch.set_num_threads(1)
    rank, limit = int(os.environ["RANK"]), timedelta(seconds=VERY_LONG)
    dist.init_process_group("gradwire", f"file://{file}", rank=rank, world_size=SIZE, timeout=limit)


def hooked(here: Here, file: str) -> None:
    join(file)
    gloo = dist.new_group(backend="gloo")
    KEPT.append(gloo)
    results: dict[str, Any] = {}
    for name, (_, _, tolerance, _) in HOOKS.items():
        ours, nbytes = trained(name, dist.group.WORLD)
        theirs, _ = trained(name, gloo)
        results[name] = {
            "bits": hashlib.sha256(ours.numpy().tobytes()).hexdigest(),
            "apart": float((ours - theirs).abs().max()),
            "moved": float((ours - torch.cat([one.detach().flatten() for one in model().parameters()])).abs().max()),
            "bytes": nbytes,
        }
        assert torch.allclose(ours, theirs, rtol=0, atol=tolerance), (name, results[name])
    dist.destroy_process_group()
    here.send(**results)


@pytest.mark.slow
def test_ddp_compression_hooks_give_the_results_of_gloo(job: StartJob, tmp_path: Path) -> None:
    with job(hooked, SIZE, str(tmp_path / "store"), environ=environ) as ranks:
        reports = [rank.receive() for rank in ranks]
        for rank in ranks:
            assert rank.ended() == 0, rank.output()
    for name, (_, _, tolerance, times) in HOOKS.items():
        of_ranks = [one[name] for one in reports]
        assert len({one["bits"] for one in of_ranks}) == 1, name
        assert of_ranks[0]["moved"] > 10 * tolerance, name  # the weights have changed by much more than the tolerance
        for one, plain in zip(of_ranks, [one["plain"] for one in reports], strict=True):
            assert plain["bytes"] >= times * one["bytes"], name
    assert len({reports[0][name]["bits"] for name in HOOKS}) == len(HOOKS)


def dies_between(here: Here, file: str) -> None:
    """Kill one rank between the first and the second collective of a hook, which calls two as PowerSGD does."""
    join(file)
    net, backwards = nn.parallel.DistributedDataParallel(model()), 0

    def twice(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations of hooks
        def again(done: Any) -> Tensor:
            if dist.get_rank() == 1 and backwards == 3:
                os.kill(os.getpid(), SIGKILL)
            second: Tensor = dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]
            return second

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)

    net.register_comm_hook(None, twice)
    try:
        for backwards in range(4):  # noqa: B007 — read by the hook
            net(torch.ones(2, 64)).sum().backward()
    except Exception as error:
        here.send_error(error)
    dist.destroy_process_group()


def test_ddp_hook_rank_killed_between_two_calls_raises_peer_lost_on_the_others(job: StartJob, tmp_path: Path) -> None:
    with job(dies_between, SIZE, str(tmp_path / "store"), environ=environ) as ranks:
        for rank in (ranks[0], ranks[2]):
            report = rank.receive()
            assert (report["error"], report["culprit"]) == ("PeerLost", 1), report["text"]
            assert rank.ended() == 0, rank.output()
        assert ranks[1].ended() == -SIGKILL
